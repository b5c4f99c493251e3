"""Laws of the reductions, over drawn dtypes, values, layouts and numbers of ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm.testing import run
from properties.strategies import cases, dtypes, laid_out, layouts, per_rank_arrays, sizes
from tests.collectives.oracle import FLOAT, INTEGER, expected, same_bits, same_result

EXAMPLES = settings(max_examples=60, deadline=None)


@EXAMPLES
@given(st.data(), cases, sizes)
def test_allreduce_equals_the_fold_in_rank_order(data, case, size) -> None:
    dtype, op = case
    arrays = data.draw(per_rank_arrays(size, dtype))
    some = slice(0, None, max(len(arrays[0]) // 50, 1))
    want = expected([a[some] for a in arrays], op)
    for got in run(size, lambda comm: comm.allreduce(arrays[comm.rank], op)):
        assert same_result(got[some].copy(), want, op)


@EXAMPLES
@given(st.data(), cases, sizes)
def test_every_rank_has_the_same_bits_and_no_input_changes(data, case, size) -> None:
    dtype, op = case
    arrays = data.draw(per_rank_arrays(size, dtype))
    before = [a.tobytes() for a in arrays]
    results = run(size, lambda comm: comm.allreduce(arrays[comm.rank], op).tobytes())
    assert len(set(results)) == 1
    assert [a.tobytes() for a in arrays] == before


@EXAMPLES
@given(st.data(), cases, sizes, layouts, layouts)
def test_layout_call_form_and_fusion_do_not_matter(data, case, size, layout, other) -> None:
    dtype, op = case
    arrays = data.draw(per_rank_arrays(size, dtype))

    def check(comm: ac.Communicator) -> None:
        mine = arrays[comm.rank]
        want = comm.allreduce(mine, op)
        arranged = laid_out(mine, layout if comm.rank % 2 else other)
        assert same_bits(comm.allreduce(arranged, op), want)
        assert same_bits(comm.iallreduce(mine, op).wait(), want)
        out = laid_out(np.empty_like(mine), other)
        assert same_bits(comm.allreduce(mine, op, out=out).copy(), want)
        tree = ac.allreduce_tree([mine, {"again": arranged, "n": None}], op, comm=comm)
        assert same_bits(tree[0], want)
        assert same_bits(tree[1]["again"], want)

    run(size, check)


@EXAMPLES
@given(st.data(), cases, sizes)
def test_allreduce_is_reduce_then_bcast(data, case, size) -> None:
    dtype, op = case
    arrays = data.draw(per_rank_arrays(size, dtype))
    root = data.draw(st.integers(0, size - 1))

    def check(comm: ac.Communicator) -> None:
        whole = comm.allreduce(arrays[comm.rank], op)
        assert same_bits(comm.bcast(comm.reduce(arrays[comm.rank], op, root), root), whole)

    run(size, check)


@EXAMPLES
@given(st.data(), st.sampled_from(INTEGER), sizes)
def test_integer_sums_do_not_depend_on_who_holds_what(data, dtype, size) -> None:
    arrays = data.draw(per_rank_arrays(size, dtype))
    order = data.draw(st.permutations(range(size)))
    straight = run(size, lambda comm: comm.allreduce(arrays[comm.rank]))
    permuted = run(size, lambda comm: comm.allreduce(arrays[order[comm.rank]]))
    assert same_bits(straight[0], permuted[0])


@EXAMPLES
@given(st.data(), st.sampled_from(FLOAT), st.sampled_from(["min", "max"]), sizes)
def test_min_and_max_do_not_depend_on_who_holds_what(data, dtype, op, size) -> None:
    arrays = data.draw(per_rank_arrays(size, dtype))
    order = data.draw(st.permutations(range(size)))
    straight = run(size, lambda comm: comm.allreduce(arrays[comm.rank], op))
    permuted = run(size, lambda comm: comm.allreduce(arrays[order[comm.rank]], op))
    assert same_result(straight[0], permuted[0], op)


@EXAMPLES
@given(st.data(), cases)
def test_one_rank_alone_is_the_identity(data, case) -> None:
    dtype, op = case
    [array] = data.draw(per_rank_arrays(1, dtype))
    [got] = run(1, lambda comm: comm.allreduce(array, op))
    assert same_bits(got, array)
    assert not np.shares_memory(got, array)


@EXAMPLES
@given(st.data(), dtypes, sizes)
def test_allgather_stacks_and_bcast_copies(data, dtype, size) -> None:
    arrays = data.draw(per_rank_arrays(size, dtype))
    root = data.draw(st.integers(0, size - 1))

    def check(comm: ac.Communicator) -> None:
        assert comm.allgather(arrays[comm.rank]).tobytes() == np.stack(arrays).tobytes()
        mine = arrays[root] if comm.rank == root else None
        assert comm.bcast(mine, root).tobytes() == arrays[root].tobytes()

    run(size, check)
