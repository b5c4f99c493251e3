"""Ranks as the cells of a grid, row by row: who is whose neighbour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import compress
from typing import Any, Final

import numpy as np

from arraycomm._arrays.typing import ArrayT
from arraycomm._calls.arguments import check_rank
from arraycomm._calls.operation import Context
from arraycomm._calls.requests import ProcessBound, Request
from arraycomm._calls.runner import Runner
from arraycomm._checks import check_at_least, check_integer, check_several
from arraycomm._collectives.groups import SmallExchange
from arraycomm._collectives.neighbors import Around, Blocks, NeighborAlltoall
from arraycomm._entries import entries
from arraycomm._messages.matching import PROC_NULL, Wildcard
from arraycomm._messages.messages import Messenger
from arraycomm._prepared.fast_path import call
from arraycomm._prepared.packed_calls import PackedCall
from arraycomm._protocol.agreement import Agreement

# NumPy's arrays have no more.
_MOST_DIMS: Final = 64
Layout = tuple[tuple[int, ...], tuple[bool, ...]]


class MakeGrid(SmallExchange):
    """See `Communicator.grid`."""

    name, code = "grid", 41

    def __init__(self, context: Context, dims: Any, periods: Any) -> None:
        self._layout = _checked(dims, periods, context.group.size)
        super().__init__(context, "dims={}, periods={}".format(*self._layout))

    def result(self, agreement: Agreement) -> Layout:
        return self._layout


class MakeSubgrid(SmallExchange):
    """See `GridCommunicator.sub`."""

    name, code = "sub", 44

    def __init__(self, context: Context, keep: Any, count: int) -> None:
        if len(keep) != count or not all(isinstance(kept, bool | np.bool_) for kept in keep):
            raise ValueError(f"keep must be a bool for each of {count} dimensions; got {keep!r}")
        super().__init__(context, f"keep={[*map(bool, keep)]}")


@entries(trimmed=True)
class GridCalls(ProcessBound):
    """What a communicator does whose ranks are the cells of a grid."""

    _runner: Runner
    _messenger: Messenger
    dims: tuple[int, ...]
    periods: tuple[bool, ...]
    coords: tuple[int, ...]
    rank: int
    size: int

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank."""
        number = check_rank(rank, self.size, "coords_of: rank")
        return tuple(map(int, np.unravel_index(number, self.dims)))

    def rank_at(self, coords: Sequence[int]) -> int | Wildcard:
        """Return the rank at some coordinates.

        Those of a periodic dimension may be any integers; beyond the border of another there is
        `arraycomm.PROC_NULL`.
        """
        wanted = f"rank_at: coords must be {len(self.dims)} integers"
        place = check_several(coords, wanted)
        if len(place) != len(self.dims):
            raise ValueError(f"{wanted}; got {coords!r}")
        axes = list(zip(place, self.dims, self.periods, strict=True))
        if any(not (periodic or 0 <= at < count) for at, count, periodic in axes):
            return PROC_NULL
        return int(np.ravel_multi_index([at % count for at, count, _ in axes], self.dims))

    def shift(self, axis: int, steps: int = 1) -> tuple[int | Wildcard, int | Wildcard]:
        """Return the ranks to receive from and to send to, to move data along an axis.

        Parameters
        ----------
        axis : int
            The dimension.
        steps : int
            How far; negative towards smaller coordinates.

        Returns
        -------
        (source, dest)
            For `comm.sendrecv(x, dest, source)`. Beyond a border that is not periodic each is
            `arraycomm.PROC_NULL`, with which nothing is sent or received.
        """
        along = check_integer(axis, "shift: axis must be an integer")
        if not -len(self.dims) <= along < len(self.dims):
            raise ValueError(f"shift: axis must be a dimension of {self.dims}; got {axis}")
        step = check_integer(steps, "shift: steps must be an integer")
        before, after = list(self.coords), list(self.coords)
        before[along] -= step
        after[along] += step
        return self.rank_at(before), self.rank_at(after)

    @property
    def neighbors(self) -> list[int]:
        """The ranks one step away along each dimension, in ascending order, each once."""
        return sorted({*self._around[1].values()} - {self.rank})

    @cached_property
    def _around(self) -> Around:
        """The ranks before and after this one along each axis."""
        places = [rank for axis in range(len(self.dims)) for rank in self.shift(axis)]
        return len(places), {at: rank for at, rank in enumerate(places) if isinstance(rank, int)}

    def neighbor_alltoall(
        self,
        blocks: Iterable[ArrayT | None],
        *,
        out: Iterable[ArrayT | None] | None = None,
        timeout: float | None = None,
    ) -> list[ArrayT]:
        """Send an array to each neighbor, and get one from each, as a halo exchange does.

        Parameters
        ----------
        blocks : sequence of arrays
            Two for each dimension: what goes to the rank at the smaller coordinate, then what goes
            to that at the larger one. Their shapes and dtypes may differ. Beyond a border that is
            not periodic nothing goes, and a block may be None.
        out : sequence of arrays, optional
            In the same order, where the arrays go that come from there; None for a fresh one. They
            share no elements. Those beyond a border stay as they are.

        Returns
        -------
        list of arrays
            What came from there, like the block that went there, or `out`. Beyond a border it is
            `out` as it is, or None.

        Notes
        -----
        Collective. All ranks compare the call, and blocks of few bytes travel with what they
        compare; for longer ones each rank then waits for its neighbors alone. With `check=False` it
        waits for no others. Long blocks that are contiguous are sent and received without a copy,
        unless one shares memory with `out`.
        """
        given = Blocks(self._messenger, self._around, blocks, out)
        received: list[ArrayT]
        received = call(self._runner, timeout, NeighborAlltoall, given, kind=PackedCall)
        return received

    def ineighbor_alltoall(
        self, blocks: Iterable[ArrayT | None], *, out: Iterable[ArrayT | None] | None = None
    ) -> Request[list[ArrayT]]:
        """Start `neighbor_alltoall`; leave the arrays alone until the request is finished."""
        given = Blocks(self._messenger, self._around, blocks, out)
        return self._runner.start(NeighborAlltoall, given)

    def _layout_of(self, keep: Sequence[bool]) -> tuple[int, Layout]:
        """Return the color and the layout of the part that has the dimensions to `keep`."""
        self._runner.call(MakeSubgrid, keep, len(self.dims))
        fixed = [0 if kept else at for kept, at in zip(keep, self.coords, strict=True)]
        layout = tuple(compress(self.dims, keep)), tuple(compress(self.periods, keep))
        return int(np.ravel_multi_index(fixed, self.dims)), layout


def layout_of(mpi4py_comm: Any) -> Layout | None:
    """Return the layout of a Cartesian communicator of mpi4py; None if it is another one."""
    from mpi4py import MPI

    if not isinstance(mpi4py_comm, MPI.Cartcomm) or not mpi4py_comm.dims:
        return None
    return tuple(mpi4py_comm.dims), tuple(map(bool, mpi4py_comm.periods))


def _checked(dims: Any, periods: Any, size: int) -> Layout:
    """Return the ranks along each dimension, with those that are 0 chosen, and what is periodic."""
    wanted = check_several(dims, "dims must be an integer or several")
    if not np.iterable(dims):
        wanted = [0] * check_at_least(dims, 1, "dims", _MOST_DIMS)
    periods = False if periods is None else periods
    around = list(periods) if np.iterable(periods) else [periods] * len(wanted)
    if len(around) != len(wanted) or not all(isinstance(p, bool | np.bool_) for p in around):
        raise ValueError(f"periods must be a bool for each of {len(wanted)} dims; got {periods!r}")
    fixed = math.prod(n for n in wanted if n)
    if min(wanted, default=-1) < 0 or size % fixed or (fixed != size and 0 not in wanted):
        raise ValueError(f"dims must be numbers whose product is {size}, or 0; got {dims!r}")
    chosen = iter(_balanced(size // fixed, wanted.count(0)))
    return tuple(n or next(chosen) for n in wanted), tuple(map(bool, around))


def _balanced(number: int, count: int) -> list[int]:
    """Return `count` factors of a number that are as equal as its prime factors allow."""
    factors, primes, divisor = [1] * count, list[int](), 2
    while number > 1:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    for prime in reversed(primes):
        factors[factors.index(min(factors))] *= prime
    return sorted(factors, reverse=True)
