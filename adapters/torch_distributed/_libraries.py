"""What libraries decide by the name of a backend, and would decide wrongly by this one's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

# pytorch-ignite's `auto_model` wraps a model only if the backend is NCCL, GLOO or MPI of this
# module; else the ranks train apart. MPI is free, for torch is seldom built with it.
_IGNITE: Final = "ignite.distributed.comp_models.native"


def telling_libraries(original: Callable[..., str]) -> Callable[..., str]:
    """Return a `get_backend` that lets the library that asks know this backend's name.

    It may be imported at any time, but asks before it decides.
    """

    @functools.wraps(original)
    def get_backend(group: Any = None) -> str:
        name = original(group)
        if "arraycomm" in name and _IGNITE in sys.modules:
            vars(sys.modules[_IGNITE])["MPI"] = name
        return name

    return get_backend
