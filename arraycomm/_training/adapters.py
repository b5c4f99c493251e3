"""Which adapter serves an object: one table, from the modules its classes come from."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Final

_ADAPTERS: Final = {
    "torch": "arraycomm.adapters.torch",
    "jax": "arraycomm.adapters.jax",
    "optax": "arraycomm.adapters.jax",
}
_DEFAULT: Final = "arraycomm.adapters.numpy"


def adapter_of(obj: Any) -> ModuleType:
    """Return the adapter module for an object, imported on first use."""
    for kind in type(obj).__mro__:
        name = _ADAPTERS.get(kind.__module__.partition(".")[0])
        if name is not None:
            return importlib.import_module(name)
    return importlib.import_module(_DEFAULT)
