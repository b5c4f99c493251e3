"""What a collective is tried on: arrays of any dtype, shape, layout and framework, trees, ops.

The strategies are Hypothesis's own kind, and mix with all others. Those that draw one value for
each rank belong into the decorator of `arraycomm.testing.given`, which knows how many there are.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from arraycomm._dtypes import OPS, TABLE, DType, check_reducible
from arraycomm.testing import _values
from arraycomm.testing._values import (
    ArrayCase,
    Layer,
    Pair,
    RankValues,
    Shape,
    installed_frameworks,
    rank_count,
)

__all__ = [
    "ArrayCase",
    "Layer",
    "Pair",
    "RankValues",
    "arrays",
    "dtypes",
    "elements",
    "frameworks",
    "installed_frameworks",
    "layouts",
    "ops",
    "per_rank",
    "rank_arrays",
    "reductions",
    "roots",
    "shapes",
    "trees",
]

T = TypeVar("T")
Strategy: TypeAlias = st.SearchStrategy[T]

# Dtypes and reductions --------------------------------------------------------------------------

# The first is what examples shrink to.
_NAMES: Final = ("float32", *(row.name for row in TABLE if row.name != "float32"))


def dtypes(op: str | None = None, *, movable: bool = False) -> Strategy[str]:
    """Draw the names of dtypes.

    Parameters
    ----------
    op : str, optional
        Draw only dtypes that have this reduction.
    movable : bool
        Draw dtypes without arithmetic as well: dates, fixed-width strings, structures.

    Returns
    -------
    SearchStrategy of str
        "bool", "int8" … "uint64", "float16" … "float64", "bfloat16", "float8_e4m3fn",
        "float8_e5m2", "complex64", "complex128"; shrinks to "float32".

    Examples
    --------
    >>> from arraycomm.testing.strategies import dtypes
    >>> dtypes("mean")
    sampled_from(['float32', 'float16', 'float64', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'complex64', 'complex128'])
    """
    if op is not None:
        return st.sampled_from([name for name in _NAMES if _is_reduction(name, _known_op(op))])
    return st.sampled_from((*_NAMES, *_values.MOVABLE) if movable else _NAMES)


def ops(dtype: Any = None) -> Strategy[str]:
    """Draw the names of reductions: all of them, or those that a dtype has.

    Parameters
    ----------
    dtype : str or numpy.dtype, optional
        The dtype that must have the reduction.

    Returns
    -------
    SearchStrategy of str
        Shrinks to "sum", or to the first that the dtype has.
    """
    if dtype is None:
        return st.sampled_from(OPS)
    name = _values.dtype_name(dtype)
    found = [op for op in OPS if _is_reduction(name, op)]
    if not found:
        raise InvalidArgument(f"{name} has no reductions; it can only be moved")
    return st.sampled_from(found)


def reductions() -> Strategy[tuple[str, str]]:
    """Draw pairs of a dtype and a reduction that it has.

    Returns
    -------
    SearchStrategy of (str, str)
        The names of dtype and reduction; shrinks to `("float32", "sum")`.
    """
    return st.sampled_from([(name, op) for name in _NAMES for op in OPS if _is_reduction(name, op)])


def _is_reduction(name: str, op: str) -> bool:
    try:
        check_reducible(_values.dtype_of(name), op, "reduction")
    except TypeError:
        return False
    return True


def _known_op(op: str) -> str:
    if op not in OPS:
        raise InvalidArgument(f"op must be one of {', '.join(OPS)}; got {op!r}")
    return op


# Shapes and elements ----------------------------------------------------------------------------


def shapes(*, large: bool = True) -> Strategy[Shape]:
    """Draw shapes of arrays.

    Parameters
    ----------
    large : bool
        Draw some of up to 30,000 elements as well, which are too many for one small message.

    Returns
    -------
    SearchStrategy of tuple of int
        No dimensions, 1 to 4 of them, lengths of 1, and lengths of 0 anywhere; shrinks to `()`,
        and next to `(1,)`.
    """
    side = st.integers(1, 5)
    kinds: list[Strategy[Shape]] = [
        st.just(()),
        st.tuples(st.integers(1, 40)),
        *(st.tuples(*[side] * ndim) for ndim in (2, 3, 4)),
        st.tuples(st.integers(0, 3), st.lists(side, max_size=3)).map(_with_zero),
    ]
    if large:
        # Drawn as small ones are, number by number, and so down to where a failure begins.
        kinds += [
            st.tuples(st.integers(1, 20_000)),
            st.tuples(st.integers(1, 300), st.integers(1, 100)),
        ]
    return st.one_of(kinds)


def _with_zero(drawn: tuple[int, list[int]]) -> Shape:
    place, sides = drawn
    return (*sides[:place], 0, *sides[place:])


def elements(dtype: Any) -> Strategy[Any]:
    """Draw elements of a dtype, as Python values that it represents exactly.

    Parameters
    ----------
    dtype : str or numpy.dtype
        The dtype.

    Returns
    -------
    SearchStrategy
        Python's bool, int, float or complex, with the extremes, NaN, infinities, zeros of both
        signs and subnormals among them; for dates int (NaT is the least), for strings str or
        bytes, for structures tuples. Shrinks to 0.
    """
    return _elements(_values.dtype_of(_values.dtype_name(dtype)))


@lru_cache(maxsize=256)
def _elements(dtype: DType) -> Strategy[Any]:
    ordinary = _ELEMENTS[_values.family(dtype)](dtype)
    return st.one_of(ordinary, st.sampled_from(_values.specials(dtype)))


def _integers(dtype: DType) -> Strategy[Any]:
    limits = np.iinfo(dtype)
    return st.integers(int(limits.min), int(limits.max))


def _floats(dtype: DType) -> Strategy[Any]:
    limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    if dtype.itemsize >= 4:
        drawn = st.floats(width=64 if dtype.itemsize == 8 else 32)
    else:
        largest = float(limits.max)
        drawn = st.floats(-largest, largest, width=32)
    return drawn.map(lambda value: _values.round_to(value, dtype))


def _complex(dtype: DType) -> Strategy[Any]:
    part = _elements(_values.part_of(dtype))
    return st.builds(complex, part, part)


def _records(dtype: DType) -> Strategy[Any]:
    if dtype.names is None:
        return st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize)
    return st.tuples(*map(_elements, _values.field_dtypes(dtype)))


_DATES: Final = st.integers(-(2**63), 2**63 - 1)

_ELEMENTS: Final[dict[str, Callable[[DType], Strategy[Any]]]] = {
    "b": lambda _: st.booleans(),
    "i": _integers,
    "u": _integers,
    "f": _floats,
    "c": _complex,
    "m": lambda _: _DATES,
    "M": lambda _: _DATES,
    "S": lambda dtype: st.binary(max_size=dtype.itemsize),
    "U": lambda dtype: st.text(max_size=dtype.itemsize // 4),
    "V": _records,
}

# Layouts and frameworks -------------------------------------------------------------------------


def layouts(framework: str = "numpy", dtype: Any = "float32") -> Strategy[str]:
    """Draw the names of layouts in which a framework can have arrays of a dtype.

    Parameters
    ----------
    framework : str
        One of `installed_frameworks()`.
    dtype : str or numpy.dtype
        The dtype.

    Returns
    -------
    SearchStrategy of str
        The layouts of `ArrayCase`; shrinks to "contiguous".
    """
    _values.check_among(framework, _values.FRAMEWORKS, "framework")
    name = _values.dtype_name(dtype)
    found = _values.layouts_of(framework, _values.dtype_of(name))
    if not found:
        raise InvalidArgument(f"{framework} has no arrays of dtype {name}")
    return st.sampled_from(found)


def frameworks() -> Strategy[str]:
    """Draw the names of frameworks whose arrays can be built here.

    Returns
    -------
    SearchStrategy of str
        One of `installed_frameworks()`, among them "buffer" and "dlpack", which stand for objects
        of no framework; shrinks to "numpy".
    """
    return st.sampled_from(installed_frameworks())


# Arrays -----------------------------------------------------------------------------------------

_Given: TypeAlias = "Strategy[T] | tuple[T, ...]"


def arrays(
    dtypes: Any = None,
    shapes: Any = None,
    *,
    layouts: Any = None,
    frameworks: Any = None,
    elements: Any = None,
    readonly: bool | None = None,
) -> Strategy[ArrayCase]:
    """Draw descriptions of arrays: the same for every rank, each of which builds its own.

    Every argument may be a strategy, a value, or a sequence of values to choose from. What no
    framework has together (torch and negative strides) is never drawn.

    Parameters
    ----------
    dtypes : str, numpy.dtype, sequence or strategy, optional
        By default, every dtype that has arithmetic.
    shapes : int, tuple of int, sequence or strategy, optional
        A tuple of integers is one shape; a list is shapes to choose from. By default `shapes()`.
    layouts, frameworks : str, sequence or strategy, optional
        By default all that there are for the dtype.
    elements : number, sequence or strategy, optional
        Python values that the dtype must take. By default `elements(dtype)`, and in arrays of more
        than 8 elements random ones, of a seed that is drawn.
    readonly : bool, optional
        By default both, where the framework has such a flag.

    Returns
    -------
    SearchStrategy of ArrayCase
        `ArrayCase.build()` makes the array; `given` does it on every rank. Shrinks to
        `ArrayCase('float32', (), elements=(0.0,))`.

    Examples
    --------
    >>> from arraycomm.testing.strategies import arrays
    >>> arrays("float64", (3, 4), layouts="negative", elements=[0, 1])  # doctest: +SKIP
    """
    return _arrays(_choices(dtypes, shapes, layouts, frameworks, elements, readonly))


def rank_arrays(
    dtypes: Any = None,
    shapes: Any = None,
    *,
    layouts: Any = None,
    frameworks: Any = None,
    elements: Any = None,
    readonly: bool | None = None,
) -> Strategy[RankValues[ArrayCase]]:
    """Draw one array for each rank: one dtype and one shape, all else is each rank's own.

    So frameworks, layouts and elements differ between ranks, as a collective allows it.

    Parameters
    ----------
    dtypes, shapes, layouts, frameworks, elements, readonly
        As for `arrays`.

    Returns
    -------
    SearchStrategy of RankValues of ArrayCase
        In a test of `given`, each rank gets its own array.
    """
    return _rank_arrays(_choices(dtypes, shapes, layouts, frameworks, elements, readonly))


@dataclass(frozen=True)
class _Choices:
    """What `arrays` may draw: of each property the values to choose from, or a strategy."""

    dtypes: _Given[str]
    shapes: Strategy[Shape]
    layouts: _Given[str]
    frameworks: _Given[str]
    elements: Strategy[Any] | None
    readonly: bool | None
    # Nothing of it came from a strategy.
    certain: bool = True

    def settled(self, draw: st.DrawFn) -> _Choices:
        """Draw first what only a strategy knows, so that all else can fit it."""
        settled = self
        if not isinstance(self.frameworks, tuple):
            settled = replace(settled, frameworks=(draw(self.frameworks),), certain=False)
        if not isinstance(self.layouts, tuple):
            settled = replace(settled, layouts=(draw(self.layouts),), certain=False)
        return settled

    def has(self, dtype: str) -> bool:
        return bool(self._fitting(dtype, ()))

    def case(self, draw: st.DrawFn, dtype: str, shape: Shape) -> ArrayCase:
        assert isinstance(self.layouts, tuple)
        fitting = self._fitting(dtype, shape)
        framework = _one_of(draw, list(fitting))
        # Among all layouts, whose places do not change while an example is made simpler.
        layout = _one_of(draw, self.layouts)
        layout = layout if layout in fitting[framework] else fitting[framework][0]
        readonly = draw(st.booleans()) if self.readonly is None else self.readonly
        readonly = readonly and _values.FRAMEWORKS[framework].readonly
        free = shape[1:] if layout == "broadcast" else shape
        first, seed = self._content(draw, dtype, math.prod(free))
        return ArrayCase(dtype, shape, layout, framework, readonly, first, seed)

    def _fitting(self, dtype: str, shape: Shape) -> dict[str, list[str]]:
        """Return the layouts to choose from, by framework, for those that have any."""
        assert isinstance(self.frameworks, tuple)
        found = {name: self._layouts(name, dtype, shape) for name in self.frameworks}
        return {name: layouts for name, layouts in found.items() if layouts}

    def _layouts(self, framework: str, dtype: str, shape: Shape) -> list[str]:
        """Return what a framework has of the layouts, without those that this shape makes alike."""
        assert isinstance(self.layouts, tuple)
        if self.readonly and not _values.FRAMEWORKS[framework].readonly:
            return []
        there = _values.layouts_of(framework, _values.dtype_of(dtype))
        found = [name for name in self.layouts if name in there]
        return [name for name in found if _values.LAYOUTS[name].least_ndim <= len(shape)] or found

    def _content(self, draw: st.DrawFn, dtype: str, count: int) -> tuple[tuple[Any, ...], int]:
        """Draw the first elements, and a seed for more than are drawn one by one."""
        one = elements(dtype) if self.elements is None else self.elements
        # Of empty and of broadcast arrays as many, which would be simpler than others with fewer.
        first = draw(st.lists(one, min_size=1, max_size=min(max(count, 1), _DRAWN)))
        seed = draw(st.integers(0, 2**32 - 1)) if self.elements is None else 0
        return tuple(first[:count]), seed if count > _DRAWN else 0


_DRAWN: Final = 8  # elements that are drawn one by one, and shrink so


def _one_of(draw: st.DrawFn, values: Sequence[T]) -> T:
    """Draw by one choice, also where `sampled_from` makes none because there is a single value.

    Hypothesis takes the example of the fewest choices for the simplest.
    """
    return values[draw(st.integers(0, len(values) - 1))]


def _draw_dtype(draw: st.DrawFn, settled: Sequence[_Choices]) -> str:
    """Draw a dtype that every rank can have."""
    given = settled[0].dtypes

    def fits(dtype: str) -> bool:
        return all(choices.has(dtype) for choices in settled)

    if not isinstance(given, tuple):
        return draw(given.filter(fits))
    fitting = [dtype for dtype in given if fits(dtype)]
    if not fitting and all(choices.certain for choices in settled):
        raise InvalidArgument(
            f"no framework to choose from has such arrays, in any of the dtypes {', '.join(given)}"
        )
    return draw(st.sampled_from(fitting)) if fitting else reject()


def _choices(
    dtypes: Any, shapes: Any, layouts: Any, frameworks: Any, elements: Any, readonly: bool | None
) -> _Choices:
    return _Choices(
        _NAMES if dtypes is None else _given(dtypes, _values.dtype_name),
        _given_shapes(shapes),
        tuple(_values.LAYOUTS) if layouts is None else _given(layouts, _known_layout),
        installed_frameworks() if frameworks is None else _given(frameworks, _known_framework),
        None if elements is None else _as_strategy(_given(elements, lambda element: element)),
        readonly,
    )


def _given(argument: Any, read: Callable[[Any], T]) -> Strategy[T] | tuple[T, ...]:
    if isinstance(argument, st.SearchStrategy):
        return argument.map(read)
    if isinstance(argument, Sequence) and not isinstance(argument, str | bytes):
        if not argument:
            raise InvalidArgument("there is nothing to choose from in an empty sequence")
        return tuple(map(read, argument))
    return (read(argument),)


def _as_strategy(given: Strategy[T] | tuple[T, ...]) -> Strategy[T]:
    return st.sampled_from(given) if isinstance(given, tuple) else given


def _given_shapes(argument: Any) -> Strategy[Shape]:
    if argument is None:
        return shapes()
    if isinstance(argument, tuple) and all(isinstance(length, int) for length in argument):
        return st.just(argument)
    return _as_strategy(
        _given(argument, lambda shape: (shape,) if isinstance(shape, int) else tuple(shape))
    )


def _known_layout(name: str) -> str:
    _values.check_among(name, _values.LAYOUTS, "layout")
    return name


def _known_framework(name: str) -> str:
    _values.check_among(name, _values.FRAMEWORKS, "framework")
    return name


@st.composite
def _arrays(draw: st.DrawFn, choices: _Choices) -> ArrayCase:
    return _cases(draw, choices, 1)[0]


@st.composite
def _rank_arrays(draw: st.DrawFn, choices: _Choices) -> RankValues[ArrayCase]:
    return RankValues(*_cases(draw, choices, rank_count()))


def _cases(draw: st.DrawFn, choices: _Choices, count: int) -> list[ArrayCase]:
    settled = [choices.settled(draw) for _ in range(count)]
    dtype, shape = _draw_dtype(draw, settled), draw(choices.shapes)
    return [own.case(draw, dtype, shape) for own in settled]


# Ranks and trees --------------------------------------------------------------------------------


@st.composite
def per_rank(draw: st.DrawFn, strategy: Strategy[T]) -> RankValues[T]:
    """Draw one value for each rank, independent of each other.

    Parameters
    ----------
    strategy : SearchStrategy
        What each value is drawn from.

    Returns
    -------
    SearchStrategy of RankValues
        In a test of `given`, each rank gets its own value.
    """
    return RankValues(*(draw(strategy) for _ in range(rank_count())))


@st.composite
def roots(draw: st.DrawFn) -> int:
    """Draw a rank of the example, the same on every rank.

    Returns
    -------
    SearchStrategy of int
        From 0 to below the number of ranks; shrinks to 0.
    """
    return draw(st.integers(0, rank_count() - 1))


def trees(leaves: Strategy[Any] | None = None, *, max_leaves: int = 8) -> Strategy[Any]:
    """Draw pytrees, of the same structure on every rank.

    Parameters
    ----------
    leaves : SearchStrategy, optional
        What leaves are drawn from; by default None, Python numbers and arrays, where numbers and
        arrays are each rank's own.
    max_leaves : int
        How many leaves a tree has at most, as `hypothesis.strategies.recursive` counts them.

    Returns
    -------
    SearchStrategy
        A leaf, or lists, tuples, dicts, ordered dicts, named tuples (`Pair`) and dataclasses
        (`Layer`) of trees, also empty ones; shrinks to a leaf.
    """
    return st.recursive(_leaves() if leaves is None else leaves, _containers, max_leaves=max_leaves)


def _leaves() -> Strategy[Any]:
    integers = st.integers(-(2**63), 2**63 - 1)
    return st.one_of(st.none(), per_rank(integers), per_rank(st.floats()), rank_arrays())


# Also such as do not look like names in the path of a leaf.
_KEYS: Final = st.sampled_from(("weight", "bias", "layer.0", "it's", ""))


def _containers(children: Strategy[Any]) -> Strategy[Any]:
    several = st.lists(children, max_size=3)
    mapping = st.dictionaries(_KEYS, children, max_size=3)
    return st.one_of(
        several,
        several.map(tuple),
        mapping,
        st.dictionaries(st.integers(0, 3), children, max_size=3),
        mapping.map(collections.OrderedDict),
        st.builds(Pair, children, children),
        st.builds(Layer, children, children),
    )
