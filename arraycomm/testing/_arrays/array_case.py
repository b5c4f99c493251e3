"""Descriptions of arrays.

A drawn array is described, not made: a description prints in one line, and every rank builds the
array anew from it, with the strides, alignment and flags that no pickle would keep.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm.testing._arrays.dtypes import dtype_of
from arraycomm.testing._arrays.elements import filled
from arraycomm.testing._arrays.frameworks import FRAMEWORKS, layouts_in_principle
from arraycomm.testing._arrays.layouts import LAYOUTS, Shape, laid_out


class _Printer(Protocol):
    def text(self, text: str) -> None: ...


# The frameworks of the arrays that this process has described, and not only got from rank 0.
DRAWN: set[str] = set()


@dataclass(frozen=True, slots=True, repr=False)
class ArrayCase:
    """An array as it is drawn: a description, from which each rank builds the array.

    Attributes
    ----------
    dtype : str
        The dtype's name; of a structure, what `numpy.dtype` takes for it.
    shape : tuple of int
        Lengths of the dimensions.
    layout : str
        How the elements lie in memory: "contiguous", "fortran", "transposed" (the first axis is the
        last in memory), "sliced" (every other element of a larger array on each axis), "offset" (an
        inner window of a larger array), "negative" (every stride is negative), "broadcast" (the
        first axis has stride 0, so the elements are constant along it), "unaligned" (the address is
        no multiple of the itemsize), "swapped" (the other byte order).
    framework : str
        The framework of the array: "numpy", "torch", "jax", "array_api_strict", "cupy", "mlx",
        "buffer" (a `memoryview`), "dlpack" (an object with DLPack and nothing else).
    readonly : bool
        The array cannot be written. JAX arrays never can, and have no flag for it.
    elements : tuple
        The first elements in C order, repeated to the end: Python numbers, strings, bytes; integers
        for dates; tuples for structures. If empty, all elements are zeros.
    seed : int
        If it is not 0, the elements that follow `elements` are random numbers from this seed.

    Examples
    --------
    >>> from arraycomm.testing.strategies import ArrayCase
    >>> case = ArrayCase("float32", (2, 3), layout="transposed", elements=(1.0, 2.0))
    >>> case.build()
    array([[1., 2., 1.],
           [2., 1., 2.]], dtype=float32)
    >>> case.build().strides
    (4, 8)
    """

    dtype: str
    shape: Shape
    layout: str = "contiguous"
    framework: str = "numpy"
    readonly: bool = False
    elements: tuple[Any, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        DRAWN.add(check_among(self.framework, FRAMEWORKS, "framework"))
        check_among(self.layout, LAYOUTS, "layout")
        if self.layout not in layouts_in_principle(self.framework, dtype_of(self.dtype)):
            raise ValueError(
                f"there is no array of {self.framework} of dtype {self.dtype} with the layout "
                f"{self.layout!r}"
            )
        if self.readonly and not FRAMEWORKS[self.framework].readonly:
            raise ValueError(f"arrays of {self.framework} have no read-only flag")

    def numpy(self) -> Array:
        """Return the elements as a new NumPy array, C-contiguous and in native byte order."""
        dtype = dtype_of(self.dtype)
        if self.layout != "broadcast":
            return filled(dtype, self.shape, self.elements, self.seed)
        row = (1,) * len(self.shape[:1]) + self.shape[1:]
        return np.broadcast_to(filled(dtype, row, self.elements, self.seed), self.shape).copy()

    def build(self) -> Any:
        """Return a new array of the framework in this layout, with the elements of `numpy()`."""
        values = self.numpy()
        dtype = values.dtype.newbyteorder() if self.layout == "swapped" else values.dtype
        position = LAYOUTS[self.layout].place(self.shape, dtype.itemsize)
        array = laid_out(values, dtype, position)
        array.flags.writeable = not self.readonly
        return FRAMEWORKS[self.framework].build(array)

    def __repr__(self) -> str:
        words = [repr(self.dtype), repr(self.shape)]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_literal(value)}")
        return f"ArrayCase({', '.join(words)})"

    def _repr_pretty_(self, printer: _Printer, _cycle: bool) -> None:
        # Hypothesis would show every field of a dataclass.
        printer.text(repr(self))


def check_among(name: str, table: dict[str, Any], kind: str) -> str:
    """Return the name; raise `ValueError` unless it is one of the table's."""
    if name not in table:
        raise ValueError(f"{kind} must be one of {', '.join(table)}; got {name!r}")
    return name


def _literal(value: Any) -> str:
    if type(value) is tuple:
        items = [_literal(item) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if type(value) is complex:
        return f"complex({value.real!r}, {value.imag!r})"  # 'a+bj' would lose signs of zeros
    return repr(value)
