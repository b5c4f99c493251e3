"""How this process is to start: its backend, by what launched it and by what was asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

from arraycomm import _launch
from arraycomm._errors import BackendUnavailableError
from arraycomm._exit.exit import mpi_has_peers
from arraycomm._launch import children_of, find_launcher
from arraycomm._start.arguments import Arguments, seconds_of
from arraycomm._start.numbering import EXAMPLE, Numbering, numbering
from arraycomm._start.on_node import open_by_numbers
from arraycomm._start.opened import Opened, open_alone
from arraycomm._start.over_mpi import mpi_transport, open_over_mpi, refuse_other_launcher


class Start(NamedTuple):
    """How to start.

    The backend, whether an MPI launcher or the program has started MPI, the numbers of processes
    without, and whether this process is the only one, so that it may do without MPI.
    """

    backend: str
    launched: bool = False
    numbering: Numbering | None = None
    alone: bool = False


def choose_start(backend: str) -> Start:
    """Return how to start, or raise if processes that belong together would not be connected.

    MPI goes before processes that are only numbered.
    """
    start = _chosen(backend)
    numbers = start.numbering
    is_one = start.alone or start.backend == "self" or (numbers is not None and numbers.size == 1)
    if is_one and backend == "auto":
        refuse_other_ranks("init", os.environ)
    return start


def _chosen(backend: str) -> Start:
    if backend in ("self", "threads"):
        return Start(backend)
    launch = _launch.detect(os.environ)
    has_peers = mpi_has_peers()
    launched = launch is not None or has_peers
    alone = backend == "auto" and launch is not None and launch.size == 1 and not has_peers
    if backend != "processes" and (has_peers or _connects(launch)):
        _refuse_contradiction(launch)
        return Start("mpi" if backend == "auto" else backend, launched, alone=alone)
    found = numbering(os.environ)
    if backend == "processes":
        return Start(backend, numbering=_needed(found))
    if found is None and not launched:
        _refuse_hidden_launcher()
    if found is None or found.size == 1:
        chosen = ("mpi" if launched else "self") if backend == "auto" else backend
        return Start(chosen, launched, alone=alone)
    if backend == "auto":
        return Start("processes", numbering=found)
    raise BackendUnavailableError(
        f"init: {found.variables[0]} is {found.size}, but no MPI launcher has started these "
        f"processes; start them with: arraycomm run -n {found.size} …, or call init without "
        f"backend={backend!r} to connect them on one node without MPI"
    )


def _refuse_hidden_launcher() -> None:
    """Raise if a launcher has started this process and others, and the environment hides it."""
    launcher = find_launcher(os.getppid())
    started = 0 if launcher is None else len(children_of(launcher.pid))
    if started > 1:
        raise BackendUnavailableError(
            f"init: a launcher ({launcher}) has started {started} processes, of which this is one "
            "or a child of one, but the environment says nothing of it, as after env -i or sudo, "
            "so that they cannot be connected; pass the environment on to the program, or call "
            "init(backend='self') for a world of this process alone"
        )


def _connects(launch: _launch.Launch | None) -> bool:
    """Return whether a launcher connects its processes by MPI, as far as the environment says."""
    if launch is None or launch.launcher != _launch.SRUN:
        return launch is not None
    # srun starts any program. Who says where the processes are to meet wants no MPI.
    return _launch.has_process_manager(os.environ) and not os.environ.get(_launch.ADDRESS)


def _needed(found: Numbering | None) -> Numbering:
    if found is None:
        raise BackendUnavailableError(
            f"init: backend 'processes' needs {_launch.ADDRESS}, as in {EXAMPLE}, the same on "
            f"every process, {_launch.NUMBER}, and {_launch.RANK}; or start the program with "
            "torchrun"
        )
    return found


def _refuse_contradiction(launch: _launch.Launch | None) -> None:
    """Raise if an MPI launcher and something else have numbered the processes differently."""
    variables = [_launch.NUMBER]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        variables.append(_launch.TORCHRUN[0])
    for variable in variables:
        said = os.environ.get(variable, "")
        if launch is not None and launch.size and said and said != str(launch.size):
            raise BackendUnavailableError(
                f"init: {launch.launcher} started {launch.size} process"
                f"{'es' if launch.size > 1 else ''}, but {variable} is {said}; start the program "
                f"by one of them, or unset {variable}"
            )


def open_world(start: Start, arguments: Arguments) -> Opened:
    """Open the group of all ranks; collective."""
    if start.backend in ("mpi", "nccl"):
        mpi_transport(seconds_of(arguments.timeout))
        from mpi4py import MPI

        refuse_other_launcher(_launch.detect(os.environ))
        return open_over_mpi(MPI.COMM_WORLD, arguments)
    if start.numbering is not None:
        return open_by_numbers(start.numbering, arguments)
    if start.backend == "threads":
        raise ValueError(
            "init: a world of threads is made by arraycomm.testing.run, which passes its "
            "communicator to your function"
        )
    return open_alone(arguments)


# Processes that this one belongs to, as libraries say, or variables that arraycomm ignores

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
        f"before init, set {_launch.ADDRESS}, as in {EXAMPLE}, to the same on every process, "
        f"{_launch.NUMBER} to {found.size}, and {_launch.RANK} to {rank}; or start the program "
        f"with: arraycomm run -n {found.size} …; or in place of init let torch use arraycomm: "
        "import arraycomm.adapters.torch_distributed, and call "
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
