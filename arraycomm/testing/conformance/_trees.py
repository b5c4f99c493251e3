"""Laws of pytrees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

from arraycomm._communicator import Communicator
from arraycomm._dtypes import OpName
from arraycomm._errors import MismatchError
from arraycomm._functions import allreduce_gradients, allreduce_tree, synchronize
from arraycomm._training.join import join
from arraycomm._training.metrics import mean_metrics
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.array_case import ArrayCase
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing._arrays.oracle import expected
from arraycomm.testing.conformance._checks import (
    check_copy,
    check_elements,
    check_leaf,
    check_leaf_of_fold,
    check_like,
    check_mean,
    is_array,
    leaves_of,
    native,
    raises,
)
from arraycomm.testing.conformance._inputs import (
    Arrays,
    Reduction,
    Sealed,
    complete_frameworks,
    reductions,
    sealed,
)
from arraycomm.testing.conformance._law import law
from arraycomm.testing.conformance._tree_inputs import (
    gradients,
    kept_trees,
    metrics,
    reducible_trees,
    state_trees,
    training_frameworks,
)


class TreeLaws:
    """What functions of pytrees promise."""

    @law(tree=state_trees(), root=ranked.roots())
    def test_synchronize_gives_all_the_values_of_root(
        self, comm: Communicator, tree: Sealed[Any], root: int
    ) -> None:
        """Structure, containers and kinds of leaves stay, and all values are the root's."""
        local, roots = tree.on(comm.rank), tree.on(root)
        got = synchronize(local, root=root, comm=comm)
        for leaf, like, want in leaves_of(got, local, roots):
            check_leaf(leaf, like, want)

    @law(tree=state_trees(), root=ranked.roots())
    def test_synchronize_is_idempotent(
        self, comm: Communicator, tree: Sealed[Any], root: int
    ) -> None:
        """Trees that are equal on all ranks stay as they are."""
        once = synchronize(tree.on(comm.rank), root=root, comm=comm)
        twice = synchronize(once, root=(root + 1) % comm.size, comm=comm)
        for leaf, before in leaves_of(twice, once):
            check_leaf(leaf, before, before)

    @law(
        tree=state_trees(complete_frameworks),
        root=ranked.roots(),
        has_tree=ranked.per_rank(st.booleans()),
    )
    def test_none_takes_the_tree_of_root(
        self, comm: Communicator, tree: Sealed[Any], root: int, has_tree: bool
    ) -> None:
        """A rank that passes None gets the root's tree; others keep their own kinds of leaves."""
        roots = tree.on(root)
        hypothesis.assume(roots is not None)
        local = tree.on(comm.rank) if has_tree or comm.rank == root else None
        got = synchronize(local, root=root, comm=comm)
        for leaf, like, want in leaves_of(got, roots if local is None else local, roots):
            if local is None and is_array(want):
                assert type(leaf) is type(want)
                check_copy(native(elements_of(leaf)), native(elements_of(want)))
            else:
                check_leaf(leaf, like, want)

    @law(tree=kept_trees(), root=ranked.roots())
    def test_synchronize_leaves_functions_and_generators_alone(
        self, comm: Communicator, tree: Any, root: int
    ) -> None:
        """A leaf without values stays the same object."""
        for leaf, before in leaves_of(synchronize(tree, root=root, comm=comm), tree):
            assert leaf is before, f"got {leaf!r}, not {before!r}"

    @law(tree=state_trees(), drawn=reducible_trees())
    def test_ties_stay_ties(
        self, comm: Communicator, tree: Sealed[Any], drawn: tuple[OpName, Any]
    ) -> None:
        """Leaves that are one array stay one, and other leaves do not share memory."""
        state, (op, summands) = tree.on(comm.rank), drawn
        _check_ties(synchronize(state, comm=comm), state)
        _check_ties(allreduce_tree(summands, op, comm=comm), summands)

    @law(
        reduction=reductions(frameworks=complete_frameworks),
        ranks_with_ties=st.sets(st.integers(0, 7)),
        root=ranked.roots(),
    )
    def test_ties_are_each_ranks_own_matter(
        self, comm: Communicator, reduction: Reduction, ranks_with_ties: set[int], root: int
    ) -> None:
        """Leaves may be one object on some ranks, and two on others; each gets its own result.

        Results of leaves that are one object are one object if they are the same bits.
        """
        op, elements = reduction.op, reduction.arrays.elements()
        first = reduction.arrays.build(comm.rank)
        tied = comm.rank in ranks_with_ties
        second = first if tied else np.zeros_like(elements[comm.rank])
        others = [
            x if rank in ranks_with_ties else np.zeros_like(x) for rank, x in enumerate(elements)
        ]
        got = allreduce_tree([first, second], op, comm=comm)
        wants = [expected(elements, op), expected(others, op)]
        for result, want in zip(got, wants, strict=True):
            check_elements(native(elements_of(result)), want, op)
        bits = [elements_of(result).tobytes() for result in got]  # Two NaNs differ in their signs.
        assert (got[0] is got[1]) == (tied and bits[0] == bits[1])
        taken = synchronize([first, second], root=root, comm=comm)
        for result, want in zip(taken, (elements[root], others[root]), strict=True):
            check_copy(native(elements_of(result)), native(want))

    @law(drawn=reducible_trees(), bucket_bytes=st.integers(1, 1 << 17))
    def test_allreduce_tree_reduces_every_leaf(
        self, comm: Communicator, drawn: tuple[OpName, Any], bucket_bytes: int
    ) -> None:
        """Each leaf is the result of `allreduce`, however leaves are fused; None stays None."""
        op, tree = drawn
        wants = [None if x is None else comm.allreduce(x, op) for (x,) in leaves_of(tree)]
        for options in ({}, {"bucket_bytes": bucket_bytes}):
            got = allreduce_tree(tree, op, comm=comm, **options)
            for (leaf, like), want in zip(leaves_of(got, tree), wants, strict=True):
                check_leaf_of_fold(leaf, like, want, op)

    @law(drawn=reducible_trees())
    def test_a_plan_does_what_allreduce_tree_does(
        self, comm: Communicator, drawn: tuple[OpName, Any]
    ) -> None:
        """The results are the same bits in every call, whether or not earlier results are kept."""
        op, tree = drawn
        want, plan = allreduce_tree(tree, op, comm=comm), comm.plan(tree, op)
        kept = [plan(tree) for _ in range(3)]
        for got in (*kept, plan(tree)):
            for leaf, like, wanted in leaves_of(got, tree, want):
                check_leaf_of_fold(leaf, like, wanted, op)

    @law(drawn=metrics())
    def test_metrics_are_means_by_weight(
        self, comm: Communicator, drawn: tuple[Sealed[Any], Sealed[Any]]
    ) -> None:
        """The result is Σ w·x / Σ w without ranks of weight 0, whose values may be NaN.

        It is NaN if all weights are 0.
        """
        values, weights = drawn
        weight, local = weights.on(comm.rank), values.on(comm.rank)
        if not weight:
            local = (math.nan, local[1], local[2] * math.nan, local[3])
        got = mean_metrics(local, weight, comm=comm)
        assert [type(mean) for mean in got] == [float, float, *map(type, local[2:])]
        kept, given = elements_of(got[3]).dtype, native(elements_of(local[3])).dtype
        wide = np.float32 if type(got[3]).__module__.startswith("jax") else np.float64
        assert kept == (wide if given.kind in "ib" else given), f"got {kept} for {given}"
        for number, mean in enumerate(got):
            check_mean(
                elements_of(mean),
                [elements_of(values.on(rank)[number]) for rank in range(comm.size)],
                [weights.on(rank) for rank in range(comm.size)],
            )

    @law(
        counts=sealed(ranked.per_rank(st.integers(0, 3))),
        weights=sealed(ranked.per_rank(st.integers(0, 4))),
        present=sealed(ranked.per_rank(st.booleans())),
        length=st.sampled_from((1, 5000)),
        kind=st.sampled_from(("float64", "float64", "float32", "bfloat16", "complex64")),
        framework=st.sampled_from(training_frameworks),
        op=st.sampled_from(("mean", "mean", "sum")),
        compressed=st.booleans(),
    )
    def test_join_is_the_mean_over_the_batches_of_each_step(
        self,
        comm: Communicator,
        counts: Sealed[int],
        weights: Sealed[int],
        present: Sealed[bool],
        length: int,
        kind: str,
        framework: str,
        op: OpName,
        compressed: bool,
    ) -> None:
        """The mean is weighted, over the ranks that have a batch; afterwards all are in step.

        A gradient that some ranks lack counts as zeros there. Without any weight, means are zeros;
        in sums, ranks without weight do not count.
        """
        if framework == "jax" and kind == "float64":
            kind = "float32"
        # Sums of small integers are exact, in 16 bits as well.
        compression = "float16" if compressed and kind == "float64" else None
        wide = np.float64 if kind == "float64" else np.float32
        unit = 1 - 1j if kind == "complex64" else 1

        def made(value: Any, framework: str = "numpy") -> Any:
            case = ArrayCase(kind, (length,), framework=framework, elements=(value * unit,))
            return case.build()

        with join(comm) as joined:
            for step in range(counts.on(comm.rank)):
                joined.weight = weights.on(comm.rank)
                mine = made(8.0 * comm.rank + step, framework)
                some = mine if present.on(comm.rank) else None
                got = allreduce_gradients(
                    [mine, some, None], op, compression=compression, comm=comm
                )
                live = [rank for rank in range(comm.size) if step < counts.on(rank)]
                have = [rank for rank in live if present.on(rank)]
                factor = {r: weights.on(r) if op == "mean" else weights.on(r) > 0 for r in live}
                divisor = sum(factor.values()) or 1 if op == "mean" else 1
                for leaf, ranks in zip(got, (live, have, []), strict=True):
                    assert (leaf is None) == (not ranks), f"got {leaf!r}"
                    if leaf is not None:
                        total = sum(factor[rank] * (8.0 * rank + step) for rank in ranks)
                        found, want = check_like(leaf, mine), made(wide(total) / wide(divisor))
                        assert found.dtype == want.dtype
                        assert np.array_equal(found, want), f"got {found[0]}, not {want[0]}"
        last = max(counts.on(rank) for rank in range(comm.size))
        assert joined.synchronize(counts.on(comm.rank)) == last

    @law(drawn=gradients(), bucket_bytes=st.integers(1, 1 << 17).map(np.int64))
    def test_missing_gradients_count_as_zeros(
        self,
        comm: Communicator,
        drawn: tuple[OpName, Sequence[Arrays], Sealed[Any]],
        bucket_bytes: int,
    ) -> None:
        """None on some ranks counts as zeros, or is an error; None on all ranks stays None."""
        op, leaves, present = drawn
        has = present.value
        local = [
            leaf.build(comm.rank) if own else None
            for leaf, own in zip(leaves, has[comm.rank], strict=True)
        ]
        if any(len(set(column)) > 1 for column in zip(*has, strict=True)):
            part = comm.dup()
            with raises(MismatchError):
                allreduce_gradients(local, op, missing="error", comm=part)
        got = allreduce_gradients(local, op, bucket_bytes=bucket_bytes, comm=comm)
        for number, leaf in enumerate(leaves):
            if not any(others[number] for others in has):
                assert got[number] is None
                continue
            parts = [
                elements if has[rank][number] else np.zeros_like(elements)
                for rank, elements in enumerate(leaf.elements())
            ]
            like = next((x for x in (local[number], *local) if x is not None), np.empty(0))
            check_elements(check_like(got[number], like), expected(parts, op), op)


def _check_ties(got: Any, before: Any) -> None:
    """Fail unless the same leaves of both trees are one array."""
    pairs = [pair for pair in leaves_of(got, before) if is_array(pair[1])]
    for number, (leaf, like) in enumerate(pairs):
        for other, other_like in pairs[:number]:
            if like is other_like:
                assert leaf is other, "an array that was found twice became two"
            else:
                shared = np.shares_memory(elements_of(leaf), elements_of(other))
                assert not shared, "two arrays share memory"
