"""Dtypes by name, including those that can be moved but not reduced."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any, Final

import numpy as np

from arraycomm._dtypes import BY_DTYPE, BY_NAME, DType, name_of

# Some dtypes that can be moved but not reduced; the last is a structure.
MOVABLE: Final = ("datetime64[s]", "timedelta64[ms]", "S3", "U2", "i4,f8")


@lru_cache(maxsize=256)
def dtype_of(name: str) -> DType:
    """Return the dtype of this name, in native byte order."""
    if name in BY_NAME:
        return BY_NAME[name].dtype
    try:
        described: Any = ast.literal_eval(name) if name[:1] in {"[", "{"} else name
        dtype: DType = np.dtype(described).newbyteorder("=")
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"{name!r} is not the name of a dtype: {error}") from None
    return dtype


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, which may be given in any form that NumPy accepts."""
    if not isinstance(dtype, str):
        return name_of(np.dtype(dtype).newbyteorder("="))
    found = dtype_of(dtype)
    return name_of(found) if found in BY_DTYPE else dtype


def kind_letter(dtype: DType) -> str:
    """Return NumPy's letter for the kind of elements, one for all integers and one for all dates.

    The floats of ml_dtypes are floats here.
    """
    kind = "f" if dtype.kind == "V" and dtype in BY_DTYPE else dtype.kind
    return {"u": "i", "M": "m"}.get(kind, kind)


def real_dtype(dtype: DType) -> DType:
    """Return the dtype of the real and the imaginary part."""
    return np.dtype(f"f{dtype.itemsize // 2}")


def field_dtypes(dtype: DType) -> list[DType]:
    """Return the dtypes of a structure's fields; for a field that is an array, of its elements."""
    return [dtype[name].base for name in dtype.names or ()]
