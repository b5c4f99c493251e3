"""Laws of exchanges between the neighbors of a grid: each block comes from where the coordinates say."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import given
from arraycomm.testing._ranks.rank_groups import RankGroup, lockstep_over
from properties.test_laws import TIMEOUT
from properties.test_machine import LAUNCHED

Array = np.ndarray[Any, Any]

# Of few elements, of none, of more than go in one message, of no dimension, and of more than go with a header.
SHAPES = ((3,), (2, 0), (20_000,), (2, 3, 2), (), (3,), (300_000,))
DTYPES = ("float64", "int16", ">f8", "complex64")


def block_of(rank: int, place: int, turn: int, kind: int) -> Array:
    """Return what a rank sends in one direction: shape, dtype and layout are its own."""
    kind += rank + place + turn
    rng = np.random.default_rng((rank, place, turn))
    x = rng.integers(0, 99, SHAPES[kind % len(SHAPES)]).astype(DTYPES[kind % len(DTYPES)])
    return x.T if kind % 2 else x


def source_of(rank: int, place: int, dims: tuple[int, ...], periods: list[bool]) -> int | None:
    """Return the rank in one direction, found among all coordinates; None beyond a border."""
    cells = list(itertools.product(*map(range, dims)))
    at, (axis, after) = list(cells[rank]), divmod(place, 2)
    at[axis] += 1 if after else -1
    if periods[axis]:
        at[axis] %= dims[axis]
    return cells.index(tuple(at)) if tuple(at) in cells else None


def memory_for(block: Array | None) -> Array:
    """Return an `out` for a block; beyond a border any array will do."""
    return (
        np.full(2, 7.0) if block is None else np.empty(block.shape, block.dtype.newbyteorder("="))
    )


class Neighbors:
    """Subclasses say over what."""

    @given(
        dims=st.integers(1, 3),
        long=st.integers(0, 2),
        periods=st.lists(st.booleans(), min_size=3, max_size=3),
        kind=st.integers(0, 20),
        into=st.lists(st.booleans(), min_size=6, max_size=6),
        check=st.booleans(),
        requested=st.booleans(),
        timeout=TIMEOUT,
    )
    def test_neighbors_get_the_blocks_that_go_their_way(
        self,
        comm: Communicator,
        dims: int,
        long: int,
        periods: list[bool],
        kind: int,
        into: list[bool],
        check: bool,
        requested: bool,
    ) -> None:
        """Also if the ranks before and after are one, or this one, and beside a user's messages.

        Blocks are of other lengths in each turn, so that those of some ranks go with their headers, and those of others
        do not.
        """
        # All ranks along one axis, or as equal as possible.
        shape = [comm.size if axis == long else 1 for axis in range(dims)] if long < dims else dims
        c = comm.dup(check=check)
        grid = c.grid(shape, periods[:dims])
        waiting = grid.irecv(ac.ANY_SOURCE, ac.ANY_TAG)
        for turn in range(6):
            blocks, wanted = list[Array | None](), list[Array | None]()
            for place in range(2 * dims):
                source = source_of(grid.rank, place, grid.dims, periods)
                there = None if source is None else block_of(source, place ^ 1, turn, kind)
                mine = block_of(grid.rank, place, turn, kind)
                blocks.append(None if there is None and into[place] else mine)
                wanted.append(there)
            out = [memory_for(there) if into[place] else None for place, there in enumerate(wanted)]
            places = out if any(into[: 2 * dims]) else None
            if requested:
                got = grid.ineighbor_alltoall(blocks, out=places).wait()
            else:
                got = grid.neighbor_alltoall(blocks, out=places)
            for came, there, memory in zip(got, wanted, out, strict=True):
                assert memory is None or came is memory
                if there is None:
                    assert came is None or (came == 7).all()
                else:
                    assert (came.dtype, came.shape) == (there.dtype.newbyteorder("="), there.shape)
                    assert np.array_equal(came, there)
        sent = grid.isend(np.array(grid.rank), (grid.rank + 1) % grid.size)
        assert waiting.wait() == (grid.rank - 1) % grid.size
        sent.wait()
        grid.free()
        c.free()

    @given(
        cells=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        wide=st.booleans(),
        periodic=st.booleans(),
        order=st.sampled_from("CF"),
        limit=st.none() | st.just(30.0),
        timeout=TIMEOUT,
    )
    def test_halos_are_those_of_the_whole_array(
        self,
        comm: Communicator,
        cells: list[int],
        wide: bool,
        periodic: bool,
        order: str,
        limit: Any,
    ) -> None:
        """Each rank has a part with a frame, and sends from and receives into that one array."""
        dims = len(cells)
        cells[-1] = 9_000 if wide and dims < 3 else cells[-1]
        grid = comm.grid(dims, periodic)
        sizes = [count * n for count, n in zip(cells, grid.dims, strict=True)]
        whole = np.arange(1.0, 1 + np.prod(sizes)).reshape(sizes)
        framed = np.pad(whole, 1, mode="wrap") if periodic else np.pad(whole, 1)
        spans = zip(cells, grid.coords, strict=True)
        part = framed[tuple(slice(at * n, (at + 1) * n + 2) for n, at in spans)]
        within = (slice(1, -1),) * dims
        u = np.zeros(part.shape, order=order)
        u[within] = part[within]
        ends = {1: slice(1, 2), -2: slice(-2, -1), 0: slice(1), -1: slice(-1, None)}

        def sides(first: int, last: int) -> list[Array]:
            places = itertools.product(range(dims), (first, last))
            return [u[(*within[:axis], ends[at], *within[axis + 1 :])] for axis, at in places]

        grid.neighbor_alltoall(sides(1, -2), out=sides(0, -1), timeout=limit)
        # The corners stay as they were.
        at_ends = sum(
            (at == 0) | (at == n + 1) for at, n in zip(np.indices(u.shape), cells, strict=True)
        )
        assert np.array_equal(u, np.where(at_ends <= 1, part, 0))
        grid.free()


if LAUNCHED:
    from properties.test_laws import over_mpi

    class TestSharedMemory(Neighbors):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=True))

    class TestMessages(Neighbors):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=False))

else:

    class TestThreads(Neighbors):
        pass
