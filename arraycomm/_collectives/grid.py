"""Ranks as the cells of a grid, row by row: who is whose neighbour."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

import numpy as np

from arraycomm._arrays.typing import ArrayT
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.requests import ProcessBound
from arraycomm._calls.runner import Runner
from arraycomm._collectives.groups import SmallExchange
from arraycomm._entries import entries
from arraycomm._messages.matching import PROC_NULL, Wildcard
from arraycomm._messages.messages import Messenger
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.header import Signature
from arraycomm._transports.base import Steps

Layout = tuple[tuple[int, ...], tuple[bool, ...]]
# Ranks along the axes of a grid, or what lies beyond its borders: see `neighbor_alltoall`.
Around = Sequence[int | Wildcard]


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


class NeighborAlltoall(Operation):
    """See `GridCommunicator.neighbor_alltoall`; blocks are messages, which tell their shapes."""

    name, code = "neighbor_alltoall", 46
    header_independent = True

    def __init__(
        self, context: Context, messenger: Messenger, around: Around, blocks: Any, out: Any
    ) -> None:
        super().__init__(context)
        self.signature = Signature(self.name)
        blocks, out = list(blocks), [None] * len(around) if out is None else list(out)
        for name, given in ("blocks", blocks), ("out", out):
            if len(given) != len(around):
                raise ValueError(
                    f"{name} must be {len(around)} arrays, two for each dimension; got {len(given)}"
                )
        views = [self.placement.view_known(None, into) for into in out]
        _check_apart([found.array for found in views if found is not None])
        there = {place: rank for place, rank in enumerate(around) if isinstance(rank, int)}
        self._outgoing = [messenger.read(blocks[place], *out) for place in there]
        self.nbytes = sum(each.nbytes for each in self._outgoing)
        self.copies = sum(each.copies for each in self._outgoing)
        self._messenger, self._there = messenger, there
        self._blocks, self._received = blocks, out

    def steps(self, agreement: Agreement) -> Steps:
        there, blocks, received = self._there, self._blocks, self._received
        sends = list(zip(self._outgoing, there.values(), strict=True))
        # In the order in which a neighbor sends, to which what lies before this rank lies after it.
        back = sorted(there, key=lambda place: place ^ 1)
        receives = [(there[place], blocks[place], received[place]) for place in back]
        results = yield from self._messenger.trade(sends, receives)
        for place, result in zip(back, results, strict=True):
            received[place] = result

    def result(self, agreement: Agreement) -> Any:
        return self._received


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
        return tuple(map(int, np.unravel_index(rank, self.dims)))

    def rank_at(self, coords: Sequence[int]) -> int | Wildcard:
        """Return the rank at some coordinates.

        Those of a periodic dimension may be any integers; beyond the border of another there is
        `arraycomm.PROC_NULL`.
        """
        if len(coords) != len(self.dims):
            raise ValueError(f"rank_at: coords must be {len(self.dims)} integers; got {coords!r}")
        modes = ["wrap" if periodic else "raise" for periodic in self.periods]
        try:
            return int(np.ravel_multi_index(tuple(coords), self.dims, mode=modes))  # type: ignore[call-overload]
        except ValueError:
            return PROC_NULL

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
        if not -len(self.dims) <= operator.index(axis) < len(self.dims):
            raise ValueError(f"shift: axis must be a dimension of {self.dims}; got {axis}")
        at = np.array(self.coords)
        step = np.zeros_like(at)
        step[axis] = steps
        return self.rank_at(tuple(at - step)), self.rank_at(tuple(at + step))

    @property
    def neighbors(self) -> list[int]:
        """The ranks one step away along each dimension, in ascending order, each once."""
        return sorted({rank for rank in self._around if isinstance(rank, int)} - {self.rank})

    @property
    def _around(self) -> Around:
        """What lies before and after this rank along each axis."""
        return [rank for axis in range(len(self.dims)) for rank in self.shift(axis)]

    def neighbor_alltoall(
        self,
        blocks: Sequence[ArrayT | None],
        *,
        out: Sequence[ArrayT | None] | None = None,
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
        Collective: all ranks compare the call, then each waits for its neighbors alone. With
        `check=False` it waits for no others. Long blocks that are contiguous are sent and received
        without a copy, unless one shares memory with `out`.
        """
        arguments = self._messenger, self._around, blocks, out
        received: list[ArrayT]
        received = self._runner.call_within(timeout, NeighborAlltoall, *arguments)
        return received

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


def _check_apart(arrays: list[Any]) -> None:
    """Raise if arrays share elements, of which one alone could arrive."""
    for after, array in enumerate(arrays):
        for before in range(after):
            if np.shares_memory(arrays[before], array):
                raise ValueError("arrays of out share elements, as rows and columns do at a corner")


def _checked(dims: Any, periods: Any, size: int) -> Layout:
    """Return the ranks along each dimension, with those that are 0 chosen, and what is periodic."""
    try:
        each = dims if isinstance(dims, Iterable) else [0] * operator.index(dims)
        wanted = [operator.index(n) for n in each]
    except TypeError:
        raise TypeError(f"dims must be an integer or several; got {dims!r}") from None
    periods = False if periods is None else periods
    around = list(periods) if isinstance(periods, Iterable) else [periods] * len(wanted)
    if len(around) != len(wanted) or not all(isinstance(p, bool | np.bool_) for p in around):
        raise ValueError(f"periods must be a bool for each of {len(wanted)} dims; got {periods!r}")
    fixed = math.prod(n for n in wanted if n)
    if min(wanted, default=0) < 0 or size % fixed or (fixed != size and 0 not in wanted):
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
