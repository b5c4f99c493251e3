"""Gradients of libraries that are not known here: their arrays are read as bare memory.

What happens to such an array in a collective is not recorded, so a gradient would lack its part
without a word. It is refused, as PyTorch's, JAX's and MLX's arrays are by their own readers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from arraycomm._arrays.dlpack import attribute

# What an array says of itself while its gradient is wanted: Warp and most others, Taichi, NNabla,
# and Paddle.
_SAID: Final = (
    ("requires_grad", True),
    ("needs_grad", True),
    ("need_grad", True),
    ("stop_gradient", False),
)
# What returns such an array without its gradient, where it is there.
_METHODS: Final = ("detach()", "numpy()", "asnumpy()", "to_numpy()")


def refuse_differentiated(x: Any, name: str) -> None:
    """Raise for an array of an unknown library whose gradient is wanted."""
    remedy = _recorded(x, name) or _said(x, name)
    if remedy is not None:
        raise TypeError(
            f"{name} is differentiated by {type(x).__module__.partition('.')[0]}, and its gradient "
            f"would be lost; pass {remedy}"
        )


def _said(x: Any, name: str) -> str | None:
    if not any(_is(attribute(x, said, name), wanted) for said, wanted in _SAID):
        return None
    found = [f"{name}.{way}" for way in _METHODS if hasattr(x, way.removesuffix("()"))]
    return found[0] if found else "a copy without gradients"


def _is(found: Any, wanted: bool) -> bool:
    return isinstance(found, bool | np.bool) and bool(found) is wanted


def _recorded(x: Any, name: str) -> str | None:
    """Ask a library whose arrays do not say it themselves."""
    for base in type(x).__mro__:
        library = base.__module__.partition(".")[0]
        is_recorded, remedy = _LIBRARIES.get(library, (None, ""))
        if is_recorded is not None:
            return f"{remedy}({name})" if is_recorded(x) else None
    return None


def _on_tape(x: Any) -> bool:
    """Return whether a GradientTape or a ForwardAccumulator of TensorFlow records a tensor."""
    tapes = sys.modules.get("tensorflow.python.pywrap_tfe")
    return tapes is not None and bool(tapes.TFE_Py_TapeSetPossibleGradientTypes([x]))


def _in_graph(x: Any) -> bool:
    return bool(sys.modules["drjit"].grad_enabled(x))


_LIBRARIES: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    "tensorflow": (_on_tape, "tensorflow.stop_gradient"),
    "drjit": (_in_graph, "drjit.detach"),
}
