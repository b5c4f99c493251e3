"""One value for each rank, and the number of ranks of the example that is being drawn."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final, TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


class RankValues(Sequence[T_co]):
    """One value for each rank, in rank order.

    In a test, each rank gets its own value, not this object.
    """

    __slots__ = ("values",)

    def __init__(self, *values: T_co) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, index: int | slice) -> T_co | tuple[T_co, ...]:
        return self.values[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankValues) and self.values == other.values

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return f"RankValues({', '.join(map(repr, self.values))})"


class _Drawing(threading.local):
    ranks: int | None = None


_drawing: Final = _Drawing()


def set_rank_count(count: int | None) -> None:
    """Set how many ranks the example has that this thread is drawing; None after the last."""
    _drawing.ranks = count


def rank_count() -> int:
    """Return how many ranks the example has that this thread is drawing, or raise an error."""
    if _drawing.ranks is None:
        raise RuntimeError(
            "how many ranks there are is known only while arraycomm.testing.given draws an "
            "example; use per_rank, rank_arrays, roots and trees in the arguments of its decorator"
        )
    return _drawing.ranks
