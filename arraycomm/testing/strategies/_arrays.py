"""Arrays to draw, with their layouts and frameworks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy as Strategy

from arraycomm.testing._arrays.array_case import ArrayCase, check_among
from arraycomm.testing._arrays.dtypes import dtype_name, dtype_of
from arraycomm.testing._arrays.frameworks import FRAMEWORKS, installed_frameworks, layouts_of
from arraycomm.testing._arrays.layouts import LAYOUTS, Shape
from arraycomm.testing._arrays.rank_values import RankValues, rank_count
from arraycomm.testing.strategies._dtypes import NAMES
from arraycomm.testing.strategies._elements import elements, shapes

T = TypeVar("T")


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
    check_among(framework, FRAMEWORKS, "framework")
    name = dtype_name(dtype)
    found = layouts_of(framework, dtype_of(name))
    if not found:
        raise InvalidArgument(f"{framework} has no arrays of dtype {name}")
    return st.sampled_from(found)


def frameworks() -> Strategy[str]:
    """Draw the names of frameworks whose arrays can be built here.

    Returns
    -------
    SearchStrategy of str
        One of `installed_frameworks()`, including "buffer" and "dlpack", which stand for objects of
        no framework; shrinks to "numpy".
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
    """Draw descriptions of arrays, the same for all ranks; each rank builds its own array.

    Every argument may be a strategy, a value, or a sequence of values to choose from. A combination
    that no framework has (torch and negative strides) is never drawn.

    Parameters
    ----------
    dtypes : str, numpy.dtype, sequence or strategy, optional
        By default every dtype that has arithmetic.
    shapes : int, tuple of int, sequence or strategy, optional
        A tuple of integers is one shape; a list has shapes to choose from. By default `shapes()`.
    layouts, frameworks : str, sequence or strategy, optional
        By default all that the dtype has.
    elements : number, sequence or strategy, optional
        Python values that the dtype must accept. By default `elements(dtype)`; elements after the
        first 8 are then random, from a seed that is drawn.
    readonly : bool, optional
        By default both, if the framework has such a flag.

    Returns
    -------
    SearchStrategy of ArrayCase
        `ArrayCase.build()` makes the array; `given` calls it on every rank. Shrinks to
        `ArrayCase('float32', (), elements=(0.0,))`.

    Examples
    --------
    >>> from arraycomm.testing.strategies import arrays
    >>> arrays("float64", (3, 4), layouts="negative", elements=[0, 1])  # doctest: +SKIP
    """
    choices = _choices(dtypes, shapes, layouts, frameworks, elements, readonly)
    return _cases(choices, per_rank=False).map(lambda drawn: drawn[0])


def rank_arrays(
    dtypes: Any = None,
    shapes: Any = None,
    *,
    layouts: Any = None,
    frameworks: Any = None,
    elements: Any = None,
    readonly: bool | None = None,
) -> Strategy[RankValues[ArrayCase]]:
    """Draw one array for each rank, all of one dtype and shape.

    Frameworks, layouts and elements differ between ranks, as collectives allow.

    Parameters
    ----------
    dtypes, shapes, layouts, frameworks, elements, readonly
        As for `arrays`.

    Returns
    -------
    SearchStrategy of RankValues of ArrayCase
        In a test of `given`, each rank gets its own array.
    """
    choices = _choices(dtypes, shapes, layouts, frameworks, elements, readonly)
    return _cases(choices, per_rank=True)


@dataclass(frozen=True)
class _Choices:
    """What `arrays` may draw: for each property, the values to choose from, or a strategy."""

    dtypes: _Given[str]
    shapes: Strategy[Shape]
    layouts: _Given[str]
    frameworks: _Given[str]
    elements: Strategy[Any] | None
    readonly: bool | None
    # Whether no value in it was drawn from a strategy.
    certain: bool = True

    def without_strategies(self, draw: st.DrawFn) -> _Choices:
        """Draw first the properties that come from strategies, so that the others can fit them."""
        settled = self
        if not isinstance(self.frameworks, tuple):
            settled = replace(settled, frameworks=(draw(self.frameworks),), certain=False)
        if not isinstance(self.layouts, tuple):
            settled = replace(settled, layouts=(draw(self.layouts),), certain=False)
        return settled

    def case(self, draw: st.DrawFn, dtype: str, shape: Shape) -> ArrayCase:
        """Draw an array of this dtype and shape."""
        assert isinstance(self.layouts, tuple)
        fitting = self.fitting(dtype, shape)
        framework = _one_of(draw, list(fitting))
        # Among all layouts, whose indices do not change while Hypothesis simplifies an example.
        layout = _one_of(draw, self.layouts)
        layout = layout if layout in fitting[framework] else fitting[framework][0]
        readonly = draw(st.booleans()) if self.readonly is None else self.readonly
        readonly = readonly and FRAMEWORKS[framework].readonly
        free = shape[1:] if layout == "broadcast" else shape
        first, seed = self._content(draw, dtype, math.prod(free))
        return ArrayCase(dtype, shape, layout, framework, readonly, first, seed)

    def fitting(self, dtype: str, shape: Shape = ()) -> dict[str, list[str]]:
        """Return the layouts to choose from, by framework, without frameworks that have none."""
        assert isinstance(self.frameworks, tuple)
        found = {name: self._layouts(name, dtype, shape) for name in self.frameworks}
        return {name: layouts for name, layouts in found.items() if layouts}

    def _layouts(self, framework: str, dtype: str, shape: Shape) -> list[str]:
        """Return the layouts that a framework has, without those that are equal for this shape."""
        assert isinstance(self.layouts, tuple)
        if self.readonly and not FRAMEWORKS[framework].readonly:
            return []
        available = layouts_of(framework, dtype_of(dtype))
        found = [name for name in self.layouts if name in available]
        return [name for name in found if LAYOUTS[name].least_ndim <= len(shape)] or found

    def _content(self, draw: st.DrawFn, dtype: str, count: int) -> tuple[tuple[Any, ...], int]:
        """Draw the first elements one by one, and a seed for the others."""
        one = elements(dtype) if self.elements is None else self.elements
        # As many for empty and broadcast arrays, which would count as simpler with fewer.
        first = draw(st.lists(one, min_size=1, max_size=min(max(count, 1), _DRAWN)))
        seed = draw(st.integers(0, 2**24 - 1)) if self.elements is None else 0
        return tuple(first[:count]), seed if count > _DRAWN else 0


_DRAWN: Final = 8  # elements that are drawn one by one, and shrink so


def _one_of(draw: st.DrawFn, values: Sequence[T]) -> T:
    """Draw a value by exactly one choice; `sampled_from` makes none if there is a single value.

    Hypothesis considers the example with the fewest choices the simplest.
    """
    return values[draw(st.integers(0, len(values) - 1))]


def _draw_dtype(draw: st.DrawFn, settled: Sequence[_Choices]) -> str:
    """Draw a dtype that every rank can have."""
    given = settled[0].dtypes

    def fits(dtype: str) -> bool:
        return all(choices.fitting(dtype) for choices in settled)

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
        NAMES if dtypes is None else _given(dtypes, dtype_name),
        _given_shapes(shapes),
        tuple(LAYOUTS)
        if layouts is None
        else _given(layouts, partial(check_among, table=LAYOUTS, kind="layout")),
        installed_frameworks()
        if frameworks is None
        else _given(frameworks, partial(check_among, table=FRAMEWORKS, kind="framework")),
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


@st.composite
def _cases(draw: st.DrawFn, choices: _Choices, *, per_rank: bool) -> RankValues[ArrayCase]:
    """Draw one array for each rank, or a single one."""
    settled = [choices.without_strategies(draw) for _ in range(rank_count() if per_rank else 1)]
    dtype, shape = _draw_dtype(draw, settled), draw(choices.shapes)
    return RankValues(*(own.case(draw, dtype, shape) for own in settled))
