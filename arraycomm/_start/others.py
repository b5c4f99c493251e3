"""Processes that this one belongs to, as libraries say, or variables that arraycomm ignores."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from arraycomm._errors import BackendUnavailableError
from arraycomm._launch import ADDRESS, NUMBER, RANK
from arraycomm._start.numbering import EXAMPLE

# Variables with the number of processes and with that of this one: of torch and Lightning, Horovod,
# JAX, Paddle, and MLX.
_VARIABLES: Final = (
    ("WORLD_SIZE", "RANK"),
    ("HOROVOD_SIZE", "HOROVOD_RANK"),
    ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    ("PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID"),
    ("MLX_WORLD_SIZE", "MLX_RANK"),
)


class _Others(NamedTuple):
    """Who knows of several processes, how many, and which of them this one is."""

    known: str
    size: int
    rank: object


def refuse_other_ranks(call: str, environment: Mapping[str, str]) -> None:
    """Raise if this process, which would be a world of its own, is one of several to others."""
    found = _in_torch() or _in_jax() or (environment and _in_variables(environment))
    if not found:
        return
    rank = "0, 1 and so on" if found.rank == "" else f"{found.rank} here"
    raise BackendUnavailableError(
        f"{call}: {found.known}, but for arraycomm each process would be a world of its own; "
        f"before init, set {ADDRESS}, as in {EXAMPLE}, to the same on every process, {NUMBER} to "
        f"{found.size}, and {RANK} to {rank}; or start the program with: arraycomm run -n "
        f"{found.size} …; or in place of init let torch use arraycomm: import "
        "arraycomm.adapters.torch_distributed, and call "
        "torch.distributed.init_process_group('arraycomm'); or call init(backend='self') for a "
        "world of this process alone"
    )


def _in_torch() -> _Others | None:
    torch = sys.modules.get("torch.distributed")
    # Where torch was built without, it has no such function.
    if torch is None or not getattr(torch, "is_initialized", bool)():
        return None
    size = torch.get_world_size()
    known = f"torch.distributed has {size} ranks"
    return _Others(known, size, torch.get_rank()) if size > 1 else None


def _in_jax() -> _Others | None:
    jax = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    if jax is None or (size := jax.num_processes or 1) == 1:
        return None
    return _Others(f"jax.distributed has {size} processes", size, jax.process_id)


def _in_variables(environment: Mapping[str, str]) -> _Others | None:
    for number, own in _VARIABLES:
        if (said := environment.get(number, "")).isdecimal() and int(said) > 1:
            rank = environment.get(own, "")
            known = f"{number} is {said}" + ("" if rank else f" and {own} is missing")
            return _Others(known, int(said), rank)
    return None
