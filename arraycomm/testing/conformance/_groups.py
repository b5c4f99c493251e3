"""Laws of communicators that are made from others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from arraycomm._communicator import Communicator
from arraycomm._errors import CommunicatorClosedError
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing.conformance._checks import check_elements, check_fold, raises
from arraycomm.testing.conformance._inputs import (
    Reduction,
    Sealed,
    keys_of_ranks,
    numbers_of_ranks,
    orders_of_requests,
    reductions,
    sealed,
)
from arraycomm.testing.conformance._law import law


class GroupLaws:
    """What communicators promise that are made from others."""

    # Whether ranks may start requests of several communicators in different orders.
    in_any_order = True

    @law(
        colors=sealed(numbers_of_ranks(0, 2) | numbers_of_ranks(0, 1)),
        outside=sealed(ranked.per_rank(st.sampled_from((False, False, False, True)))),
        keys=sealed(keys_of_ranks()),
        reduction=reductions(),
    )
    def test_split_partitions(
        self,
        comm: Communicator,
        colors: Sealed[Any],
        outside: Sealed[Any],
        keys: Sealed[Any],
        reduction: Reduction,
    ) -> None:
        """Every rank is in the group of its color, in the order of key and rank.

        A rank whose color is None is in no group. A collective of a group involves only its
        members.
        """
        chosen = [None if out else c for c, out in zip(colors.value, outside.value, strict=True)]
        color, members = chosen[comm.rank], _members(comm.rank, chosen, keys.value)
        part: Communicator | None = comm.split(color, keys.value[comm.rank])
        if part is None:
            assert color is None, f"rank {comm.rank} is in no group, but has color {color}"
        else:
            assert part.allgather_object(comm.rank) == members
            assert (part.rank, part.size) == (members.index(comm.rank), len(members))
            check_fold(part, reduction, members)
        assert comm.allreduce(1) == comm.size

    @law(
        outer=sealed(ranked.per_rank(st.integers(0, 1))),
        inner=sealed(ranked.per_rank(st.integers(0, 1))),
        reduction=reductions(),
    )
    def test_splits_nest(
        self, comm: Communicator, outer: Sealed[Any], inner: Sealed[Any], reduction: Reduction
    ) -> None:
        """A group of a group has the ranks whose colors are equal in both splits."""
        part = comm.split(outer.value[comm.rank])
        assert part is not None
        nested = part.split(inner.value[comm.rank])
        assert nested is not None
        both = list(zip(outer.value, inner.value, strict=True))
        members = [rank for rank in range(comm.size) if both[rank] == both[comm.rank]]
        check_fold(nested, reduction, members)
        check_fold(part, reduction, _members(comm.rank, outer.value))

    @law(color=ranked.per_rank(st.integers(0, 1)), calls=ranked.per_rank(st.integers(0, 3)))
    def test_groups_go_their_own_ways(self, comm: Communicator, color: int, calls: int) -> None:
        """Groups need neither make the same calls, nor the same number of calls."""
        part = comm.split(color)
        assert part is not None
        most = part.allreduce(calls, "max")
        for number in range(most):
            assert part.allreduce(number) == number * part.size
        assert comm.allreduce(1) == comm.size

    @law(
        dims=st.integers(1, 3),
        periodic=st.lists(st.booleans(), min_size=3, max_size=3),
        steps=st.integers(-3, 3),
    )
    def test_rows_move_along_the_axes_of_a_grid(
        self, comm: Communicator, dims: int, periodic: Sequence[bool], steps: int
    ) -> None:
        """A shift moves rows as an array is rolled; nothing comes from beyond a border."""
        grid = comm.grid(dims, periodic[:dims])
        ranks = np.arange(comm.size).reshape(grid.dims)
        assert grid.rank_at(grid.coords) == comm.rank == ranks[grid.coords_of(comm.rank)]
        for axis in range(dims):
            source, dest = grid.shift(axis, steps)
            got = grid.sendrecv(np.array([comm.rank]), dest, source, out=np.array([-1]))
            rolled = np.moveaxis(np.roll(ranks, steps, axis), axis, 0)
            if not periodic[axis]:
                rolled[: max(steps, 0)], rolled[max(len(rolled) + min(steps, 0), 0) :] = -1, -1
            assert got == np.moveaxis(rolled, 0, axis)[grid.coords]
            part = grid.sub([other == axis for other in range(dims)])
            line = np.moveaxis(ranks, axis, -1)[(*np.delete(grid.coords, axis), slice(None))]
            assert part.allgather_object(comm.rank) == line.tolist()
            part.free()
        grid.free()

    @law(first=reductions(), second=reductions(), order=orders_of_requests())
    def test_dup_is_independent(
        self, comm: Communicator, first: Reduction, second: Reduction, order: Sequence[int]
    ) -> None:
        """Calls on a duplicate and on its original do not wait for one another.

        Each rank starts the duplicate's at its own place, if it may, and waits for them in its own
        order. The original outlives the duplicate.
        """
        other = comm.dup()
        started = [(comm, first), (comm, second)]
        started.insert(comm.rank % 3 if self.in_any_order else 1, (other, second))
        requests = [
            group.iallreduce(reduction.arrays.build(comm.rank), reduction.op)
            for group, reduction in started
        ]
        for number in order:
            reduction = started[number][1]
            found = elements_of(requests[number].wait())
            check_elements(found, reduction.fold(), reduction.op)
        # Its figures are those of the communicator that it is a duplicate of.
        own = hasattr(comm, "stats")
        done = comm.stats()["allreduce"]["calls"] if own else 0
        other.free()
        assert not own or comm.stats()["allreduce"]["calls"] == done
        with raises(CommunicatorClosedError):
            other.barrier()
        check_fold(comm, first, range(comm.size))


def _members(rank: int, colors: Sequence[Any], keys: Sequence[int] | None = None) -> list[int]:
    """Return the ranks of the same color, in the order of their new ranks."""
    same = [other for other, color in enumerate(colors) if color == colors[rank]]
    return same if keys is None else sorted(same, key=lambda other: (keys[other], other))
