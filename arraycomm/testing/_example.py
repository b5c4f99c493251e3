"""One example as each rank plays it: its values, its draws, its notes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from arraycomm._collectives.objects import bcast_object
from arraycomm._collectives.operation import Call
from arraycomm._communicator import Communicator
from arraycomm.testing._hypothesis import Record, recording
from arraycomm.testing._values import load, set_rank_count


class Draw(Protocol):
    """Draws on behalf of all ranks, on rank 0; returns the value as it travels."""

    def __call__(self, strategy: Any, label: str | None) -> bytes: ...


class Example(NamedTuple):
    """What rank 0 tells the others of an example: all that they need to play it."""

    size: int
    # The drawn arguments, as they travel, and the names of those that are `st.data()`.
    arguments: bytes
    data: tuple[str, ...]
    final: bool
    timeout: float
    # How the test was called, for reports.
    said: str


class RankData:
    """`st.data()` as a test gets it: a draw is a collective, and every rank gets its value.

    Rank 0 draws; from a `per_rank` strategy each rank gets its own value.
    """

    def __init__(self, comm: Communicator, draw: Draw | None) -> None:
        self._comm = comm
        self._draw = draw

    def draw(self, strategy: Any, label: Any = None) -> Any:
        """Draw a value, in step with the other ranks."""
        data = self._comm._call(
            "draw", self._prepare, strategy, None if label is None else str(label)
        )
        return load(data, self._comm.rank)

    def _prepare(self, comm: Communicator, strategy: Any, label: str | None) -> Call:
        drawn = None if self._draw is None else self._draw(strategy, label)
        call = bcast_object(comm, drawn, 0)
        return replace(call, signature=replace(call.signature, operation="draw", op=label))

    def __repr__(self) -> str:
        return "data(...)"


@dataclass
class Part:
    """One rank's part in an example, and how it ended."""

    rank: int
    record: Record
    error: BaseException | None = None
    # The step of the communicator up to which all went well.
    step: int = 0
    result: Any = None


def play(
    comm: Communicator,
    example: Example,
    test: Callable[..., Any],
    draw: Draw | None,
    record: Record,
) -> Any:
    """Call the test on this rank."""
    __tracebackhide__ = True
    set_rank_count(comm.size)
    arguments = load(example.arguments, comm.rank)
    for name in example.data:
        arguments[name] = RankData(comm, draw if comm.rank == 0 else None)
    with recording(record, final=example.final):
        return test(comm=comm, **arguments)
