"""The checks that laws make of results."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._communicator import Communicator
from arraycomm.testing._arrays.frameworks import DLPackOnly, elements_of, elements_to_write
from arraycomm.testing._arrays.oracle import COMPLEX, FLOAT, NARROW, expected, same_result
from arraycomm.testing.conformance._inputs import Reduction
from arraycomm.testing.strategies import Layer


def check_like(got: Any, like: Any) -> Array:
    """Fail unless a result is a C-contiguous array of the caller's kind; return its elements."""
    # For an input without a namespace the result is a NumPy array.
    kind = np.ndarray if isinstance(like, (memoryview, DLPackOnly)) else type(like)
    assert type(got) is kind, f"got {type(got).__name__}, not {kind.__name__}"
    # Those of JAX that are let other arrays' dtypes win.
    weak = getattr(got, "weak_type", False)
    assert weak == getattr(like, "weak_type", False), f"its dtype is {'' if weak else 'not '}weak"
    found = elements_of(got)
    assert found.flags.c_contiguous, f"the result has strides {found.strides}"
    return found


def check_elements(found: Array, want: Array, op: str = "") -> None:
    """Fail unless elements are the same bits, as far as the reduction determines bits."""
    _check_shape(found, want)
    if not same_result(found, want, op):
        order_counts = op in _ROUNDED and found.dtype in (*NARROW, *FLOAT, *COMPLEX)
        kind = OtherBitsError if order_counts else AssertionError
        raise kind(f"got {found!r}, not {want!r}{_first_difference(found, want, op)}")


class OtherBitsError(AssertionError):
    """Floats are not the fold in rank order, bit for bit; another order rounds in another way."""


_ROUNDED: Final = ("sum", "mean", "prod")


def check_copy(found: Array, want: Array) -> None:
    """Fail unless elements are the same in every bit, as moved data must be."""
    _check_shape(found, want)
    if found.tobytes() != want.tobytes():
        raise AssertionError(f"got {found!r}, not {want!r}{_first_difference(found, want)}")


def _check_shape(found: Array, want: Array) -> None:
    assert (found.dtype, found.shape) == (want.dtype, want.shape), (
        f"got {found.dtype} {found.shape}, not {want.dtype} {want.shape}"
    )


def _first_difference(found: Array, want: Array, op: str = "") -> str:
    """Name the first element that differs, which the text of a long array leaves out."""
    for index in np.ndindex(found.shape):
        got, wanted = found[index], want[index]
        if got.tobytes() != wanted.tobytes() and not (op and same_result(got, wanted, op)):
            place = ", ".join(map(str, index))
            return f"; the first difference is at [{place}]: {got!r}, not {wanted!r}"
    return ""


def check_leaf(got: Any, like: Any, want: Any) -> None:
    """Fail unless a leaf has the value of `want`, and the type and kind of `like`."""
    if isinstance(like, _PLAIN):
        assert type(got) is type(like), f"got {type(got).__name__}, not {type(like).__name__}"
        # Comparing by repr distinguishes signs of zeros, and makes NaN equal to NaN.
        assert repr(got) == repr(want), f"got {got!r}, not {want!r}"
    else:
        check_copy(check_like(got, like), native(elements_of(want)))


_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.generic)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf of a drawn tree is an array."""
    return not isinstance(leaf, _PLAIN)


def check_leaf_of_fold(got: Any, like: Any, want: Any, op: str) -> None:
    """Fail unless a leaf is what a reduction returns for it: an array, and None for None."""
    if like is None:
        assert got is None, f"got {got!r}, not None"
    else:
        check_elements(check_like(got, like), elements_of(want), op)


def native(array: Array) -> Array:
    """Return the elements in the byte order of this machine, C-contiguous."""
    return array.astype(array.dtype.newbyteorder("="), order="C")


def scribble(array: Any, byte: int) -> bool:
    """Fill the memory of a result with a byte; return whether that can be seen in it."""
    before = elements_of(array).tobytes()
    with elements_to_write(array) as memory:
        if not memory.flags.writeable:
            return False
        memory.reshape(-1).view(np.uint8)[...] = byte
    # Some frameworks show a copy. Another rank that writes here as well is for the law to find.
    return elements_of(array).tobytes() != before or set(before) <= {byte}


def overwrite(array: Any) -> None:
    """Set the elements of an array of any layout to zero, if they can be written."""
    with elements_to_write(array) as elements:
        if elements.flags.writeable:
            elements[...] = np.zeros((), elements.dtype)


def check_fold(comm: Communicator, reduction: Reduction, members: Sequence[int]) -> None:
    """Fail unless `comm` reduces the arrays of these ranks of the example, in this order."""
    op, elements = reduction.op, reduction.arrays.elements()
    x = reduction.arrays.build(members[comm.rank])
    want = expected([elements[rank] for rank in members], op)
    check_elements(check_like(comm.allreduce(x, op), x), want, op)


def leaves_of(*trees: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the corresponding leaves of trees of one structure; fail if structures differ."""
    first = trees[0]
    if not isinstance(first, (Layer, dict, list, tuple)):
        yield trees
        return
    _check_same(type, trees)
    if isinstance(first, Layer):
        children = [(tree.weight, tree.bias) for tree in trees]
    elif isinstance(first, dict):
        _check_same(list if type(first) is not dict else set, trees)
        children = [tuple(tree[key] for key in first) for tree in trees]
    else:
        _check_same(len, trees)
        children = list(trees)
    for together in zip(*children, strict=True):
        yield from leaves_of(*together)


def _check_same(what: Callable[[Any], Any], trees: Sequence[Any]) -> None:
    found = [what(tree) for tree in trees]
    assert all(one == found[0] for one in found), f"trees differ: {found}"


def check_mean(got: Array, values: Sequence[Array], weights: Sequence[float]) -> None:
    """Compare a weighted mean of real numbers with that of exact fractions."""
    total = sum(map(Fraction, weights))
    # What is narrower than float64 is rounded once more.
    dtype = got.real.dtype
    rounding = {2: 2.0**-7, 4: 2.0**-23}.get(dtype.itemsize, 0.0)
    smallest = float(np.nextafter(dtype.type(0), dtype.type(1)))
    for place, mean in np.ndenumerate(got.real):
        if not total:
            assert np.isnan(mean), f"got {mean!r} where no rank counts"
            continue
        terms = [
            Fraction(float(value.real[place])) * Fraction(weight)
            for value, weight in zip(values, weights, strict=True)
            if weight
        ]
        # One rounding for each product, sum and quotient.
        slack = (len(terms) + 2) * np.finfo(np.float64).eps * float(sum(map(abs, terms)) / total)
        error = abs(Fraction(float(mean)) - sum(terms) / total)
        slack += rounding * abs(float(mean))
        assert error <= slack + smallest, f"got {mean!r} in place of {float(sum(terms) / total)!r}"


@contextmanager
def neighbours_unchanged(array: Any) -> Iterator[None]:
    """Fail unless the memory around an array's elements stays unchanged."""
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
def raises(kind: type[BaseException]) -> Iterator[list[Any]]:
    """Fail unless the block raises an error of this kind; it is appended to the list."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    else:
        raise AssertionError(f"no {kind.__name__} was raised")
