"""The libraries that arraycomm loads by ctypes, as long as they are installed."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from cupy._driver import Driver, Library
from cupy._nccl import Nccl

_usual: Final = ctypes.CDLL
libraries: Final[dict[str, Library]] = {}


def install() -> None:
    """Have ctypes find new ones from now on."""
    libraries.update({"libcuda.so.1": Driver(), "libnccl.so.2": Nccl()})
    ctypes.CDLL = _load  # type: ignore[assignment,misc]
    forget()


def uninstall() -> None:
    libraries["libnccl.so.2"].close()
    ctypes.CDLL = _usual  # type: ignore[misc]
    libraries.clear()
    forget()


def _load(name: Any, *arguments: Any, **options: Any) -> Any:
    found = libraries.get(name)
    return _usual(name, *arguments, **options) if found is None else found


def forget() -> None:
    """Have arraycomm look for its libraries again, and for what is on devices."""
    from arraycomm._arrays import current_device, pinned
    from arraycomm._cuda import driver, kernels, streams
    from arraycomm._cuda.links import libnccl

    for cached in (current_device.driver, pinned.pinned, kernels.compiled, libnccl.load):
        cached.cache_clear()
    driver._functions.clear()
    kernels.function_of.cache_clear()
    kernels._modules.clear()
    streams.LEASES._kept.clear()
