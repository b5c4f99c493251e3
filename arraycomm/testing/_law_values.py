"""What laws are checked on, and how their results are read.

A law compares what a rank got with what follows from the inputs of all ranks. So every rank is
told the descriptions of all inputs: to ask the other ranks would trust what is being tested.
"""

from __future__ import annotations

import enum
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final, Generic, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from arraycomm._arrays.frameworks import torch_carriers
from arraycomm._dtypes import OPS as ALL_OPS
from arraycomm.testing import strategies as ranked
from arraycomm.testing._oracle import OPS, Array, expected, family, same_result
from arraycomm.testing._values import (
    LAYOUTS,
    ArrayCase,
    DLPackOnly,
    Layer,
    RankValues,
    Shape,
    dtype_of,
    dump,
    load,
    rank_count,
)

T = TypeVar("T")
Strategy = st.SearchStrategy

# What every rank knows of all ranks -------------------------------------------------------------


class Sealed(Generic[T]):
    """A drawn value that reaches every rank as it was drawn, with what is meant for the others.

    Attributes
    ----------
    value : object
        The value; what `per_rank` drew stays `RankValues`, descriptions of arrays stay `ArrayCase`.
    """

    def __init__(self, value: T) -> None:
        self.value = value

    def on(self, rank: int) -> Any:
        """Return the value as it arrives on a rank, made anew by each call."""
        return load(dump(self.value), rank)

    def __reduce__(self) -> Any:
        # As bytes, of which nothing is taken apart and built on the way.
        return _unseal, (type(self), pickle.dumps(self.value, pickle.HIGHEST_PROTOCOL))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


def _unseal(kind: type[Sealed[Any]], data: bytes) -> Sealed[Any]:
    return kind(pickle.loads(data))


class Arrays(Sealed[RankValues[ArrayCase]]):
    """One array for each rank, of which every rank knows all."""

    def elements(self) -> list[Array]:
        """Return the elements of all ranks' arrays."""
        return [case.numpy() for case in self.value]

    def build(self, rank: int) -> Any:
        """Return a new array, as a rank has it."""
        return self.value[rank].build()


class Reduction(NamedTuple):
    """A reduction, and one array for each rank that it can be applied to."""

    op: str
    arrays: Arrays

    def fold(self) -> Array:
        """Return what all ranks together must get."""
        return expected(self.arrays.elements(), self.op)


def sealed(strategy: Strategy[T]) -> Strategy[Sealed[T]]:
    """Draw what every rank is to get whole."""
    return strategy.map(Sealed)


def arrays(*args: Any, **kwargs: Any) -> Strategy[Arrays]:
    """Draw one array for each rank, as `rank_arrays` does."""
    return ranked.rank_arrays(*args, **kwargs).map(Arrays)


@st.composite
def dtypes_and_ops(
    draw: st.DrawFn,
    ops: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
) -> tuple[str, str]:
    """Draw a reduction and a dtype that has it, each reduction as often as the others.

    `ranked.reductions` would draw integers most of the time, since there are so many of them.
    """
    kinds = tuple(OPS) if families is None else families
    among = [op for op in ALL_OPS if any(op in OPS[kind] for kind in kinds)]
    op = draw(st.sampled_from([op for op in among if ops is None or op in ops]))
    return draw(ranked.dtypes(op).filter(lambda name: family(dtype_of(name)) in kinds)), op


@st.composite
def reductions(
    draw: st.DrawFn,
    /,
    ops: Sequence[str] | None = None,
    families: Sequence[str] | None = None,
    **choices: Any,
) -> Reduction:
    """Draw a reduction with its arrays.

    Parameters
    ----------
    ops, families : sequence of str, optional
        Which reductions, and of which kinds of dtypes; all by default.
    **choices
        What else `rank_arrays` takes.
    """
    dtype, op = draw(dtypes_and_ops(ops, families))
    return Reduction(op, draw(arrays(dtype, **choices)))


def small_and_long() -> Strategy[Shape]:
    """Draw shapes of few elements, and some of one dimension that do not fit in a header."""
    return ranked.shapes(large=False) | st.integers(1, 9_000).map(lambda count: (count,))


@st.composite
def reductions_of_sizes(draw: st.DrawFn) -> Reduction:
    """Draw reductions of sizes around powers of two, where one way gives place to another."""
    dtype, op = draw(dtypes_and_ops())
    itemsize = dtype_of(dtype).itemsize
    # Of bytes, as for messages, or of elements, as for folds; sampled, since integers would be
    # small most of the time.
    counts = [2**power // itemsize for power in range(6, 20)] + [2**power for power in range(4, 17)]
    count = draw(st.sampled_from(counts)) + draw(st.integers(-1, 1))
    return Reduction(op, draw(arrays(dtype, (count,))))


@st.composite
def reductions_of_rows(draw: st.DrawFn) -> Reduction:
    """Draw reductions of arrays that have a row for each rank."""
    dtype, op = draw(dtypes_and_ops())
    return Reduction(op, draw(arrays(dtype, (rank_count(), *draw(small_and_long())))))


@st.composite
def rows(draw: st.DrawFn) -> Arrays:
    """Draw arrays that have a row for each rank, of any dtype."""
    shape = (rank_count(), *draw(small_and_long()))
    return draw(arrays(ranked.dtypes(movable=True), shape))


class Ragged(NamedTuple):
    """Arrays of which each rank's has other rows, and to which ranks these go."""

    arrays: Arrays
    # Of each rank, how many of its rows are for which rank.
    counts: list[list[int]]

    def rows(self, sender: int, receiver: int) -> Array:
        """Return the rows that one rank has for another."""
        start = sum(self.counts[sender][:receiver])
        return self.arrays.elements()[sender][start : start + self.counts[sender][receiver]]


@st.composite
def ragged(draw: st.DrawFn) -> Ragged:
    """Draw for each rank an array with rows for every rank: none, some, or many."""
    dtype = draw(ranked.dtypes(movable=True))
    tail = draw(st.lists(st.integers(0, 3), max_size=2))
    count = st.integers(0, 3) | st.just(draw(st.sampled_from((1, 2_000))))
    counts = [[draw(count) for _ in range(rank_count())] for _ in range(rank_count())]
    cases = [draw(ranked.arrays(dtype, (sum(own), *tail))) for own in counts]
    return Ragged(Arrays(RankValues(*cases)), counts)


@st.composite
def messages(draw: st.DrawFn) -> Arrays:
    """Draw for each rank an array of its own dtype and shape."""
    one = ranked.arrays(ranked.dtypes(movable=True), small_and_long())
    return Arrays(draw(ranked.per_rank(one)))


# All but the one in which elements have to be equal.
_ANY_ELEMENTS: Final = tuple(name for name in LAYOUTS if name != "broadcast")


@st.composite
def arranged_twice(draw: st.DrawFn) -> tuple[Reduction, Arrays]:
    """Draw a reduction of plain arrays, and the same elements in other layouts and frameworks."""
    dtype, op = draw(dtypes_and_ops())
    shape = draw(ranked.shapes())
    plain = draw(arrays(dtype, shape, layouts="contiguous", frameworks="numpy"))
    other = draw(arrays(dtype, shape, layouts=_ANY_ELEMENTS))
    arranged = [
        replace(case, elements=same.elements, seed=same.seed)
        for case, same in zip(other.value, plain.value, strict=True)
    ]
    return Reduction(op, plain), Arrays(RankValues(*arranged))


@st.composite
def reductions_into(draw: st.DrawFn) -> tuple[Reduction, RankValues[ArrayCase]]:
    """Draw a reduction, and an array on each rank that its result can be written to."""
    reduction = draw(reductions())
    like = reduction.arrays.value[0]
    return reduction, draw(outs(like.dtype, like.shape))


@st.composite
def moved_into(draw: st.DrawFn) -> tuple[Arrays, RankValues[ArrayCase], RankValues[ArrayCase]]:
    """Draw arrays to move, and on each rank what can hold one of them, and all of them."""
    drawn = draw(arrays(ranked.dtypes(movable=True), small_and_long()))
    like = drawn.value[0]
    one, all_ = outs(like.dtype, like.shape), outs(like.dtype, (rank_count(), *like.shape))
    return drawn, draw(one), draw(all_)


# Those that have every dtype, and arithmetic that works as NumPy's.
complete_frameworks: Final = tuple(
    name for name in ("numpy", "torch") if name in ranked.installed_frameworks()
)

# Those whose arrays can be written, by `out=` as well.
_WRITEABLE: Final = ("numpy", "torch", "array_api_strict", "cupy")


def outs(dtype: str, shape: Shape) -> Strategy[RankValues[ArrayCase]]:
    """Draw an array for each rank, in any layout in which every element can be written."""
    there = [name for name in _WRITEABLE if name in ranked.installed_frameworks()]
    return ranked.rank_arrays(dtype, shape, layouts=_ANY_ELEMENTS, frameworks=there, readonly=False)


@st.composite
def equal_arrays(draw: st.DrawFn) -> ArrayCase:
    """Draw an array of numbers of few digits: sums of some of them are exact in every dtype."""
    dtype = draw(ranked.dtypes("mean"))
    digits = st.tuples(st.integers(-8, 8), st.integers(-6, 5))
    number: Strategy[Any] = st.one_of(
        digits.map(lambda drawn: drawn[0] * 2.0 ** drawn[1]), st.sampled_from((-0.0, np.nan))
    )
    if dtype_of(dtype).kind == "c":
        number = st.builds(complex, number, number)
    return draw(ranked.arrays(dtype, elements=number))


def orders_of_ranks() -> Strategy[list[int]]:
    """Draw an order of the ranks, the same on every rank."""
    return _order_of_ranks()


@st.composite
def _order_of_ranks(draw: st.DrawFn) -> list[int]:
    return draw(st.permutations(range(rank_count())))


# Trees ------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    """An enumeration as drawn trees have it."""

    RED = 1
    BLUE = "blue"


def _repeated(leaves: Strategy[Any]) -> Strategy[Any]:
    """Draw trees in which the same object may be found several times."""
    pools = st.lists(leaves, min_size=1, max_size=4)
    return pools.flatmap(lambda pool: ranked.trees(st.sampled_from(pool)))


def state_trees(frameworks: Any = None) -> Strategy[Sealed[Any]]:
    """Draw trees of all that `synchronize` takes, with values that are each rank's own."""
    values = (
        st.booleans(),
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.integers(-(2**31), 2**31 - 1).map(np.int32),
        st.floats(width=32).map(np.float32),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.sampled_from(Colour),
    )
    leaves = st.one_of(
        st.none(),
        st.sampled_from(values).flatmap(ranked.per_rank),
        ranked.rank_arrays(ranked.dtypes(movable=True), small_and_long(), frameworks=frameworks),
    )
    return sealed(_repeated(leaves))


def kept_trees() -> Strategy[Any]:
    """Draw trees of what `synchronize` leaves alone."""
    return ranked.trees(
        st.one_of(
            st.none(),
            st.sampled_from((len, sorted)),
            ranked.per_rank(st.builds(random.Random, st.integers(0, 9))),
        )
    )


@st.composite
def reducible_trees(draw: st.DrawFn) -> tuple[str, Any]:
    """Draw a reduction, and a tree of leaves that have it, with values that are each rank's own."""
    op = draw(ranked.ops())
    numbers = [numbers for kind, numbers in _NUMBERS if op in OPS[kind]]
    leaves = st.one_of(
        st.none(),
        st.sampled_from(numbers).flatmap(ranked.per_rank),
        ranked.rank_arrays(ranked.dtypes(op), small_and_long()),
    )
    return op, draw(_repeated(leaves))


def metrics() -> Strategy[tuple[Sealed[Any], Sealed[Any]]]:
    """Draw a list of numbers and arrays, and a weight, with values that are each rank's own."""
    number = st.floats(-(2.0**20), 2.0**20, width=32)
    return st.integers(0, 3).flatmap(
        lambda count: st.tuples(
            sealed(
                ranked.per_rank(
                    st.tuples(
                        number,
                        st.integers(-100, 100),
                        st.lists(number, min_size=count, max_size=count).map(np.array),
                    )
                )
            ),
            sealed(ranked.per_rank(st.one_of(st.integers(0, 9), st.floats(0, 2.0**10, width=32)))),
        )
    )


def check_mean(got: Any, values: Sequence[Any], weights: Sequence[float]) -> None:
    """Compare a weighted mean with that of exact fractions."""
    total = sum(map(Fraction, weights))
    for place, mean in np.ndenumerate(np.asarray(got)):
        if not total:
            assert np.isnan(mean), f"got {mean!r} where no rank counts"
            continue
        terms = [
            Fraction(float(np.asarray(value)[place])) * Fraction(weight)
            for value, weight in zip(values, weights, strict=True)
        ]
        # A rounding for each product, sum and quotient.
        slack = (len(terms) + 2) * np.finfo(np.float64).eps * float(sum(map(abs, terms)) / total)
        error = abs(Fraction(float(mean)) - sum(terms) / total)
        assert error <= slack + 5e-324, f"got {mean!r} in place of {float(sum(terms) / total)!r}"


@st.composite
def reductions_of_numbers(draw: st.DrawFn) -> tuple[str, Sealed[RankValues[Any]]]:
    """Draw a reduction, and a number for each rank that has it."""
    kind, numbers = draw(st.sampled_from(_NUMBERS))
    return draw(st.sampled_from(OPS[kind])), draw(sealed(ranked.per_rank(numbers)))


_NUMBERS: Final[tuple[tuple[str, Strategy[Any]], ...]] = (
    ("integer", st.integers(-(2**63), 2**63 - 1)),
    ("integer", st.integers(-(2**31), 2**31 - 1).map(np.int32)),
    ("bool", st.booleans()),
    ("real", st.floats()),
    ("real", st.floats(width=32).map(np.float32)),
    ("complex", st.complex_numbers()),
)


def leaves_of(*trees: Any) -> Iterator[tuple[Any, ...]]:
    """Walk through trees of one structure together, leaf by leaf; fail where they differ."""
    first = trees[0]
    if isinstance(first, Layer):
        _check_same(type, trees)
        children = [(tree.weight, tree.bias) for tree in trees]
    elif isinstance(first, dict):
        _check_same(type, trees)
        _check_same(list if type(first) is not dict else set, trees)
        children = [tuple(tree[key] for key in first) for tree in trees]
    elif isinstance(first, (list, tuple)):
        _check_same(type, trees)
        _check_same(len, trees)
        children = [tuple(tree) for tree in trees]
    else:
        yield trees
        return
    for together in zip(*children, strict=True):
        yield from leaves_of(*together)


def _check_same(what: Callable[[Any], Any], trees: Sequence[Any]) -> None:
    found = [what(tree) for tree in trees]
    assert all(one == found[0] for one in found), f"trees differ: {found}"


@st.composite
def gradients(draw: st.DrawFn) -> tuple[str, list[Arrays], Sealed[RankValues[list[bool]]]]:
    """Draw a reduction, arrays for each rank, and which of them each rank has."""
    dtype, op = draw(dtypes_and_ops())
    # A rank that has None gets an array of the kind of another leaf.
    leaf = arrays(dtype, small_and_long(), frameworks=complete_frameworks)
    leaves = draw(st.lists(leaf, min_size=1, max_size=3))
    flags = st.lists(st.booleans(), min_size=len(leaves), max_size=len(leaves))
    return op, leaves, draw(sealed(ranked.per_rank(flags)))


# Objects ----------------------------------------------------------------------------------------


def objects() -> Strategy[Any]:
    """Draw Python objects that pickle, small and large, and are equal to their copies."""
    small = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
    )
    large = st.integers(0, 200_000).map(lambda n: random.Random(n).randbytes(n))
    nested = st.recursive(
        small,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        max_leaves=6,
    )
    return st.one_of(nested, large)


# Reading results --------------------------------------------------------------------------------


def elements_of(array: Any) -> Array:
    """Return an array's elements as NumPy's, by the means of its own framework.

    Host memory is shared, so that what is written to the one is seen in the other.
    """
    module = type(array).__module__.partition(".")[0]
    found: Array = _READERS.get(module, np.asarray)(array)
    return found


def _read_torch(tensor: Any) -> Array:
    carrier, narrow = torch_carriers().get(tensor.dtype, (None, None))
    found: Array = (tensor if carrier is None else tensor.view(carrier)).numpy()
    if narrow is not None:
        found = found.view(narrow)
    return found


def _read_mlx(array: Any) -> Array:
    import mlx.core as mx

    if array.dtype == mx.bfloat16:
        array, dtype = array.view(mx.uint16), np.dtype(ml_dtypes.bfloat16)
        return np.asarray(np.array(array).view(dtype))
    return np.array(array)


_READERS: Final[dict[str, Callable[[Any], Array]]] = {
    "torch": _read_torch,
    "mlx": _read_mlx,
    "cupy": lambda array: array.get(),
    "array_api_strict": np.from_dlpack,
    "arraycomm": np.from_dlpack,
}


def check_like(got: Any, like: Any) -> Array:
    """Fail unless a result is a C-contiguous array of the caller's kind; return its elements."""
    # What has no namespace gets NumPy's arrays.
    kind = np.ndarray if isinstance(like, (memoryview, DLPackOnly)) else type(like)
    assert type(got) is kind, f"got {type(got).__name__}, not {kind.__name__}"
    found = elements_of(got)
    assert found.flags.c_contiguous, f"the result has strides {found.strides}"
    return found


def check_elements(found: Array, want: Array, op: str = "") -> None:
    """Fail unless elements are the same, bit for bit as far as the reduction settles them."""
    assert (found.dtype, found.shape) == (want.dtype, want.shape), (
        f"got {found.dtype} {found.shape}, not {want.dtype} {want.shape}"
    )
    assert same_result(found, want, op), f"got {found!r}, not {want!r}"


def check_copy(found: Array, want: Array) -> None:
    """Fail unless elements are the same in every bit, as after they were only moved."""
    assert (found.dtype, found.shape) == (want.dtype, want.shape), (
        f"got {found.dtype} {found.shape}, not {want.dtype} {want.shape}"
    )
    assert found.tobytes() == want.tobytes(), f"got {found!r}, not {want!r}"


def check_leaf(got: Any, like: Any, want: Any) -> None:
    """Fail unless a leaf has the value of `want`, and is otherwise like the one passed."""
    if isinstance(like, _PLAIN):
        assert type(got) is type(like), f"got {type(got).__name__}, not {type(like).__name__}"
        # Of numbers this tells the signs of zeros as well, and of NaN that it is one.
        assert repr(got) == repr(want), f"got {got!r}, not {want!r}"
    else:
        check_copy(check_like(got, like), native(elements_of(want)))


_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.generic)


def is_array(leaf: Any) -> bool:
    """Tell whether a leaf of a drawn tree is an array."""
    return not isinstance(leaf, _PLAIN)


def native(array: Array) -> Array:
    """Return the elements in the byte order of this machine, C-contiguous."""
    return array.astype(array.dtype.newbyteorder("="), order="C")


def scribble(array: Any, byte: int) -> bool:
    """Fill the memory of a result, and tell whether that is possible."""
    memory = elements_of(array)
    if not memory.flags.writeable:
        return False
    memory.reshape(-1).view(np.uint8)[...] = byte
    return True
