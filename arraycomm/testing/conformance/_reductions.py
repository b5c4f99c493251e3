"""Laws of reductions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from arraycomm._calls import custom_ops
from arraycomm._communicator import Communicator
from arraycomm._dtypes import OPS as ALL_OPS
from arraycomm._dtypes import TABLE, OpName, has_reduction, name_of
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.array_case import ArrayCase
from arraycomm.testing._arrays.frameworks import elements_of, elements_to_write
from arraycomm.testing._arrays.oracle import CASES, expected
from arraycomm.testing.conformance._checks import (
    check_elements,
    check_like,
    native,
    neighbours_unchanged,
    overwrite,
)
from arraycomm.testing.conformance._inputs import (
    Arrays,
    Reduction,
    Sealed,
    arranged_twice,
    arrays,
    complete_frameworks,
    equal_arrays,
    orders_of_ranks,
    orders_of_requests,
    reductions,
    reductions_into,
    reductions_of_rows,
    reductions_of_shares,
    reductions_of_sizes,
    successive_reductions,
)
from arraycomm.testing.conformance._law import law, requested
from arraycomm.testing.conformance._tree_inputs import reductions_of_numbers


class ReductionLaws:
    """What reductions promise."""

    @law(reduction=reductions())
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

    @law(reduction=reductions(), root=ranked.roots())
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

    @law(reduction=reductions(), root=ranked.roots())
    def test_allreduce_is_reduce_then_bcast(
        self, comm: Communicator, reduction: Reduction, root: int
    ) -> None:
        """The result of `allreduce` is that of `reduce`, sent from the root to all ranks."""
        op, x = reduction.op, reduction.arrays.build(comm.rank)
        whole = elements_of(comm.allreduce(x, op))
        in_two_steps = elements_of(comm.bcast(comm.reduce(x, op, root), root))
        check_elements(in_two_steps, whole, op)

    @law(reduction=reductions_of_sizes())
    def test_size_does_not_matter(self, comm: Communicator, reduction: Reduction) -> None:
        """The result is the fold on both sides of each size at which the algorithm changes."""
        op, x, want = reduction.op, reduction.arrays.build(comm.rank), reduction.fold()
        for _ in range(2):
            check_elements(check_like(comm.allreduce(x, op), x), want, op)
        result = comm.reduce(x, op) if hasattr(comm, "reduce") else None
        if result is not None:
            check_elements(elements_of(result), want, op)

    @law(op=st.sampled_from(ALL_OPS), seed=st.integers(1, 2**24 - 1))
    def test_every_dtype_has_its_ops(self, comm: Communicator, op: OpName, seed: int) -> None:
        """Each dtype gets its fold in rank order of the reductions that the table says."""
        dtypes = [row.dtype for row in TABLE if has_reduction(row.dtype, op)]
        assert dtypes == [row.dtype for row in TABLE if (row.dtype, op) in CASES]
        assert {op for _, op in CASES} == {*ALL_OPS}
        for dtype in dtypes:
            cases = [ArrayCase(name_of(dtype), (40,), seed=seed + r) for r in range(comm.size)]
            want = expected([case.numpy() for case in cases], op)
            check_elements(comm.allreduce(cases[comm.rank].build(), op), want, op)

    @law(calls=successive_reductions())
    def test_repeated_calls_reduce_what_they_are_given(
        self, comm: Communicator, calls: Sequence[Reduction]
    ) -> None:
        """Calls with arrays of one dtype and shape are independent, also if the op is another."""
        for op, given_arrays in calls:
            x = given_arrays.build(comm.rank)
            want = expected(given_arrays.elements(), op)
            check_elements(check_like(comm.allreduce(x, op), x), want, op)

    @law(reduction=reductions_of_sizes())
    def test_check_does_not_matter(self, comm: Communicator, reduction: Reduction) -> None:
        """The result is the fold also with `check=False`."""
        op, x, want = reduction.op, reduction.arrays.build(comm.rank), reduction.fold()
        unchecked = comm.dup(check=False)
        for _ in range(2):
            check_elements(check_like(unchecked.allreduce(x, op), x), want, op)

    @law(reduction=reductions(families=("real", "complex")))
    def test_every_rank_gets_the_same_bits(self, comm: Communicator, reduction: Reduction) -> None:
        """Ranks do not even differ in the payload of a NaN or the sign of a zero."""
        x = reduction.arrays.build(comm.rank)
        local = [elements_of(comm.allreduce(x, reduction.op)).tobytes() for _ in range(2)]
        for rank, theirs in enumerate(comm.allgather_object(local)):
            assert theirs == local, f"rank {rank} got other bits than rank {comm.rank}"

    @law(drawn=arranged_twice())
    def test_layout_and_framework_do_not_matter(
        self, comm: Communicator, drawn: tuple[Reduction, Arrays]
    ) -> None:
        """The same elements in other layouts, and of other frameworks, give the same bits."""
        (op, plain), arranged = drawn
        want = elements_of(comm.allreduce(plain.build(comm.rank), op))
        x = arranged.build(comm.rank)
        for result in (comm.allreduce(x, op), *requested(comm, "iallreduce", x, op)):
            check_elements(check_like(result, x), want, op)

    @law(
        reduction=reductions(layouts="contiguous", frameworks="numpy"),
        swapped=ranked.per_rank(st.booleans()),
    )
    def test_byte_order_does_not_matter(
        self, comm: Communicator, reduction: Reduction, swapped: bool
    ) -> None:
        """Numbers of the other byte order are converted; results have that of the machine."""
        (op, given_arrays), x = reduction, reduction.arrays.build(comm.rank)
        if swapped and x.dtype.isbuiltin == 1:
            x = x.astype(x.dtype.newbyteorder())
        for result in (comm.allreduce(x, op), *requested(comm, "iallreduce", x, op)):
            check_elements(result, reduction.fold(), op)
        if hasattr(comm, "allgather"):
            check_elements(comm.allgather(x), np.stack(given_arrays.elements()))

    @law(reduction=reductions(ops=("min", "max")))
    def test_extremes_are_where_they_are_said_to_be(
        self, comm: Communicator, reduction: Reduction
    ) -> None:
        """`maxloc` and `minloc` return what "max" and "min" do, and the first rank that has it."""
        x, op = reduction.arrays.build(comm.rank), reduction.op
        values, ranks = comm.maxloc(x) if op == "max" else comm.minloc(x)
        want, places = reduction.fold(), elements_of(ranks)
        check_elements(check_like(values, x), want, op)
        assert places.dtype == np.int32
        elements = np.stack(reduction.arrays.elements())
        same = (elements == want) | ~np.equal(elements, elements)
        np.testing.assert_array_equal(same.argmax(0), places)

    @law(reduction=reductions() | reductions_of_sizes())
    def test_scan_is_the_fold_of_the_ranks_so_far(
        self, comm: Communicator, reduction: Reduction
    ) -> None:
        """`scan` folds the arrays up to and including this rank's, `exscan` those before it."""
        op, x = reduction.op, reduction.arrays.build(comm.rank)
        elements = reduction.arrays.elements()
        found = check_like(comm.scan(x, op), x)
        check_elements(found, expected(elements[: comm.rank + 1], op), op)
        before = comm.exscan(x, op)
        if comm.rank == 0:
            assert before is None, f"got {before!r}, but there is no rank before rank 0"
        else:
            check_elements(check_like(before, x), expected(elements[: comm.rank], op), op)

    @law(reduction=reductions_of_rows())
    def test_reduce_scatter_is_a_row_of_allreduce(
        self, comm: Communicator, reduction: Reduction
    ) -> None:
        """Rank r gets row r of the fold."""
        op, x = reduction.op, reduction.arrays.build(comm.rank)
        found = check_like(comm.reduce_scatter(x, op), x)
        check_elements(found, reduction.fold()[comm.rank, ...], op)

    @law(drawn=reductions_of_shares())
    def test_reduce_scatter_with_counts_is_a_share_of_allreduce(
        self, comm: Communicator, drawn: tuple[Reduction, list[int]]
    ) -> None:
        """Rank r gets its counts[r] rows of the fold, which may be none."""
        (op, given_arrays), counts = drawn
        x, start = given_arrays.build(comm.rank), sum(counts[: comm.rank])
        want = drawn[0].fold()[start : start + counts[comm.rank]]
        check_elements(check_like(comm.reduce_scatter(x, op, counts=counts), x), want, op)
        for result in requested(comm, "ireduce_scatter", x, op, counts=counts):
            check_elements(check_like(result, x), want, op)

    @law(
        given_arrays=arrays(
            ("int32", "int64"),
            st.integers(1, 9) | st.sampled_from((4_000, 9_000)),
            frameworks=complete_frameworks,
        ),
        elementwise=st.booleans(),
        root=ranked.roots(),
    )
    def test_functions_are_folded_in_rank_order(
        self, comm: Communicator, given_arrays: Arrays, elementwise: bool, root: int
    ) -> None:
        """A custom op need be neither commutative nor associative."""
        x, own = given_arrays.build(comm.rank), custom_ops.op(_lopsided, elementwise=elementwise)
        # Of the first rank, the first two, and so on.
        so_far = list(itertools.accumulate(given_arrays.elements(), _lopsided))
        whole = so_far[-1]
        for _ in range(2):
            check_elements(check_like(comm.allreduce(x, own), x), whole)
        check_elements(check_like(comm.scan(x, own), x), so_far[comm.rank])
        before = comm.exscan(x, own)
        assert (before is None) == (comm.rank == 0)
        if before is not None:
            check_elements(check_like(before, x), so_far[comm.rank - 1])
        result = comm.reduce(x, own, root)
        assert (result is None) == (comm.rank != root)
        if result is not None:
            check_elements(check_like(result, x), whole)

    @law(first=reductions(), second=reductions(), order=orders_of_requests())
    def test_requests_give_what_blocking_calls_give(
        self, comm: Communicator, first: Reduction, second: Reduction, order: Sequence[int]
    ) -> None:
        """Requests may be waited for in any order, which may differ between ranks."""
        started = [first, second, first]
        arguments = [reduction.arrays.build(comm.rank) for reduction in started]
        requests = [
            comm.iallreduce(x, reduction.op)
            for x, reduction in zip(arguments, started, strict=True)
        ]
        for number in order:
            found = check_like(requests[number].wait(), arguments[number])
            check_elements(found, started[number].fold(), started[number].op)

    @law(drawn=reductions_into(), root=ranked.roots())
    def test_out_gets_the_result_and_its_neighbours_nothing(
        self, comm: Communicator, drawn: tuple[Reduction, Any], root: int
    ) -> None:
        """`out` may have any layout; the memory between its elements stays as it is."""
        reduction, out = drawn
        op, x, want = reduction.op, reduction.arrays.build(comm.rank), reduction.fold()
        for _ in range(2):
            overwrite(out)
            with neighbours_unchanged(out):
                assert comm.allreduce(x, op, out=out) is out
                check_elements(native(elements_of(out)), want, op)
        with neighbours_unchanged(out):
            result = comm.reduce(x, op, root, out=out if comm.rank == root else None)
            if comm.rank == root:
                assert result is out
                check_elements(native(elements_of(out)), want, op)

    @law(drawn=reductions_into())
    def test_out_may_be_the_input(self, comm: Communicator, drawn: tuple[Reduction, Any]) -> None:
        """A reduction in place gives the same result as any other."""
        (reduction, x), op = drawn, drawn[0].op
        with elements_to_write(x) as elements:
            elements[...] = reduction.arrays.elements()[comm.rank]
        assert comm.allreduce(x, op, out=x) is x
        check_elements(native(elements_of(x)), reduction.fold(), op)

    @law(reduction=reductions(families=("integer", "bool")), order=orders_of_ranks())
    def test_integers_commute(
        self, comm: Communicator, reduction: Reduction, order: Sequence[int]
    ) -> None:
        """Reductions of integers and booleans do not depend on which rank has which array."""
        op, given_arrays = reduction
        straight = elements_of(comm.allreduce(given_arrays.build(comm.rank), op))
        permuted = elements_of(comm.allreduce(given_arrays.build(order[comm.rank]), op))
        check_elements(permuted, straight)

    @law(
        reduction=reductions(families=("integer", "bool")), color=ranked.per_rank(st.integers(0, 2))
    )
    def test_integers_associate(self, comm: Communicator, reduction: Reduction, color: int) -> None:
        """Integers and booleans may be reduced within groups first, and then between groups."""
        op, x = reduction.op, reduction.arrays.build(comm.rank)
        whole = elements_of(comm.allreduce(x, op))
        part = comm.split(color)
        assert part is not None
        partial = part.allreduce(x, op)
        firsts = comm.split(0 if part.rank == 0 else None)
        if firsts is not None:
            check_elements(elements_of(firsts.allreduce(partial, op)), whole)

    @law(reduction=reductions(("min", "max")), order=orders_of_ranks())
    def test_min_and_max_commute(
        self, comm: Communicator, reduction: Reduction, order: Sequence[int]
    ) -> None:
        """It does not matter which rank has the minimum, the maximum or a NaN."""
        _check_order(comm, reduction, order)

    @law(reduction=reductions(("fsum",)), order=orders_of_ranks())
    def test_exact_sums_commute(
        self, comm: Communicator, reduction: Reduction, order: Sequence[int]
    ) -> None:
        """It does not matter which rank has which summand."""
        _check_order(comm, reduction, order)

    @law(parts=st.lists(st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 3), min_size=1, max_size=9))
    def test_turns_add_up_to_the_fold_of_all_parts(
        self, comm: Communicator, parts: Sequence[Sequence[float]]
    ) -> None:
        """Ranks that take turns get the same sum on any number of ranks.

        Rank 0 adds the total of the turns before to its own part. A rank without a part in the last
        turn passes -0.0, which changes no number that it is added to.
        """
        rows, nothing = np.array(parts, np.float32), np.full(3, -0.0, np.float32)
        total = nothing
        for first in range(0, len(rows), comm.size):
            place = first + comm.rank
            mine = rows[place] if place < len(rows) else nothing
            total = comm.allreduce(total + mine if comm.rank == 0 else mine, "sum")
        check_elements(elements_of(total), [*itertools.accumulate(rows, np.add)][-1], "sum")

    @law(x=equal_arrays())
    def test_mean_of_equal_values_is_that_value(self, comm: Communicator, x: Any) -> None:
        """This holds if sums are exact, as of numbers with few digits; signs of zeros count."""
        for _ in range(2):
            check_elements(check_like(comm.allreduce(x, "mean"), x), native(elements_of(x)))

    @law(drawn=reductions_of_numbers())
    def test_numbers_come_back_as_their_type(
        self, comm: Communicator, drawn: tuple[OpName, Sealed[Any]]
    ) -> None:
        """Python and NumPy numbers are reduced as arrays without dimensions are."""
        op, numbers = drawn[0], drawn[1].value
        folds = [(comm.allreduce, comm.size), (comm.scan, comm.rank + 1), (comm.exscan, comm.rank)]
        for call, count in folds * 2:
            got, rows = call(numbers[comm.rank], op), [*map(np.asarray, numbers[:count])]
            assert type(got) is (type(numbers[comm.rank]) if rows else type(None))
            if rows:
                check_elements(np.asarray(got), expected(rows, op), op)

    @law(ranks=1, reduction=reductions())
    def test_one_rank_alone_gets_what_it_gave(
        self, comm: Communicator, reduction: Reduction
    ) -> None:
        """On one rank every reduction is the identity, but for −0 in an exact sum."""
        x, [want] = reduction.arrays.build(0), reduction.arrays.elements()
        if reduction.op == "fsum":
            want = reduction.fold()
        for result in (comm.allreduce(x, reduction.op), comm.reduce(x, reduction.op)):
            check_elements(check_like(result, x), want)


def _check_order(comm: Communicator, reduction: Reduction, order: Sequence[int]) -> None:
    op, given_arrays = reduction
    straight = elements_of(comm.allreduce(given_arrays.build(comm.rank), op))
    permuted = elements_of(comm.allreduce(given_arrays.build(order[comm.rank]), op))
    check_elements(permuted, straight, op)


def _lopsided(a: Any, b: Any) -> Any:
    return a * 3 - b
