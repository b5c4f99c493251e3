"""MLX's arrays, whose memory may be shared with other arrays."""

from __future__ import annotations

import io
import sys
from typing import Any, Final

import ml_dtypes
import numpy as np

from arraycomm._arrays.buffer import CPU, Array, BufferView, Reader
from arraycomm._arrays.frameworks.base import Framework, no_such_dtype
from arraycomm._dtypes import TABLE, DType, check_movable, name_of


def find_reader(kind: type) -> Reader | None:
    """Return the reader of arrays of this type."""
    return read_mlx if issubclass(kind, sys.modules["mlx.core"].array) else None


def read_mlx(x: Any, name: str) -> BufferView:
    """Read an array in its own memory."""
    mx = sys.modules["mlx.core"]
    _check_history(mx, x, name)
    if x.dtype == mx.bfloat16:
        array = np.asarray(memoryview(x.view(mx.uint16))).view(ml_dtypes.bfloat16)
    else:
        array = np.asarray(memoryview(x))
    check_movable(array.dtype, name)
    array.flags.writeable = False
    return BufferView(array, "mlx", x, True)


def _check_history(mx: Any, x: Any, name: str) -> None:
    """Raise if an array is traced by a transformation, which would lose what happens to it here."""
    try:
        mx.eval(x)
    except ValueError as error:
        raise TypeError(
            f"{name} is traced by MLX (compile or vmap) and has no elements yet; "
            "call this outside of the function"
        ) from error
    # Looked at twice: an array that was evaluated while it was traced keeps its history afterwards,
    # until it is evaluated together with a new one.
    if _is_differentiated(mx, x):
        mx.eval(x, mx.zeros(()))
        if _is_differentiated(mx, x):
            raise TypeError(
                f"{name} is differentiated by MLX (grad, vjp or jvp), and its gradient would be "
                f"lost; call this outside of the function, or pass mx.stop_gradient({name})"
            )


def _is_differentiated(mx: Any, x: Any) -> bool:
    """Return whether an evaluated array has a history: MLX keeps one only for what it traces."""
    graph = io.StringIO()
    mx.export_to_dot(graph, x)
    # Inputs come before what was made of them, so the last label is that of the array itself.
    _, made, primitive = graph.getvalue().rpartition('label ="')
    return bool(made) and not primitive.startswith("StopGradient")


def _to_mlx(array: Array, _like: BufferView) -> Any:
    mx = sys.modules["mlx.core"]
    dtype = _dtype_of(name_of(array.dtype))
    if dtype is None:
        raise no_such_dtype("mlx", array.dtype)
    return mx.array(np.asarray(array, order="C"), dtype=dtype)


def _dtype_of(name: str) -> Any:
    return getattr(sys.modules["mlx.core"], "bool_" if name == "bool" else name, None)


def _lacks(_source: Any) -> frozenset[DType]:
    return frozenset(row.dtype for row in TABLE if _dtype_of(row.name) is None)


def _commit_out(out: BufferView) -> Any:
    out.source[...] = _to_mlx(out.array, out)
    return out.source


MLX: Final = Framework(
    name="mlx",
    module="mlx.core",
    read=read_mlx,
    device_of=lambda _: CPU,
    to_framework=_to_mlx,
    takes_over=lambda _: False,
    commit_out=_commit_out,
    lacks=_lacks,
    takes_opaque=False,
    widest_float=lambda: np.dtype(np.float32),
    replaces_out=True,
    reason_to_copy=lambda _: "MLX copies what it is given",
)
