"""What a result is like if only another rank knows its dtype, and which dtypes it cannot have.

A rank announces these dtypes in the free word of its header, so that all ranks raise before data
moves, and no call has a further step to see whether its results were taken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import CPU, BufferView, allocate
from arraycomm._arrays.frameworks import BY_NAME
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import result_prototype, view
from arraycomm._dtypes import BY_DTYPE, DType, name_of
from arraycomm._errors import PeerError, raise_interrupt
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.announced import malformed

# Stands for every dtype that has no code.
_OTHERS: Final = 1 << 0
# The frameworks of arrays, by the number that the root of a bcast announces; 0 and 1 are flags.
BY_CODE: Final = dict(enumerate((row for row in BY_NAME.values() if row.module), 2))
_CODES: Final = {row.name: code for code, row in BY_CODE.items()}
# What a result is like if the caller has not said it.
_UNKNOWN: Final = view(np.empty(0))


class Wanted(NamedTuple):
    """What a result is like, what is wrong with that, and whether it is a Python object."""

    kind: BufferView
    wrong: Exception | None
    pickled: bool = False


def wanted_kind(x: Any, like: Any, out: Any) -> BufferView:
    """Return a view that tells what the result is like; its elements do not matter."""
    for name, example in (("x", x), ("like", like), ("out", out)):
        if example is not None:
            return result_prototype(example, name)
    return _UNKNOWN


def wanted_like(like: Any, out: Any) -> Wanted:
    """Return what the result is like, and the error in that: the message is taken all the same."""
    try:
        return Wanted(wanted_kind(None, like, out), None)
    except Exception as error:
        raise_interrupt(error)
        return Wanted(wanted_kind(None, None, None), error)


def framework_code(source: BufferView) -> int:
    """Return a number for the framework of an array on the host, 0 for anything else."""
    return _CODES.get(source.framework, 0) if source.device == CPU else 0


def is_numpy(code: int) -> bool:
    """Return whether a root's framework, by its number, is NumPy, or another that has no number."""
    return code in (0, _CODES["numpy"])


def like_root(kind: BufferView, code: int, dtype: DType) -> BufferView:
    """Return what the result is like, now that the framework and dtype of the root are known.

    If the caller has not said it, it is the framework of the root, if that is loaded here and has
    the dtype, and else NumPy.
    """
    framework = BY_CODE.get(code) if kind is _UNKNOWN else None
    if framework is None or framework.module not in sys.modules:
        return kind
    found = BufferView(kind.array, framework.name, None, True, True)
    return kind if _lacks(found, dtype) else found


def announced(like: BufferView) -> int:
    """Return the dtypes that a result like `like` cannot have, a bit for each."""
    # Others are of objects on devices, whose results are arrays of CuPy.
    framework = BY_NAME.get(like.framework, BY_NAME["cupy"])
    others = 0 if framework.takes_opaque else _OTHERS
    return sum(1 << BY_DTYPE[dtype].code for dtype in framework.lacks(like.source)) | others


def check_taken(
    operation: str, announcements: Sequence[int], rank: int, like: BufferView, dtype: DType
) -> None:
    """Raise on all ranks if one of them cannot have a result of this dtype.

    `announcements` has what each rank announced, 0 for one that gets no such result.
    """
    if not any(announcements):
        return
    bit = _bit(dtype)
    refusing = [other for other, found in enumerate(announcements) if found & bit]
    if rank in refusing:
        _refuse(rank, like, dtype)
    if refusing:
        error = PeerError(
            f"{operation}: the framework of rank {refusing[0]} has no dtype {name_of(dtype)}, "
            "which "
            "the result has; that rank raises the reason",
            rank=refusing[0],
        )
        error.in_step = True
        raise error


def _bit(dtype: DType) -> int:
    info = BY_DTYPE.get(dtype)
    return _OTHERS if info is None else 1 << info.code


def _lacks(like: BufferView, dtype: DType) -> bool:
    return bool(announced(like) & _bit(dtype))


def _refuse(rank: int, like: BufferView, dtype: DType) -> None:
    """Raise what the framework raises for this dtype."""
    try:
        to_framework(allocate((0,), dtype), like)
    except Exception as error:
        raise UndeliveredError(error) from error
    raise malformed(rank, f"that it has no dtype {name_of(dtype)}, which it has")
