"""Results: new memory, and arrays of the caller's framework over it."""

from __future__ import annotations

from typing import Any, Final

from arraycomm._arrays.buffer import CPU, Array, BufferView
from arraycomm._arrays.frameworks import BY_NAME
from arraycomm._arrays.memory import allocate
from arraycomm._dtypes import DType

# Every small call passes here, so these are found by one look-up.
_TO_FRAMEWORK: Final = {name: row.to_framework for name, row in BY_NAME.items()}
_COMMIT_OUT: Final = {name: row.commit_out for name, row in BY_NAME.items()}
_ALLOCATE: Final = {name: row.allocate for name, row in BY_NAME.items() if row.allocate is not None}


def allocate_like(shape: tuple[int, ...], dtype: DType, like: BufferView) -> Array:
    """Return new memory as `allocate` does, which `to_framework` takes over as the framework's own if it has its own."""
    own = _ALLOCATE.get(like.framework) if like.device == CPU else None
    return allocate(shape, dtype) if own is None else own(shape, dtype)


def to_framework(array: Array, like: BufferView) -> Any:
    """Return `array` as an array of the framework and on the device of `like`.

    The caller must not use `array` any more: the framework takes its memory over if it can, see
    `Framework.takes_over`.
    """
    return _TO_FRAMEWORK[like.framework](array, like)


def commit_out(out: BufferView) -> Any:
    """Finish a write into `out.array`, and return the caller's `out`.

    A view that is a copy is copied back. PyTorch is told that the tensor changed, so that autograd
    notices if an older value was saved.
    """
    return _COMMIT_OUT[out.framework](out)
