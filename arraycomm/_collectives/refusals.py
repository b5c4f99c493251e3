"""What a result is like if only another rank knows its dtype, and which dtypes it cannot have.

A rank announces these dtypes in the free word of its header, so that all ranks raise before data moves, and
no call has a further step to see whether its results were taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.results import allocate, lacking, to_framework
from arraycomm._arrays.views import result_prototype, view
from arraycomm._dtypes import BY_DTYPE, DType, name_of
from arraycomm._errors import PeerError
from arraycomm._protocol.undelivered import UndeliveredError

# Stands for every dtype that has no code.
_OTHERS: Final = 1 << 0


def wanted_kind(x: Any, like: Any, out: Any) -> BufferView:
    """Return a view that tells what the result is like; its elements do not matter."""
    for name, example in (("x", x), ("like", like), ("out", out)):
        if example is not None:
            return result_prototype(example, name)
    return view(np.empty(0))


def announced(like: BufferView) -> int:
    """Return the dtypes that a result like `like` cannot have, a bit for each."""
    dtypes, others = lacking(like)
    return sum(1 << BY_DTYPE[dtype].code for dtype in dtypes) | (_OTHERS if others else 0)


def check_taken(
    operation: str, announcements: Sequence[int], rank: int, like: BufferView, dtype: DType
) -> None:
    """Raise on all ranks if one of them cannot have a result of this dtype.

    `announcements` has what each rank announced, 0 for one that gets no such result.
    """
    if not any(announcements):
        return
    info = BY_DTYPE.get(dtype)
    bit = _OTHERS if info is None else 1 << info.code
    refusing = [other for other, found in enumerate(announcements) if found & bit]
    if rank in refusing:
        _refuse(like, dtype)
    if refusing:
        error = PeerError(
            f"{operation}: the framework of rank {refusing[0]} has no dtype {name_of(dtype)}, which "
            "the result has; that rank raises the reason",
            rank=refusing[0],
        )
        error.in_step = True
        raise error


def _refuse(like: BufferView, dtype: DType) -> None:
    """Raise what the framework raises for this dtype."""
    try:
        to_framework(allocate((0,), dtype), like)
        raise TypeError(f"{like.framework} has no dtype {name_of(dtype)}; pass another `like`")
    except Exception as error:
        raise UndeliveredError(error) from error
