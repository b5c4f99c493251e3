"""The laws of collectives, as a suite of tests that anyone can point at a communicator.

Subclass `Conformance` in a test module and say which communicator; pytest, alone or under
`mpiexec`, does the rest. Every law is a Hypothesis test: it tries as many examples as the profile
says that is loaded when this module is imported.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import hypothesis
import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st

from arraycomm._collectives import custom_ops
from arraycomm._communicator import Communicator
from arraycomm._errors import CommunicatorClosedError, MismatchError, PeerError
from arraycomm._training.join import join
from arraycomm._training.metrics import mean_metrics
from arraycomm._transports.base import Transport
from arraycomm._transports.threads import make_group
from arraycomm._trees.reduce import allreduce_gradients, allreduce_tree
from arraycomm._trees.synchronize import synchronize
from arraycomm.testing import strategies as ranked
from arraycomm.testing._given import Group, Threads, given, lockstep_over
from arraycomm.testing._law_values import (
    Arrays,
    Ragged,
    Reduction,
    Sealed,
    arranged_twice,
    arrays,
    check_copy,
    check_elements,
    check_leaf,
    check_like,
    check_mean,
    complete_frameworks,
    elements_of,
    equal_arrays,
    gradients,
    is_array,
    kept_trees,
    leaves_of,
    messages,
    metrics,
    moved_into,
    native,
    objects,
    orders_of_ranks,
    ragged,
    reducible_trees,
    reductions,
    reductions_into,
    reductions_of_numbers,
    reductions_of_rows,
    reductions_of_sizes,
    rows,
    scribble,
    sealed,
    state_trees,
)
from arraycomm.testing._oracle import Array, expected, same_bits

__all__ = [
    "Conformance",
    "FailureLaws",
    "GroupLaws",
    "MovementLaws",
    "ReductionLaws",
    "TreeLaws",
]

# A rank waits for others; how long that takes says nothing of the code under test.
_law: Final = hypothesis.settings(
    deadline=None, suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large)
)

# Numbers of ranks with which ranks can differ.
_SEVERAL: Final = range(2, 9)

# The order in which each rank waits for three requests.
_orders = ranked.per_rank(st.permutations(range(3)))


class ReductionLaws:
    """What `allreduce` and `reduce` promise."""

    @_law
    @given(reduction=reductions())
    def test_allreduce_is_the_fold_in_rank_order(
        self, comm: Communicator, reduction: Reduction
    ) -> None:
        """The result is the fold of all ranks' arrays in rank order, bit for bit, at every call.

        Layouts and frameworks differ between ranks; the result is a C-contiguous array of each
        caller's own kind.
        """
        x, want = reduction.arrays.build(comm.rank), reduction.fold()
        for _ in range(3):
            found = check_like(comm.allreduce(x, reduction.op), x)
            check_elements(found, want, reduction.op)

    @_law
    @given(reduction=reductions(), root=ranked.roots())
    def test_reduce_is_the_fold_on_the_root_alone(
        self, comm: Communicator, reduction: Reduction, root: int
    ) -> None:
        """`reduce` gives the fold in rank order to `root`, and None to the others."""
        x = reduction.arrays.build(comm.rank)
        result = comm.reduce(x, reduction.op, root)
        if comm.rank == root:
            check_elements(check_like(result, x), reduction.fold(), reduction.op)
        else:
            assert result is None, f"got {result!r}, but the root is rank {root}"

    @_law
    @given(reduction=reductions(), root=ranked.roots())
    def test_allreduce_is_reduce_then_bcast(
        self, comm: Communicator, reduction: Reduction, root: int
    ) -> None:
        """All ranks get from `allreduce` what they would get from the root of `reduce`."""
        op, x = reduction.op, reduction.arrays.build(comm.rank)
        whole = elements_of(comm.allreduce(x, op))
        again = elements_of(comm.bcast(comm.reduce(x, op, root), root))
        check_elements(again, whole, op)

    @_law
    @given(reduction=reductions_of_sizes())
    def test_size_does_not_matter(self, comm: Communicator, reduction: Reduction) -> None:
        """The result is the fold also where a size is just too large for one way of moving it."""
        op, x, want = reduction.op, reduction.arrays.build(comm.rank), reduction.fold()
        for _ in range(2):
            check_elements(check_like(comm.allreduce(x, op), x), want, op)
        result = comm.reduce(x, op)
        if result is not None:
            check_elements(elements_of(result), want, op)

    @_law
    @given(reduction=reductions_of_sizes())
    def test_check_does_not_matter(self, comm: Communicator, reduction: Reduction) -> None:
        """The result is the fold also where nothing is compared beforehand."""
        op, x, want = reduction.op, reduction.arrays.build(comm.rank), reduction.fold()
        unchecked = comm.dup(check=False)
        for _ in range(2):
            check_elements(check_like(unchecked.allreduce(x, op), x), want, op)

    @_law
    @given(reduction=reductions())
    def test_every_rank_gets_the_same_bits(self, comm: Communicator, reduction: Reduction) -> None:
        """Ranks do not even differ in the payload of a NaN or the sign of a zero."""
        x = reduction.arrays.build(comm.rank)
        mine = [elements_of(comm.allreduce(x, reduction.op)).tobytes() for _ in range(2)]
        for rank, theirs in enumerate(comm.allgather_object(mine)):
            assert theirs == mine, f"rank {rank} got other bits than rank {comm.rank}"

    @_law
    @given(drawn=arranged_twice())
    def test_layout_and_framework_do_not_matter(
        self, comm: Communicator, drawn: tuple[Reduction, Arrays]
    ) -> None:
        """The same elements in other layouts, and of other frameworks, give the same bits."""
        (op, plain), arranged = drawn
        want = elements_of(comm.allreduce(plain.build(comm.rank), op))
        x = arranged.build(comm.rank)
        for _ in range(2):
            check_elements(check_like(comm.allreduce(x, op), x), want, op)

    @_law
    @given(reduction=reductions() | reductions_of_sizes())
    def test_scan_is_the_fold_of_the_ranks_so_far(
        self, comm: Communicator, reduction: Reduction
    ) -> None:
        """`scan` folds the arrays up to and with this rank's, `exscan` those before it."""
        op, x, elements = (
            reduction.op,
            reduction.arrays.build(comm.rank),
            reduction.arrays.elements(),
        )
        found = check_like(comm.scan(x, op), x)
        check_elements(found, expected(elements[: comm.rank + 1], op), op)
        before = comm.exscan(x, op)
        if comm.rank == 0:
            assert before is None, f"got {before!r}, but there is no rank before rank 0"
        else:
            check_elements(check_like(before, x), expected(elements[: comm.rank], op), op)

    @_law
    @given(reduction=reductions_of_rows())
    def test_reduce_scatter_is_a_row_of_allreduce(
        self, comm: Communicator, reduction: Reduction
    ) -> None:
        """Rank r gets row r of the fold."""
        op, x = reduction.op, reduction.arrays.build(comm.rank)
        found = check_like(comm.reduce_scatter(x, op), x)
        check_elements(found, reduction.fold()[comm.rank, ...], op)

    @_law
    @given(
        given_arrays=arrays(
            ("int32", "int64"), st.integers(1, 9_000), frameworks=complete_frameworks
        ),
        elementwise=st.booleans(),
        root=ranked.roots(),
    )
    def test_functions_are_folded_in_rank_order(
        self, comm: Communicator, given_arrays: Arrays, elementwise: bool, root: int
    ) -> None:
        """A reduction of one's own need neither commute nor associate."""
        x, own = given_arrays.build(comm.rank), custom_ops.op(_lopsided, elementwise=elementwise)
        whole = functools.reduce(_lopsided, given_arrays.elements())
        for _ in range(2):
            check_elements(check_like(comm.allreduce(x, own), x), whole)
        result = comm.reduce(x, own, root)
        assert (result is None) == (comm.rank != root)
        if result is not None:
            check_elements(check_like(result, x), whole)

    @_law
    @given(first=reductions(), second=reductions(), order=_orders)
    def test_requests_give_what_blocking_calls_give(
        self, comm: Communicator, first: Reduction, second: Reduction, order: Sequence[int]
    ) -> None:
        """Requests may be waited for in any order, another one on each rank."""
        started = [first, second, first]
        arguments = [reduction.arrays.build(comm.rank) for reduction in started]
        requests = [
            comm.iallreduce(x, reduction.op)
            for x, reduction in zip(arguments, started, strict=True)
        ]
        for number in order:
            found = check_like(requests[number].wait(), arguments[number])
            check_elements(found, started[number].fold(), started[number].op)

    @_law
    @given(drawn=reductions_into(), root=ranked.roots())
    def test_out_gets_the_result_and_its_neighbours_nothing(
        self, comm: Communicator, drawn: tuple[Reduction, Any], root: int
    ) -> None:
        """`out` may have any layout; the memory between its elements stays as it is."""
        reduction, out = drawn
        op, x, want = reduction.op, reduction.arrays.build(comm.rank), reduction.fold()
        for _ in range(2):
            with _neighbours_unchanged(out):
                assert comm.allreduce(x, op, out=out) is out
                check_elements(native(elements_of(out)), want, op)
        with _neighbours_unchanged(out):
            result = comm.reduce(x, op, root, out=out if comm.rank == root else None)
            if comm.rank == root:
                assert result is out
                check_elements(native(elements_of(out)), want, op)

    @_law
    @given(drawn=reductions_into())
    def test_out_may_be_the_input(self, comm: Communicator, drawn: tuple[Reduction, Any]) -> None:
        """A reduction in place gives what it gives elsewhere."""
        (reduction, x), op = drawn, drawn[0].op
        elements_of(x)[...] = reduction.arrays.elements()[comm.rank]
        assert comm.allreduce(x, op, out=x) is x
        check_elements(native(elements_of(x)), reduction.fold(), op)

    @_law
    @given(reduction=reductions(families=("integer", "bool")), order=orders_of_ranks())
    def test_integers_commute(
        self, comm: Communicator, reduction: Reduction, order: Sequence[int]
    ) -> None:
        """Integers and booleans may change ranks in any way."""
        op, given_arrays = reduction
        straight = elements_of(comm.allreduce(given_arrays.build(comm.rank), op))
        permuted = elements_of(comm.allreduce(given_arrays.build(order[comm.rank]), op))
        check_elements(permuted, straight)

    @_law
    @given(
        reduction=reductions(families=("integer", "bool")),
        color=ranked.per_rank(st.integers(0, 2)),
    )
    def test_integers_associate(self, comm: Communicator, reduction: Reduction, color: int) -> None:
        """Integers and booleans may be reduced group by group."""
        op, x = reduction.op, reduction.arrays.build(comm.rank)
        whole = elements_of(comm.allreduce(x, op))
        part = comm.split(color)
        assert part is not None
        partial = part.allreduce(x, op)
        firsts = comm.split(0 if part.rank == 0 else None)
        if firsts is not None:
            check_elements(elements_of(firsts.allreduce(partial, op)), whole)

    @_law
    @given(reduction=reductions(("min", "max")), order=orders_of_ranks())
    def test_min_and_max_commute(
        self, comm: Communicator, reduction: Reduction, order: Sequence[int]
    ) -> None:
        """It does not matter which rank holds the least or the greatest, nor which a NaN."""
        op, given_arrays = reduction
        straight = elements_of(comm.allreduce(given_arrays.build(comm.rank), op))
        permuted = elements_of(comm.allreduce(given_arrays.build(order[comm.rank]), op))
        check_elements(permuted, straight, op)

    @_law
    @given(x=equal_arrays())
    def test_mean_of_equal_values_is_that_value(self, comm: Communicator, x: Any) -> None:
        """It is where sums are exact, as of numbers with few digits; the sign of a zero counts."""
        for _ in range(2):
            check_elements(check_like(comm.allreduce(x, "mean"), x), native(elements_of(x)))

    @_law
    @given(drawn=reductions_of_numbers())
    def test_numbers_come_back_as_their_type(
        self, comm: Communicator, drawn: tuple[str, Sealed[Any]]
    ) -> None:
        """Python and NumPy numbers are reduced as arrays of no dimensions are."""
        op, numbers = drawn
        want = expected([np.asarray(number) for number in numbers.value], op)
        for _ in range(2):
            got = comm.allreduce(numbers.value[comm.rank], op)
            assert type(got) is type(numbers.value[comm.rank])
            check_elements(np.asarray(got), want, op)

    @_law
    @given(ranks=1, reduction=reductions())
    def test_one_rank_alone_gets_what_it_gave(
        self, comm: Communicator, reduction: Reduction
    ) -> None:
        """On one rank every reduction is the identity."""
        x, [want] = reduction.arrays.build(0), reduction.arrays.elements()
        for result in (comm.allreduce(x, reduction.op), comm.reduce(x, reduction.op)):
            check_elements(check_like(result, x), want)


class MovementLaws:
    """What is promised of data that is only moved, and of all arguments and results."""

    @_law
    @given(given_arrays=arrays(ranked.dtypes(movable=True)))
    def test_allgather_stacks(self, comm: Communicator, given_arrays: Arrays) -> None:
        """Row r of the result is the array of rank r, in every bit."""
        x, want = given_arrays.build(comm.rank), np.stack(given_arrays.elements())
        for result in (comm.allgather(x), comm.iallgather(x).wait()):
            check_copy(check_like(result, x), want)

    @_law
    @given(given_arrays=arrays(ranked.dtypes(movable=True)), root=ranked.roots())
    def test_bcast_copies(self, comm: Communicator, given_arrays: Arrays, root: int) -> None:
        """Every rank gets the root's array, in every bit, and as an array of its own kind."""
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[root]
        for result in (comm.bcast(x, root), comm.ibcast(x, root).wait()):
            check_copy(check_like(result, x), want)

    @_law
    @given(
        given_arrays=arrays(ranked.dtypes(movable=True)),
        root=ranked.roots(),
        how=ranked.per_rank(st.sampled_from(("nothing", "like", "x"))),
    )
    def test_bcast_needs_nothing_of_the_others(
        self, comm: Communicator, given_arrays: Arrays, root: int, how: str
    ) -> None:
        """The others may pass nothing at all, and get NumPy's arrays, or an array to take after."""
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[root]
        if comm.rank == root or how == "x":
            check_copy(check_like(comm.bcast(x, root), x), want)
        elif how == "like":
            check_copy(check_like(comm.bcast(None, root, like=x), x), want)
        else:
            check_copy(check_like(comm.bcast(None, root), want), want)

    @_law
    @given(drawn=moved_into(), root=ranked.roots())
    def test_moved_data_fills_any_out(
        self, comm: Communicator, drawn: tuple[Arrays, Any, Any], root: int
    ) -> None:
        """`out` may have any layout; the memory between its elements stays as it is."""
        given_arrays, out, stack = drawn
        x, elements = given_arrays.build(comm.rank), given_arrays.elements()
        with _neighbours_unchanged(out):
            assert comm.bcast(x if comm.rank == root else None, root, out=out) is out
            check_copy(native(elements_of(out)), elements[root])
        with _neighbours_unchanged(stack):
            assert comm.allgather(x, out=stack) is stack
            check_copy(native(elements_of(stack)), np.stack(elements))

    @_law
    @given(given_arrays=arrays(ranked.dtypes(movable=True)), root=ranked.roots())
    def test_gather_is_allgather_on_the_root_alone(
        self, comm: Communicator, given_arrays: Arrays, root: int
    ) -> None:
        """`gather` stacks the arrays on `root`, and gives None to the others."""
        x, want = given_arrays.build(comm.rank), np.stack(given_arrays.elements())
        result = comm.gather(x, root)
        assert (result is None) == (comm.rank != root)
        if result is not None:
            check_copy(check_like(result, x), want)

    @_law
    @given(given_arrays=rows(), root=ranked.roots())
    def test_scatter_hands_out_rows(
        self, comm: Communicator, given_arrays: Arrays, root: int
    ) -> None:
        """Rank r gets row r of the root's array; the others need pass nothing."""
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[root][comm.rank, ...]
        check_copy(check_like(comm.scatter(x, root, like=x), x), want)
        mine = x if comm.rank == root else None
        check_copy(check_like(comm.scatter(mine, root), want if mine is None else x), want)

    @_law
    @given(given_arrays=rows())
    def test_alltoall_transposes(self, comm: Communicator, given_arrays: Arrays) -> None:
        """Row s on rank r is what rank s has in row r; doing it twice does nothing."""
        x, elements = given_arrays.build(comm.rank), given_arrays.elements()
        once = comm.alltoall(x)
        check_copy(check_like(once, x), np.stack([own[comm.rank, ...] for own in elements]))
        check_copy(elements_of(comm.alltoall(once)), elements[comm.rank])

    @_law
    @given(drawn=ragged(), root=ranked.roots())
    def test_uneven_forms_join_rows(self, comm: Communicator, drawn: Ragged, root: int) -> None:
        """The v-forms keep the order of ranks, and tell how many rows are whose."""
        x, elements = drawn.arrays.build(comm.rank), drawn.arrays.elements()
        joined, counts = comm.allgatherv(x, return_counts=True)
        check_copy(check_like(joined, x), np.concatenate(elements))
        assert list(counts) == [len(own) for own in elements]
        gathered = comm.gatherv(x, root)
        assert (gathered is None) == (comm.rank != root)
        if gathered is not None:
            check_copy(check_like(gathered, x), np.concatenate(elements))
        share = comm.scatterv(x, drawn.counts[root], root, like=x)
        check_copy(check_like(share, x), drawn.rows(root, comm.rank))
        received, counts = comm.alltoallv(x, drawn.counts[comm.rank], return_counts=True)
        parts = [drawn.rows(sender, comm.rank) for sender in range(comm.size)]
        check_copy(check_like(received, x), np.concatenate(parts))
        assert list(counts) == [len(part) for part in parts]

    @_law
    @given(given_arrays=messages(), order=orders_of_ranks(), tags=st.permutations((1, 2)))
    def test_messages_arrive_as_they_were_sent(
        self, comm: Communicator, given_arrays: Arrays, order: Sequence[int], tags: Sequence[int]
    ) -> None:
        """The receiver need know neither shape nor dtype; tags let messages go past one another."""
        dest, source = order[comm.rank], order.index(comm.rank)
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[source]
        check_copy(check_like(comm.sendrecv(x, dest, source), want), want)
        sent = [comm.isend(x, dest, 1), comm.isend(np.arange(3), dest, 2)]
        for tag in tags:
            check_copy(elements_of(comm.recv(source, tag)), want if tag == 1 else np.arange(3))
        for request in sent:
            request.wait()

    @_law
    @given(
        reduction=reductions_of_rows(),
        root=ranked.roots(),
        seed=ranked.per_rank(st.integers(0, 99)),
    )
    def test_every_request_gives_what_its_blocking_call_gives(
        self, comm: Communicator, reduction: Reduction, root: int, seed: int
    ) -> None:
        """All collectives may be outstanding at once, and be waited for in any order."""
        x = reduction.arrays.build(comm.rank)
        arguments = _arguments(comm, x, reduction.op, root)
        requests = {name: getattr(comm, f"i{name}")(*args) for name, args in arguments.items()}
        names = list(requests)
        random.Random(seed).shuffle(names)
        results = {name: requests[name].wait() for name in names}
        for name, args in arguments.items():
            blocking = getattr(comm, name)(*args)
            assert (results[name] is None) == (blocking is None), name
            if blocking is not None:
                check_elements(elements_of(results[name]), elements_of(blocking), reduction.op)

    @_law
    @given(everyones=sealed(ranked.per_rank(objects())), root=ranked.roots())
    def test_objects_arrive_equal(
        self, comm: Communicator, everyones: Sealed[Any], root: int
    ) -> None:
        """Python objects arrive as equal objects of the same type."""
        mine = everyones.value[comm.rank]
        assert comm.bcast_object(mine, root) == everyones.value[root]
        gathered = comm.allgather_object(mine)
        assert gathered == list(everyones.value)
        assert list(map(type, gathered)) == list(map(type, everyones.value))
        at_root = comm.gather_object(mine, root)
        assert at_root == (gathered if comm.rank == root else None)

    @_law
    @given(reduction=reductions_of_rows(), root=ranked.roots())
    def test_input_is_not_modified(
        self, comm: Communicator, reduction: Reduction, root: int
    ) -> None:
        """No call changes what it is given."""
        x = reduction.arrays.build(comm.rank)
        before = elements_of(x).tobytes()
        for name, call in _calls(comm, x, reduction.op, root).items():
            call()
            assert elements_of(x).tobytes() == before, f"{name} changed its argument"

    @_law
    @given(reduction=reductions_of_rows(), root=ranked.roots())
    def test_results_are_nobody_elses(
        self, comm: Communicator, reduction: Reduction, root: int
    ) -> None:
        """A result shares memory with no argument, with no later result, and with no other rank.

        Every rank writes something of its own into its result, and finds it there after the next
        call, whose result is as the first was.
        """
        x = reduction.arrays.build(comm.rank)
        before = elements_of(x).tobytes()
        for name, call in _calls(comm, x, reduction.op, root).items():
            # The first call of its kind may take a longer way than those after it.
            call()
            first = call()
            values = [elements_of(result).copy() for result in first]
            commit_out = [scribble(result, comm.rank + 1) for result in first]
            second = call()
            comm.barrier()
            for result, again, value, own in zip(first, second, values, commit_out, strict=True):
                assert same_bits(elements_of(again), value), f"{name} gave something else"
                _check_apart(name, x, result, again)
                if own:
                    content = set(elements_of(result).tobytes())
                    assert content <= {comm.rank + 1}, f"something wrote to a result of {name}"
            assert elements_of(x).tobytes() == before, f"a result of {name} is its argument"


class TreeLaws:
    """What is promised of pytrees."""

    @_law
    @given(tree=state_trees(), root=ranked.roots())
    def test_synchronize_gives_all_the_values_of_root(
        self, comm: Communicator, tree: Sealed[Any], root: int
    ) -> None:
        """Structure, containers and kinds of leaves stay, and all values are the root's."""
        mine, theirs = tree.on(comm.rank), tree.on(root)
        got = synchronize(mine, root=root, comm=comm)
        for leaf, like, want in leaves_of(got, mine, theirs):
            check_leaf(leaf, like, want)

    @_law
    @given(tree=state_trees(), root=ranked.roots())
    def test_synchronize_is_idempotent(
        self, comm: Communicator, tree: Sealed[Any], root: int
    ) -> None:
        """Trees that are the same already stay as they are."""
        once = synchronize(tree.on(comm.rank), root=root, comm=comm)
        twice = synchronize(once, root=(root + 1) % comm.size, comm=comm)
        for leaf, before in leaves_of(twice, once):
            check_leaf(leaf, before, before)

    @_law
    @given(
        tree=state_trees(complete_frameworks),
        root=ranked.roots(),
        has_tree=ranked.per_rank(st.booleans()),
    )
    def test_none_takes_the_tree_of_root(
        self, comm: Communicator, tree: Sealed[Any], root: int, has_tree: bool
    ) -> None:
        """A rank that passes None gets the root's tree whole; the others keep their own kinds."""
        theirs = tree.on(root)
        hypothesis.assume(theirs is not None)
        mine = tree.on(comm.rank) if has_tree or comm.rank == root else None
        got = synchronize(mine, root=root, comm=comm)
        for leaf, like, want in leaves_of(got, theirs if mine is None else mine, theirs):
            if mine is None and is_array(want):
                assert type(leaf) is type(want)
                check_copy(native(elements_of(leaf)), native(elements_of(want)))
            else:
                check_leaf(leaf, like, want)

    @_law
    @given(tree=kept_trees(), root=ranked.roots())
    def test_synchronize_leaves_functions_and_generators_alone(
        self, comm: Communicator, tree: Any, root: int
    ) -> None:
        """What has no values to take stays the very object that it is."""
        for leaf, before in leaves_of(synchronize(tree, root=root, comm=comm), tree):
            assert leaf is before, f"got {leaf!r}, not {before!r}"

    @_law
    @given(tree=state_trees(), drawn=reducible_trees())
    def test_ties_stay_ties(
        self, comm: Communicator, tree: Sealed[Any], drawn: tuple[str, Any]
    ) -> None:
        """Leaves that are one array stay one, and others become no neighbours in its memory."""
        state, (op, summands) = tree.on(comm.rank), drawn
        _check_ties(synchronize(state, comm=comm), state)
        _check_ties(allreduce_tree(summands, op, comm=comm), summands)

    @_law
    @given(drawn=reducible_trees(), bucket_bytes=st.integers(1, 1 << 17))
    def test_allreduce_tree_reduces_every_leaf(
        self, comm: Communicator, drawn: tuple[str, Any], bucket_bytes: int
    ) -> None:
        """Each leaf is what `allreduce` makes of it, however leaves are fused; None stays."""
        op, tree = drawn
        wants = [None if x is None else comm.allreduce(x, op) for (x,) in leaves_of(tree)]
        for options in ({}, {"bucket_bytes": bucket_bytes}):
            got = allreduce_tree(tree, op, comm=comm, **options)
            for (leaf, like), want in zip(leaves_of(got, tree), wants, strict=True):
                if like is None:
                    assert leaf is None, f"got {leaf!r}, not None"
                else:
                    check_elements(check_like(leaf, like), elements_of(want), op)

    @_law
    @given(drawn=reducible_trees())
    def test_a_plan_does_what_allreduce_tree_does(
        self, comm: Communicator, drawn: tuple[str, Any]
    ) -> None:
        """Bit for bit, in every call, whatever has become of the results of the one before."""
        op, tree = drawn
        want, plan = allreduce_tree(tree, op, comm=comm), comm.plan(tree, op)
        kept = [plan(tree) for _ in range(3)]
        for got in (*kept, plan(tree)):
            for leaf, like, wanted in leaves_of(got, tree, want):
                if like is None:
                    assert leaf is None, f"got {leaf!r}, not None"
                else:
                    check_elements(check_like(leaf, like), elements_of(wanted), op)

    @_law
    @given(drawn=metrics())
    def test_metrics_are_means_by_weight(
        self, comm: Communicator, drawn: tuple[Sealed[Any], Sealed[Any]]
    ) -> None:
        """Σ w·x / Σ w, in which ranks of weight 0 do not count; NaN where nobody does."""
        values, weights = drawn
        got = mean_metrics(values.on(comm.rank), weights.on(comm.rank), comm=comm)
        for number, mean in enumerate(got):
            check_mean(
                mean,
                [values.on(rank)[number] for rank in range(comm.size)],
                [weights.on(rank) for rank in range(comm.size)],
            )

    @_law
    @given(
        counts=sealed(ranked.per_rank(st.integers(0, 3))),
        weights=sealed(ranked.per_rank(st.integers(1, 4))),
        length=st.sampled_from((1, 5000)),
    )
    def test_join_is_the_mean_over_the_batches_of_each_step(
        self, comm: Communicator, counts: Sealed[int], weights: Sealed[int], length: int
    ) -> None:
        """Of the ranks that have one, by their weights; afterwards all ranks are in step."""
        with join(comm) as joined:
            for step in range(counts.on(comm.rank)):
                joined.weight = weights.on(comm.rank)
                got = allreduce_gradients(np.full(length, 8.0 * comm.rank + step), comm=comm)
                live = [rank for rank in range(comm.size) if step < counts.on(rank)]
                # Sums of small integers are exact.
                total = sum(weights.on(rank) * (8.0 * rank + step) for rank in live)
                want = total / sum(weights.on(rank) for rank in live)
                assert got.tolist() == [want] * length, f"got {got[0]}, not {want}"
        last = max(counts.on(rank) for rank in range(comm.size))
        assert joined.synchronize(counts.on(comm.rank)) == last

    @_law
    @given(drawn=gradients())
    def test_missing_gradients_count_as_zeros(
        self, comm: Communicator, drawn: tuple[str, Sequence[Arrays], Sealed[Any]]
    ) -> None:
        """None on some ranks is zeros of what the others have; on all ranks it stays None."""
        op, leaves, present = drawn
        has = present.value
        mine = [
            leaf.build(comm.rank) if own else None
            for leaf, own in zip(leaves, has[comm.rank], strict=True)
        ]
        got = allreduce_gradients(mine, op, comm=comm)
        for number, leaf in enumerate(leaves):
            if not any(others[number] for others in has):
                assert got[number] is None
                continue
            parts = [
                elements if has[rank][number] else np.zeros_like(elements)
                for rank, elements in enumerate(leaf.elements())
            ]
            check_elements(elements_of(got[number]), expected(parts, op), op)


class GroupLaws:
    """What is promised of communicators that are made from others."""

    @_law
    @given(
        colors=sealed(ranked.per_rank(st.none() | st.integers(0, 2))),
        keys=sealed(ranked.per_rank(st.integers(-2, 2))),
        reduction=reductions(),
    )
    def test_split_partitions(
        self,
        comm: Communicator,
        colors: Sealed[Any],
        keys: Sealed[Any],
        reduction: Reduction,
    ) -> None:
        """Every rank is in the one group of its color, in the order of key and rank.

        A collective of a group is one of its members alone. None is in no group.
        """
        color, members = colors.value[comm.rank], _members(comm.rank, colors.value, keys.value)
        part = comm.split(color, keys.value[comm.rank])
        if part is None:
            assert color is None, f"rank {comm.rank} is in no group, but has color {color}"
        else:
            assert part.allgather_object(comm.rank) == members
            assert (part.rank, part.size) == (members.index(comm.rank), len(members))
            _check_fold(part, reduction, members)
        assert comm.allreduce(1) == comm.size

    @_law
    @given(
        outer=sealed(ranked.per_rank(st.integers(0, 1))),
        inner=sealed(ranked.per_rank(st.integers(0, 1))),
        reduction=reductions(),
    )
    def test_splits_nest(
        self, comm: Communicator, outer: Sealed[Any], inner: Sealed[Any], reduction: Reduction
    ) -> None:
        """A group of a group has those ranks that are together in both."""
        part = comm.split(outer.value[comm.rank])
        assert part is not None
        nested = part.split(inner.value[comm.rank])
        assert nested is not None
        both = list(zip(outer.value, inner.value, strict=True))
        members = [rank for rank in range(comm.size) if both[rank] == both[comm.rank]]
        _check_fold(nested, reduction, members)
        _check_fold(part, reduction, _members(comm.rank, outer.value))

    @_law
    @given(color=ranked.per_rank(st.integers(0, 1)), calls=ranked.per_rank(st.integers(0, 3)))
    def test_groups_go_their_own_ways(self, comm: Communicator, color: int, calls: int) -> None:
        """Groups need not make the same calls, nor as many of them."""
        part = comm.split(color)
        assert part is not None
        most = part.allreduce(calls, "max")
        for number in range(most):
            assert part.allreduce(number) == number * part.size
        assert comm.allreduce(1) == comm.size

    @_law
    @given(first=reductions(), second=reductions(), order=_orders)
    def test_dup_is_independent(
        self, comm: Communicator, first: Reduction, second: Reduction, order: Sequence[int]
    ) -> None:
        """Calls on a duplicate and on its original do not wait for one another.

        Each rank waits for them in an order of its own. The original outlives the duplicate.
        """
        other = comm.dup()
        started = [(comm, first), (other, second), (comm, second)]
        requests = [
            group.iallreduce(reduction.arrays.build(comm.rank), reduction.op)
            for group, reduction in started
        ]
        for number in order:
            reduction = started[number][1]
            found = elements_of(requests[number].wait())
            check_elements(found, reduction.fold(), reduction.op)
        other.free()
        with _raises(CommunicatorClosedError):
            other.barrier()
        _check_fold(comm, first, range(comm.size))


class FailureLaws:
    """What is promised where ranks do not agree."""

    @_law
    @given(
        ranks=_SEVERAL,
        kinds=st.deferred(lambda: st.lists(st.sampled_from(sorted(_DISAGREEMENTS)), min_size=1)),
        culprit=ranked.roots(),
        count=st.sampled_from((2, 5_000, 40_000)),
        before=st.integers(0, 2),
    )
    def test_disagreement_is_an_error_on_every_rank(
        self, comm: Communicator, kinds: Sequence[str], culprit: int, count: int, before: int
    ) -> None:
        """Where one rank calls something else, all raise `MismatchError`, and none hangs.

        The error tells which rank it was. Later calls say that the communicator is closed; the one
        that it is a duplicate of goes on.
        """
        x = np.ones(count, np.float32)
        for kind in kinds:
            usual, other = _DISAGREEMENTS[kind]
            part = comm.dup()
            for _ in range(before):
                part.allreduce(x)
            with _raises(MismatchError) as caught:
                (other if comm.rank == culprit else usual)(part, x)
            assert f"rank {culprit}" in str(caught[0]), caught[0]
            with _raises(CommunicatorClosedError):
                part.barrier()
            assert comm.allreduce(1) == comm.size

    @_law
    @given(
        wrong=sealed(
            ranked.per_rank(
                st.deferred(lambda: st.none() | st.sampled_from(sorted(_WRONG_ARGUMENTS)))
            )
        ),
        count=st.sampled_from((2, 40_000)),
    )
    def test_wrong_argument_is_an_error_on_every_rank(
        self, comm: Communicator, wrong: Sealed[Any], count: int
    ) -> None:
        """The ranks that pass one raise the built-in error, and the others `PeerError`.

        All are still in step after that, and go on.
        """
        culprits = [rank for rank, kind in enumerate(wrong.value) if kind is not None]
        kind, x = wrong.value[comm.rank], np.ones(count, np.float32)
        for _ in range(2):
            if kind is not None:
                error, call = _WRONG_ARGUMENTS[kind]
                with _raises(error):
                    call(comm, x)
            elif culprits:
                with _raises(PeerError) as caught:
                    comm.allreduce(x)
                assert caught[0].rank in culprits, f"rank {caught[0].rank} is not to blame"
            assert comm.allreduce(1) == comm.size

    @_law
    @given(ranks=_SEVERAL, culprit=ranked.roots(), count=st.sampled_from((2, 40_000)))
    def test_rank_that_leaves_is_an_error_on_the_others(
        self, comm: Communicator, culprit: int, count: int
    ) -> None:
        """Where one rank has ended, the others' next call raises `PeerError` with its number."""
        x = np.ones(count, np.float32)
        comm.allreduce(x)
        if comm.rank == culprit:
            return
        with _raises(PeerError) as caught:
            comm.allreduce(x)
        assert caught[0].rank == culprit, f"rank {caught[0].rank} is not to blame"
        with _raises(CommunicatorClosedError):
            comm.barrier()

    @_law
    @given(ranks=_SEVERAL, culprit=ranked.roots(), count=st.sampled_from((2, 40_000)))
    def test_exception_before_a_call_is_an_error_on_the_others(
        self, comm: Communicator, culprit: int, count: int
    ) -> None:
        """An exception that leaves `with comm:` on one rank is `PeerError` on the others.

        They learn of it in their next call on this communicator, and others go on.
        """
        x = np.ones(count, np.float32)
        expected_error = ArithmeticError if comm.rank == culprit else PeerError
        with _raises(expected_error) as caught, comm.dup() as part:
            part.allreduce(x)
            if comm.rank == culprit:
                raise ArithmeticError("before the call")
            part.allreduce(x)
        if comm.rank != culprit:
            assert caught[0].rank == culprit, f"rank {caught[0].rank} is not to blame"
            assert "before the call" in caught[0].traceback, caught[0].traceback
        assert comm.allreduce(1) == comm.size


class Conformance(ReductionLaws, MovementLaws, TreeLaws, GroupLaws, FailureLaws):
    """All laws, over the communicator that a subclass says.

    Override `world` where every rank is a process, or `links` where ranks are threads of this one.
    As it stands, ranks are threads that communicate as those of `arraycomm.testing.run` do.

    Attributes
    ----------
    most_ranks : int
        How many ranks an example has at most where ranks are threads.

    Notes
    -----
    pytest collects a subclass whose name begins with Test, and shows the values in a failed
    assertion after `pytest.register_assert_rewrite("arraycomm.testing")` in `conftest.py`. A law
    that is not to be checked is set to None in the subclass.

    Examples
    --------
    Under `mpiexec -n 4 python -m pytest`:

    >>> import functools
    >>> import arraycomm
    >>> from arraycomm.testing.conformance import Conformance
    >>> @functools.cache
    ... def over_my_ranks():
    ...     from mpi4py import MPI
    ...
    ...     return arraycomm.Communicator.from_mpi(MPI.COMM_WORLD)
    >>> class TestMyCommunicator(Conformance):
    ...     def world(self):
    ...         return over_my_ranks()
    """

    most_ranks: int = 4

    def world(self) -> Communicator | None:
        """Return this process's communicator, whose ranks run the suite in step.

        Returns
        -------
        Communicator or None
            The same object at every call: this is asked for every test. None, the default, where
            ranks are threads.
        """
        return None

    def links(self, size: int) -> Sequence[Transport]:
        """Return new transports for so many ranks, which are threads of this process.

        Parameters
        ----------
        size : int
            How many ranks, from 1 to `most_ranks`.

        Returns
        -------
        sequence of Transport
            One for each rank, in the order of ranks.
        """
        return make_group(size)

    def _group(self) -> Group:
        """Return the ranks that `given` runs the laws on."""
        comm = self.world()
        if comm is not None:
            return lockstep_over(comm)
        group = Threads(self.links)
        group.size = group.usual = self.most_ranks
        return group


# What laws have in common -----------------------------------------------------------------------


def _check_fold(comm: Communicator, reduction: Reduction, members: Sequence[int]) -> None:
    """Fail unless `comm` reduces the arrays of these ranks of the example, in this order."""
    op, elements = reduction.op, reduction.arrays.elements()
    x = reduction.arrays.build(members[comm.rank])
    want = expected([elements[rank] for rank in members], op)
    check_elements(check_like(comm.allreduce(x, op), x), want, op)


def _members(rank: int, colors: Sequence[Any], keys: Sequence[int] | None = None) -> list[int]:
    """Return the ranks of the same color, in the order of their new ranks."""
    same = [other for other, color in enumerate(colors) if color == colors[rank]]
    return same if keys is None else sorted(same, key=lambda other: (keys[other], other))


def _arguments(comm: Communicator, x: Any, op: str, root: int) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of every collective that can be called with a row for each rank."""
    one_each = [1] * comm.size
    return {
        "allreduce": (x, op),
        "reduce": (x, op, root),
        "reduce_scatter": (x, op),
        "scan": (x, op),
        "exscan": (x, op),
        "bcast": (x, root),
        "allgather": (x,),
        "allgatherv": (x,),
        "gather": (x, root),
        "gatherv": (x, root),
        "scatter": (x, root),
        "scatterv": (x, one_each, root),
        "alltoall": (x,),
        "alltoallv": (x, one_each),
    }


def _calls(comm: Communicator, x: Any, op: str, root: int) -> dict[str, Callable[[], list[Any]]]:
    """Return calls with a row for each rank, each of which returns its results."""

    def call(name: str, *args: Any) -> list[Any]:
        result = getattr(comm, name)(*args)
        return [] if result is None else [result]

    collectives = {
        name: functools.partial(call, name, *args)
        for name, args in _arguments(comm, x, op, root).items()
    }
    return {
        **collectives,
        "iallreduce": lambda: [comm.iallreduce(x, op).wait()],
        "synchronize": lambda: list(synchronize([x], root=root, comm=comm)),
        "allreduce_tree": lambda: list(allreduce_tree([x], op, comm=comm)),
    }


def _check_apart(name: str, *results: Any) -> None:
    memories = [elements_of(result) for result in results]
    for number, memory in enumerate(memories):
        for other in memories[:number]:
            assert not np.shares_memory(memory, other), f"a result of {name} shares memory"


def _check_ties(got: Any, before: Any) -> None:
    """Fail unless the same leaves of both trees are one array."""
    pairs = [pair for pair in leaves_of(got, before) if is_array(pair[1])]
    for number, (leaf, like) in enumerate(pairs):
        for other, other_like in pairs[:number]:
            if like is other_like:
                assert leaf is other, "an array that was found twice became two"
            else:
                must_not_alias = not np.shares_memory(elements_of(leaf), elements_of(other))
                assert must_not_alias, "two arrays share memory"


def _lopsided(a: Any, b: Any) -> Any:
    return a * 3 - b


@contextmanager
def _neighbours_unchanged(array: Any) -> Iterator[None]:
    """Fail unless all memory that an array lies in, but for its elements, stays as it is."""
    elements = elements_of(array)
    memory = _whole_memory(elements)
    own, before = elements.copy(), memory.tobytes()
    yield
    now = elements.copy()
    elements[...] = own
    assert memory.tobytes() == before, "memory outside of the elements was written"
    elements[...] = now


def _whole_memory(array: Array) -> Array:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@contextmanager
def _raises(kind: type[BaseException]) -> Iterator[list[Any]]:
    """Fail unless the block raises an error of this kind, which is put into the list."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")


_Call = Callable[[Communicator, Array], Any]


def _then(*calls: _Call) -> _Call:
    """Return a function that makes calls one after the other."""

    def make(comm: Communicator, x: Array) -> None:
        for call in calls:
            call(comm, x)

    return make


def _barrier(comm: Communicator, _: Array) -> None:
    comm.barrier()


def _allreduce(comm: Communicator, x: Array) -> Any:
    return comm.allreduce(x)


# By the kind of the disagreement: what the others call, and what one rank does.
_DISAGREEMENTS: Final[dict[str, tuple[_Call, _Call]]] = {
    "op": (_allreduce, lambda comm, x: comm.allreduce(x, "max")),
    "dtype": (_allreduce, lambda comm, x: comm.allreduce(x.astype(np.float64))),
    "shape": (_allreduce, lambda comm, x: comm.allreduce(x[:, None])),
    "length": (_allreduce, lambda comm, x: comm.allreduce(x[1:])),
    "number": (_allreduce, lambda comm, _: comm.allreduce(1.0)),
    "root": (
        lambda comm, x: comm.reduce(x, root=0),
        lambda comm, x: comm.reduce(x, root=1),
    ),
    "length of bcast": (
        lambda comm, x: comm.bcast(x, 0),
        lambda comm, x: comm.bcast(x[1:], 0),
    ),
    "operation": (_allreduce, lambda comm, x: comm.allgather(x)),
    "request": (_allreduce, lambda comm, x: comm.ireduce(x).wait()),
    "prefix": (lambda comm, x: comm.scan(x), lambda comm, x: comm.exscan(x)),
    "dtype of rows": (
        lambda comm, x: comm.allgatherv(x),
        lambda comm, x: comm.allgatherv(x.astype(np.float64)),
    ),
    "order": (_then(_allreduce, _barrier), _then(_barrier, _allreduce)),
    "one call more": (_allreduce, _then(_barrier, _allreduce)),
    "one call less": (_then(_barrier, _allreduce), _allreduce),
    "object": (
        lambda comm, x: comm.bcast_object(x, 0),
        lambda comm, x: comm.allgather_object(x),
    ),
    "options": (lambda comm, _: comm.dup(), lambda comm, _: comm.dup(timeout=3.0)),
    "split": (lambda comm, _: comm.dup(), lambda comm, _: comm.split(0)),
    "structure": (
        lambda comm, x: allreduce_tree({"a": x}, comm=comm),
        lambda comm, x: allreduce_tree([x], comm=comm),
    ),
    "leaf": (
        lambda comm, x: synchronize({"a": x, "b": 1}, comm=comm),
        lambda comm, x: synchronize({"a": x, "b": 1.0}, comm=comm),
    ),
    "ties": (
        lambda comm, x: allreduce_tree([x, x], comm=comm),
        lambda comm, x: allreduce_tree([x, x.copy()], comm=comm),
    ),
    "fusion": (
        lambda comm, x: allreduce_tree([x], comm=comm),
        lambda comm, x: allreduce_tree([x], bucket_bytes=1, comm=comm),
    ),
}

# By what is wrong: the error, and a call that raises it.
_WRONG_ARGUMENTS: Final[dict[str, tuple[type[Exception], _Call]]] = {
    "no array": (TypeError, lambda comm, _: comm.allreduce({"a": 1})),
    "objects": (TypeError, lambda comm, _: comm.allgather(np.array([{}]))),
    "op of dtype": (TypeError, lambda comm, x: comm.allreduce(x > 0, "sum")),
    "unknown op": (ValueError, lambda comm, x: comm.reduce(x, "average")),
    "root": (ValueError, lambda comm, x: comm.bcast(x, comm.size)),
    "nothing to send": (TypeError, lambda comm, _: comm.bcast(None, comm.rank)),
    "shape of out": (ValueError, lambda comm, x: comm.allreduce(x, out=x[1:].copy())),
    "dtype of out": (TypeError, lambda comm, x: comm.allreduce(x, out=np.empty(len(x)))),
    "read-only out": (
        BufferError,
        lambda comm, x: comm.allreduce(x, out=np.broadcast_to(x[0], x.shape)),
    ),
    "large number": (OverflowError, lambda comm, _: comm.allreduce(2**64)),
    "leaf": (TypeError, lambda comm, x: allreduce_tree([x, "text"], comm=comm)),
    "no leaf": (TypeError, lambda comm, x: synchronize([x, object()], comm=comm)),
    "counts": (ValueError, lambda comm, x: comm.alltoallv(x, [len(x) + 1] * comm.size)),
    "color": (TypeError, lambda comm, _: comm.split(0.5)),  # type: ignore[arg-type]
    "unpicklable": (Exception, lambda comm, _: comm.allgather_object(threading.Lock())),
}
