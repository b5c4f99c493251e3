"""torch.distributed over arraycomm: importing this module registers the backend "arraycomm".

Under `mpiexec`, `init_process_group("arraycomm")` needs nothing else: the ranks are those of
`arraycomm.init`. If something else numbers the ranks, as `torchrun` does, they have to be on one
node.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from arraycomm._entries import leave_to_python, opaque
from arraycomm.adapters.torch_distributed._group import ArrayCommProcessGroup
from arraycomm.adapters.torch_distributed._start import make_group, rendezvous_or

__all__: list[str] = []

_rendezvous: Final[Any] = importlib.import_module("torch.distributed.rendezvous")


# They ask a group for what `torch.compile` does not read of one, whatever the backend.
_UNTRACED: Final = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
)
# pytorch-ignite's `auto_model` wraps a model only if the backend is NCCL, GLOO or MPI of this
# module; else the ranks train apart. MPI is free, for torch is seldom built with it.
_IGNITE: Final = "ignite.distributed.comp_models.native"


def _telling_libraries(original: Callable[..., str]) -> Callable[..., str]:
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


def _register() -> None:
    dist.Backend.register_backend("arraycomm", make_group, extended_api=True, devices=["cpu"])
    handlers = vars(_rendezvous)["_rendezvous_handlers"]
    handlers["env"] = rendezvous_or(handlers["env"])
    ours = {
        "monitored_barrier": _with_our_groups(dist.monitored_barrier),
        "get_backend": _telling_libraries(dist.get_backend),
    }
    for module in (dist, dist.distributed_c10d):
        vars(module).update(ours)
    for name in _UNTRACED:
        leave_to_python(getattr(dist, name))


def _with_our_groups(original: Any) -> Any:
    """Return a `monitored_barrier` for this backend's groups too: torch's takes only gloo's."""

    @opaque
    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> Any:
        found = dist.group.WORLD if group is None else group
        if isinstance(found, ArrayCommProcessGroup):
            return found.monitored_barrier(timeout, wait_all_ranks)
        return original(group, timeout, wait_all_ranks)

    return monitored_barrier


if "arraycomm" not in dist.Backend.backend_list:
    _register()
