"""NumPy's arrays as those of each framework, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

import arraycomm as ac
from tests.adapters.remote import Remote
from tests.support.frameworks import make

Array = NDArray[Any]


def _maker(framework: str) -> Callable[[Array], Any]:
    return lambda array: make(framework, array.copy())


MAKERS: dict[str, Callable[[Array], Any]] = {
    **{name: _maker(name) for name in ("numpy", "torch", "jax", "array_api_strict")},
    "remote": Remote,
}


def elements(x: Any) -> Array:
    return x._elements if isinstance(x, Remote) else ac.exchange(x, "numpy")
