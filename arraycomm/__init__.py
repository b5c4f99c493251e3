"""The communication layer under data-parallel Python."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "arraycomm needs Linux or macOS; got Windows, which has no forks, POSIX signals or files "
        "that processes share as they do; run Python in WSL 2, which is a Linux"
    )

from arraycomm._arrays.exchange import exchange
from arraycomm._calls.custom_ops import op
from arraycomm._calls.requests import Request, testall, waitall, waitany
from arraycomm._communicator import Communicator, GridCommunicator
from arraycomm._entries import opaque, publish
from arraycomm._errors import (
    ArrayCommError,
    BackendUnavailableError,
    CommTimeoutError,
    CommunicatorClosedError,
    ConcurrentUseError,
    DeadlockError,
    MismatchError,
    NotInitializedError,
    PeerError,
    TransportError,
)
from arraycomm._explain import explain
from arraycomm._functions import allreduce_gradients, allreduce_tree, fsum, synchronize
from arraycomm._messages.matching import ANY_SOURCE, ANY_TAG, PROC_NULL, Status
from arraycomm._native.build import installed_version
from arraycomm._println import println
from arraycomm._session import borrow, finalize, init, is_initialized, world
from arraycomm._together import raise_together
from arraycomm._trees.plan import Plan

if TYPE_CHECKING:
    from arraycomm._jobs.launch import launch
    from arraycomm._training.batches.data import DistributedDataContainer
    from arraycomm._training.comparison.sameness import raise_on_difference
    from arraycomm._training.compression import Compression
    from arraycomm._training.join import Join, join
    from arraycomm._training.metrics import mean_metrics
    from arraycomm._training.optimizer import DistributedOptimizer

    __version__: str

# Imported on first use: programs that only communicate do not wait for what training needs.
_ON_FIRST_USE = {
    "Compression": "arraycomm._training.compression",
    "DistributedDataContainer": "arraycomm._training.batches.data",
    "DistributedOptimizer": "arraycomm._training.optimizer",
    "Join": "arraycomm._training.join",
    "join": "arraycomm._training.join",
    "launch": "arraycomm._jobs.launch",
    "mean_metrics": "arraycomm._training.metrics",
    "raise_on_difference": "arraycomm._training.comparison.sameness",
}

# What earlier versions had, and where a few lines do it.
_REMOVED = {
    "ErrorFeedback": "'Error feedback' in docs/recipes.md",
    "RankFilter": "'Logs' in docs/running.md",
    "raise_on_nan": "'Where a NaN comes from' in docs/training.md",
}

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "PROC_NULL",
    "ArrayCommError",
    "BackendUnavailableError",
    "CommTimeoutError",
    "Communicator",
    "CommunicatorClosedError",
    "Compression",
    "ConcurrentUseError",
    "DeadlockError",
    "DistributedDataContainer",
    "DistributedOptimizer",
    "GridCommunicator",
    "Join",
    "MismatchError",
    "NotInitializedError",
    "PeerError",
    "Plan",
    "Request",
    "Status",
    "TransportError",
    "allreduce_gradients",
    "allreduce_tree",
    "borrow",
    "exchange",
    "explain",
    "finalize",
    "fsum",
    "init",
    "is_initialized",
    "join",
    "launch",
    "mean_metrics",
    "op",
    "println",
    "raise_on_difference",
    "raise_together",
    "synchronize",
    "testall",
    "waitall",
    "waitany",
    "world",
]

for _name in set(__all__) - set(_ON_FIRST_USE):
    publish(globals()[_name])


_clone = os.path.dirname(__path__[0])
if not os.path.isdir(os.path.join(__path__[0], "adapters")) and all(
    os.path.isfile(os.path.join(_clone, *name))
    for name in (("setup.py",), ("adapters", "__init__.py"))
):
    # Imported from the sources, as by a program that is saved beside them: there the adapters are
    # no part of the package.
    __path__.append(_clone)


@opaque
def __getattr__(name: str) -> Any:
    if name == "__version__":
        return installed_version()
    if name in _REMOVED:
        raise AttributeError(f"arraycomm.{name} was removed; see {_REMOVED[name]}")
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module 'arraycomm' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_ON_FIRST_USE[name]), name)
    publish(value)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
