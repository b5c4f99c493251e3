"""One example as each rank runs it: its values, its draws, its notes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

from arraycomm._communicator import Communicator
from arraycomm.testing._arrays.array_case import ArrayCase
from arraycomm.testing._arrays.rank_values import set_rank_count
from arraycomm.testing._hypothesis import Record, recording
from arraycomm.testing._internals import bcast_from_root
from arraycomm.testing._ranks.transfer import load

Test = Callable[..., Any]


class Draw(Protocol):
    """Draws on behalf of all ranks, on rank 0; returns the value as `dump` encodes it."""

    def __call__(self, strategy: Any, label: str | None) -> bytes: ...


class Example(NamedTuple):
    """All that a rank needs to run an example; rank 0 sends it to the others."""

    size: int
    # The drawn arguments as `dump` encodes them, and the names of those that are `st.data()`.
    arguments: bytes
    data: tuple[str, ...]
    final: bool
    timeout: float
    # The call of the test, for reports.
    call: str
    # Those of the arrays that were drawn so far.
    frameworks: list[str]


@cache
def import_framework(name: str) -> None:
    """Make a first array of a framework: others may not wait in an example for that long."""
    ArrayCase("int8", (1,), framework=name).build()


class RankData:
    """`st.data()` as a test gets it: a draw is a collective, and every rank gets its value.

    Rank 0 draws; from a `per_rank` strategy each rank gets its own value.
    """

    def __init__(self, comm: Communicator, draw: Draw | None) -> None:
        self._comm = comm
        self._draw = draw

    def draw(self, strategy: Any, label: Any = None) -> Any:
        """Draw a value, in step with the other ranks."""
        text = None if label is None else str(label)

        def drawn() -> bytes | None:
            return None if self._draw is None else self._draw(strategy, text)

        return load(bcast_from_root(self._comm, drawn, text), self._comm.rank)

    def __repr__(self) -> str:
        return "data(...)"


@dataclass
class Part:
    """One rank's part in an example, and how it ended."""

    rank: int
    record: Record
    error: BaseException | None = None
    # The communicator's last step that went well.
    step: int = 0
    result: Any = None


def play(
    comm: Communicator, example: Example, test: Test, draw: Draw | None, record: Record
) -> Any:
    """Call the test on this rank."""
    __tracebackhide__ = True
    set_rank_count(comm.size)
    arguments = load(example.arguments, comm.rank)
    for name in example.data:
        arguments[name] = RankData(comm, draw if comm.rank == 0 else None)
    with recording(record, final=example.final):
        return test(comm=comm, **arguments)
