"""torch.distributed over arraycomm: importing this module registers the backend "arraycomm".

Under `mpiexec`, `init_process_group("arraycomm")` needs nothing else: the ranks are those of
`arraycomm.init`. If something else numbers the ranks, as `torchrun` does, they have to be on one
node.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

import torch.distributed as dist

from arraycomm._entries import leave_to_python, opaque
from arraycomm.adapters.torch_distributed._group import ArrayCommProcessGroup
from arraycomm.adapters.torch_distributed._libraries import telling_libraries
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


def _register() -> None:
    dist.Backend.register_backend("arraycomm", make_group, extended_api=True, devices=["cpu"])
    handlers = vars(_rendezvous)["_rendezvous_handlers"]
    handlers["env"] = rendezvous_or(handlers["env"])
    ours = {
        "monitored_barrier": _with_our_groups(dist.monitored_barrier),
        "get_backend": telling_libraries(dist.get_backend),
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
