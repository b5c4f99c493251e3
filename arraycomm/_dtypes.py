"""The dtypes that can be sent, and the reductions that each of them has: one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args

import ml_dtypes
import numpy as np

DType = np.dtype[Any]


class Kind(Enum):
    """What arithmetic a dtype has."""

    BOOL = "bool"
    INTEGER = "integer"
    NARROW = "narrow"  # floats of 16 and 8 bits: accumulated in float32
    FLOAT = "float"
    COMPLEX = "complex"
    OPAQUE = "opaque"  # moved, never reduced


@dataclass(frozen=True, slots=True)
class DTypeInfo:
    """One row of the table.

    `code` is sent in headers. `dlpack` is the type code of DLPack's ABI. `nccl` is NCCL's
    `ncclDataType_t`, None if NCCL has none with the same semantics.
    """

    name: str
    dtype: DType
    kind: Kind
    code: int
    dlpack: int
    nccl: int | None


def _row(name: str, dtype: Any, kind: Kind, code: int, dlpack: int, nccl: int | None) -> DTypeInfo:
    return DTypeInfo(name, np.dtype(dtype), kind, code, dlpack, nccl)


TABLE: Final = (
    _row("bool", np.bool_, Kind.BOOL, 1, 6, None),
    _row("int8", np.int8, Kind.INTEGER, 2, 0, 0),
    _row("int16", np.int16, Kind.INTEGER, 3, 0, None),
    _row("int32", np.int32, Kind.INTEGER, 4, 0, 2),
    _row("int64", np.int64, Kind.INTEGER, 5, 0, 4),
    _row("uint8", np.uint8, Kind.INTEGER, 6, 1, 1),
    _row("uint16", np.uint16, Kind.INTEGER, 7, 1, None),
    _row("uint32", np.uint32, Kind.INTEGER, 8, 1, 3),
    _row("uint64", np.uint64, Kind.INTEGER, 9, 1, 5),
    _row("float16", np.float16, Kind.NARROW, 10, 2, 6),
    _row("float32", np.float32, Kind.FLOAT, 11, 2, 7),
    _row("float64", np.float64, Kind.FLOAT, 12, 2, 8),
    _row("bfloat16", ml_dtypes.bfloat16, Kind.NARROW, 13, 4, 9),
    _row("float8_e4m3fn", ml_dtypes.float8_e4m3fn, Kind.NARROW, 14, 10, 10),
    _row("float8_e5m2", ml_dtypes.float8_e5m2, Kind.NARROW, 15, 12, 11),
    _row("complex64", np.complex64, Kind.COMPLEX, 16, 5, None),
    _row("complex128", np.complex128, Kind.COMPLEX, 17, 5, None),
)
BY_DTYPE: Final[dict[DType, DTypeInfo]] = {row.dtype: row for row in TABLE}
BY_NAME: Final[dict[str, DTypeInfo]] = {row.name: row for row in TABLE}
BY_CODE: Final[dict[int, DTypeInfo]] = {row.code: row for row in TABLE}
BY_DLPACK: Final[dict[tuple[int, int], DTypeInfo]] = {
    (row.dlpack, row.dtype.itemsize * 8): row for row in TABLE
}

OpName: TypeAlias = Literal["sum", "mean", "prod", "min", "max", "and", "or", "xor", "fsum"]
OPS: Final[tuple[str, ...]] = get_args(OpName)

_REDUCTIONS: Final[dict[Kind, frozenset[str]]] = {
    Kind.BOOL: frozenset(("min", "max", "and", "or", "xor")),
    Kind.INTEGER: frozenset(("sum", "prod", "min", "max", "and", "or", "xor")),
    Kind.NARROW: frozenset(("sum", "mean", "prod", "min", "max", "fsum")),
    Kind.FLOAT: frozenset(("sum", "mean", "prod", "min", "max", "fsum")),
    Kind.COMPLEX: frozenset(("sum", "mean", "prod", "fsum")),
    Kind.OPAQUE: frozenset(),
}

_REMEDIES: Final[dict[tuple[Kind, str], str]] = {
    (Kind.BOOL, "sum"): 'use "or", or cast to an integer dtype to count',
    (Kind.BOOL, "prod"): 'use "and", or cast to an integer dtype',
    (Kind.BOOL, "fsum"): 'use "or", or cast to an integer dtype and use "sum" to count',
    (Kind.INTEGER, "fsum"): 'use "sum", which is exact for integers unless it wraps',
    (Kind.BOOL, "mean"): "cast to a floating dtype first",
    (Kind.INTEGER, "mean"): "cast to a floating dtype first",
    (Kind.COMPLEX, "min"): "complex numbers have no order; reduce a real quantity instead",
    (Kind.COMPLEX, "max"): "complex numbers have no order; reduce a real quantity instead",
}


def kind_of(dtype: DType) -> Kind:
    """Return the arithmetic of a native dtype: `OPAQUE` if it is only moved."""
    info = BY_DTYPE.get(dtype)
    return Kind.OPAQUE if info is None else info.kind


def name_of(dtype: DType) -> str:
    """Return the name that every framework uses for this dtype; equal ones have one name."""
    info = BY_DTYPE.get(dtype)
    return str(_laid_out(dtype)) if info is None else info.name


def without_padding(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array without the bytes of structures that belong to no field: they may be any."""
    return array.astype(_laid_out(array.dtype, packed=True), copy=False)


def _laid_out(dtype: DType, *, packed: bool = False) -> DType:
    """Return an equal dtype that does not say whether NumPy was asked to align a structure.

    If it is to be `packed`, its fields lie side by side instead.
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return np.dtype((_laid_out(base, packed=packed), shape))
    if not dtype.names or dtype.fields is None:
        return dtype
    fields = [dtype.fields[name] for name in dtype.names]
    described: dict[str, Any] = {
        "names": dtype.names,
        "formats": [_laid_out(field[0], packed=packed) for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
    }
    if not packed:
        described |= {"offsets": [field[1] for field in fields], "itemsize": dtype.itemsize}
    return np.dtype(described)  # type: ignore[call-overload,no-any-return]


@lru_cache(maxsize=1024)
def _is_movable(dtype: DType) -> bool:
    # ml_dtypes' 4-bit integers have the kind V too, but are not structures.
    plain = dtype.kind in "mMSU" or issubclass(dtype.type, np.void)
    return dtype in BY_DTYPE or (plain and not dtype.hasobject and bool(dtype.itemsize))


def check_movable(dtype: DType, name: str = "x") -> None:
    """Raise `TypeError`, with the path of a leaf, if elements cannot be sent as plain bytes."""
    if _is_movable(dtype):
        return
    where = "" if name == "x" else f"{name}: "
    if dtype.hasobject:
        raise TypeError(
            f"{where}dtype {dtype} holds Python objects, which have no bytes to send; "
            "use bcast_object or allgather_object"
        )
    names = ", ".join(BY_NAME)
    is_long = dtype in (np.longdouble, np.clongdouble)
    long = ", a long double to float64 or complex128" if is_long else ""
    raise TypeError(f"{where}dtype {dtype} is not supported; cast to one of {names}{long}")


def check_op(op: object) -> None:
    """Raise unless `op` is the name of a reduction."""
    if not isinstance(op, str):
        raise TypeError(
            f"op must be the name of a reduction, or made by arraycomm.op if a "
            f"single array is reduced; got {op!r}"
        )
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")


def has_reduction(dtype: DType, op: str) -> bool:
    """Return whether a dtype has a reduction."""
    return op in _REDUCTIONS[kind_of(dtype)]


@lru_cache(maxsize=1024)
def check_reducible(dtype: DType, op: str) -> None:
    """Raise `TypeError` for a reduction that the dtype does not have."""
    if has_reduction(dtype, op):
        return
    kind = kind_of(dtype)
    remedy = _REMEDIES.get((kind, op))
    if remedy is None:
        allowed = ", ".join(o for o in OPS if o in _REDUCTIONS[kind])
        remedy = f"{name_of(dtype)} has {allowed}" if allowed else "it can only be moved"
    raise TypeError(f"op {op!r} is not defined for {name_of(dtype)}; {remedy}")
