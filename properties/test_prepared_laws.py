"""Laws of small trees and of objects that are sent again and again, by calls that are prepared."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from arraycomm import PeerError, allreduce_gradients, allreduce_tree
from arraycomm.testing import ArrayCase
from arraycomm.testing import given as given_on_ranks
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing._arrays.oracle import expected
from arraycomm.testing.conformance._checks import check_leaf_of_fold, leaves_of
from arraycomm.testing.conformance._inputs import sealed

WAYS = ("tree", "gradients", "plan")
Pair = namedtuple("Pair", "first rest")  # noqa: PYI024
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "dict": lambda leaves: {str(number): leaf for number, leaf in enumerate(leaves)},
    "ordered": lambda leaves: OrderedDict((-number, leaf) for number, leaf in enumerate(leaves)),
    "nested": lambda leaves: Pair(leaves[:1], ({"rest": leaves[1:]},)),
}


@st.composite
def histories(draw: st.DrawFn) -> tuple[str, list[Any], list[tuple[int, bool]]]:
    """Draw an op, some structures, and which of them is reduced in each turn; -1 is none.

    A structure is a container, arrays in it, whether it has the first one twice, and what reduces
    it. In some turns the last one of gradients is missing on rank 0.
    """
    op = draw(ranked.ops())
    arrays = ranked.arrays(ranked.dtypes(op), ranked.shapes(large=False))
    several, kinds = st.lists(arrays, min_size=1, max_size=4), st.sampled_from(sorted(CONTAINERS))
    structures = st.tuples(kinds, several, st.booleans(), st.sampled_from(WAYS))
    drawn = draw(st.lists(structures, min_size=1, max_size=2))
    turns = st.tuples(st.integers(-1, len(drawn) - 1), st.booleans())
    return op, drawn, [*[(0, False)] * 3, *draw(st.lists(turns, max_size=5)), (0, True)]


def summands(case: ArrayCase, turn: int, size: int) -> list[ArrayCase]:
    """Return other elements for each rank, in an array of the same kind."""
    return [replace(case, elements=(), seed=1 + 10 * turn + rank) for rank in range(size)]


@given_on_ranks(history=sealed(histories()))
def test_trees_that_repeat_give_what_they_give_once(comm, history) -> None:
    """Trees of some structures come in any order, with other data, and errors in between.

    A rank may lack a gradient that it had in the call before.
    """
    op, drawn, turns = history.value
    plans: dict[int, Any] = {}
    for turn, (number, lacking) in enumerate(turns):
        if number < 0:
            refuse_on_one_rank(comm, turn % comm.size)
            continue
        kind, cases, tied, way = drawn[number]
        everyones = [summands(case, turn, comm.size) for case in cases]
        leaves = [ranks[comm.rank].build() for ranks in everyones]
        elements = [[case.numpy() for case in ranks] for ranks in everyones]
        if tied:
            leaves.append(leaves[0])
            elements.append(elements[0])
        likes, make = list(leaves), CONTAINERS[kind]
        plain = all(type(leaf) is np.ndarray for leaf in leaves)
        if way == "gradients" and lacking and plain and comm.size > 1:
            elements[-1] = [np.zeros_like(elements[-1][0]), *elements[-1][1:]]
            leaves[-1] = leaves[-1] if comm.rank else None
        if way == "plan":
            if number not in plans:
                plans[number] = comm.plan(make(leaves), op)
            got = plans[number](make(leaves))
        else:
            reduce = allreduce_gradients if way == "gradients" else allreduce_tree
            got = reduce(make(leaves), op, comm=comm)
        wants = make([expected(rows, op) for rows in elements])
        for leaf, like, want in leaves_of(got, make(likes), wants):
            check_leaf_of_fold(leaf, like, want, op)
            assert not np.shares_memory(elements_of(leaf), elements_of(like))


def refuse_on_one_rank(comm: Any, rank: int) -> None:
    """Pass something that is no tree of arrays on one rank."""
    wrong = comm.rank == rank
    with pytest.raises(TypeError if wrong else PeerError):
        allreduce_tree(["text" if wrong else np.ones(1)], "max", comm=comm)


# Up to some bytes, pickles travel with the header.
small = st.sampled_from((None, True, "text", (), {"a": [1.5]}))
objects = small | st.integers(0, 3_000_000).map(bytes)


@given_on_ranks(
    turns=st.lists(sealed(ranked.per_rank(objects)), min_size=1, max_size=6), root=ranked.roots()
)
def test_objects_that_repeat_arrive_equal(comm, turns, root) -> None:
    """Each call has objects of other lengths, some of which travel with the header."""
    for turn in turns:
        everyones = list(turn.value)
        local = everyones[comm.rank]
        for _ in range(2):
            assert comm.bcast_object(local, root) == everyones[root]
            assert comm.allgather_object(local) == everyones
            at_root = comm.gather_object(local, root)
            assert at_root == (everyones if comm.rank == root else None)
