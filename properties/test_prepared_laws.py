"""Laws of small trees and of objects that are sent again and again, by calls that are prepared."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from arraycomm import PeerError, Request, allreduce_gradients, allreduce_tree
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
            got = comm.bcast_object(local, root)
            assert got == everyones[root]
            assert got is not local or type(local) is not dict
            assert comm.allgather_object(local) == everyones
            at_root = comm.gather_object(local, root)
            assert at_root == (everyones if comm.rank == root else None)


# What a rank may pass in place of a tensor in plain memory; torch, and such a tensor.
TENSORS: dict[str, Callable[[Any, Any], Any]] = {
    "plain": lambda _, x: x,
    "a window": lambda torch, x: torch.cat([x, x])[len(x) :],
    "sliced": lambda torch, x: torch.stack([x, x], -1)[..., 1],
    "expanded": lambda _, x: x[:1].expand(x.shape),
    "a parameter": lambda torch, x: torch.nn.Parameter(x, requires_grad=False),
    "with history": lambda _, x: x.requires_grad_(x.is_floating_point()),
    "negated": lambda torch, x: torch._neg_view(x),
    "conjugated": lambda _, x: x.conj(),
    "freed": lambda _, x: (x.untyped_storage().resize_(0), x)[1],
    "cut off": lambda _, x: (x.untyped_storage().resize_(x.nbytes - x.itemsize), x)[1],
    "sparse": lambda _, x: x.to_sparse(),
    "without elements": lambda _, x: x.to("meta"),
    "of another class": lambda torch, x: x.as_subclass(type("Tensor", (torch.Tensor,), {})),
}
# Calls of small tensors with a row for each rank, and what shape their results have.
SHAPES: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
    **dict.fromkeys(("allreduce", "reduce", "bcast", "alltoall", "scan", "exscan"), tuple),
    **dict.fromkeys(("allgather", "gather"), lambda shape: (shape[0], *shape)),
    **dict.fromkeys(("scatter", "reduce_scatter"), lambda shape: shape[1:]),
}


def tensor(kind: str, dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Return a tensor of a kind of `TENSORS`; a plain one if this dtype has none of that kind."""
    torch = pytest.importorskip("torch")
    elements = np.random.default_rng(seed).integers(0, 5, shape)
    x = torch.from_numpy(elements).to(getattr(torch, dtype))
    with suppress(RuntimeError, IndexError, TypeError):
        return TENSORS[kind](torch, x)
    return x


def outcome(call: Callable[[], Any], out: Any, kept: list[tuple[Any, list[Any]]]) -> Any:
    """Return what is seen of a call's result, or its error; keep a new result with its elements."""
    try:
        got = call()
        got = got.wait() if isinstance(got, Request) else got
    except Exception as error:
        # The text of another rank's error has the lines of its calls.
        return type(error), "" if isinstance(error, PeerError) else str(error)
    if got is None or isinstance(got, np.ndarray):
        return got is None or (got.dtype, got.tolist())
    if out is None:
        kept.append((got, got.detach().tolist()))
    name = type(got).__name__
    facts = name, got.dtype, got.stride(), got.requires_grad, got.untyped_storage().resizable()
    return *facts, got is out, got.detach().tolist()


kinds = st.sampled_from(["plain", *TENSORS])
# What a rank passes: x, out, and whether autograd records.
passed = st.tuples(kinds, st.none() | kinds | st.just("x"), st.booleans())
forms = st.tuples(
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(["float64", "int32", "bfloat16", "complex64", "bool"]),
    st.sampled_from([(), (3,), (2, 2), (0,)]),
)
turns = st.lists(sealed(ranked.per_rank(passed)), min_size=1, max_size=6)


@given_on_ranks(form=forms, turns=turns)
def test_tensors_that_repeat_are_read_as_they_are_once(comm, form, turns) -> None:
    """A call, and its request, gives or raises what one does that is never prepared."""
    torch = pytest.importorskip("torch")
    name, dtype, rest = form
    usual, shape = ("plain", None, True), (comm.size, *rest)
    like, kept = SHAPES[name](shape), list[tuple[Any, list[Any]]]()
    for turn, everyones in enumerate([None] * 3 + turns):
        kind, into, grad = usual if everyones is None else everyones.value[comm.rank]
        if into == "x" and like != shape:
            into = None
        found = []
        for method, options in ((name, {"timeout": 60.0}), (name, {}), (f"i{name}", {})):
            x = tensor(kind, dtype, shape, 1 + comm.size * turn + comm.rank)
            out = x if into == "x" else into and tensor(into, dtype, like, 0)
            with torch.set_grad_enabled(grad):
                call = partial(getattr(comm, method), x, out=out, **options)
                found.append(outcome(call, out, kept))
        assert found[0] == found[1] == found[2]
    assert all(got.detach().tolist() == elements for got, elements in kept)
