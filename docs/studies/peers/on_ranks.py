"""Laws over one library, on the ranks of mpiexec; rank 0 writes down how each example ended.

`mpiexec -n 3 python -m docs.studies.peers.on_ranks mpi4py 30 record allgather_stacks bcast_copies` tries
laws until one has failed, whose traces the next one is not to find. `... mpi4py 1 record 'if op'` tries a
disagreement, of which each rank writes down how it ended.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import hypothesis

# Importing these takes longest, and arrays of NumPy have every layout and dtype.
_HIDDEN: Final = {"torch", "jax", "mlx", "cupy", "array_api_strict"}
# Seconds that a rank waits for another in an example.
_PATIENCE: Final = 15.0
# Seconds after which a rank whose call has not returned counts as waiting for ever.
_FOR_EVER: Final = 4.0


def main(library: str, examples: int, record: Path, *laws: str) -> None:
    """Try laws on as many examples, or a disagreement."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _take_few(examples)
    _hide_frameworks()
    from mpi4py import MPI

    over = _LIBRARIES[library](MPI.COMM_WORLD, record)
    if laws[0].startswith("if "):
        _disagree(laws[0][3:], over, record)
    recording = Recording(MPI.COMM_WORLD, record, smallest=_SMALLEST.get(library, 1))
    for law in laws:
        recording.begin(law)
        _suite(recording, over, law)()
        if MPI.COMM_WORLD.bcast(recording.end()):
            break


def _end_with(parent: int) -> None:
    """End this process with its launcher, also where it is stuck in a call of a library."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _suite(recording: Recording, over: Callable[..., Any], law: str) -> Callable[[], None]:
    """Return a law over a library."""
    from arraycomm.testing.conformance import Conformance
    from docs.studies.peers.wrapper import Wrapper

    class Suite(Conformance):
        def _group(self) -> Any:
            return recording

        def subject(self, comm: Any) -> Any:
            return Wrapper(over(comm, recording.is_anew(comm)))

    found: Callable[[], None] = getattr(Suite(), f"test_{law}")
    return found


def _take_few(examples: int) -> None:
    hypothesis.settings.register_profile(
        "peers",
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[hypothesis.Phase.generate],
    )
    hypothesis.settings.load_profile("peers")


def _hide_frameworks() -> None:
    find = importlib.util.find_spec

    def find_others(name: str, package: str | None = None) -> Any:
        return None if name in _HIDDEN else find(name, package)

    importlib.util.find_spec = find_others


class Recording:
    """Ranks on which no example fails, since rank 0 writes down how it ended."""

    def __init__(self, world: Any, record: Path, smallest: int = 1) -> None:
        from arraycomm._communicator import Communicator
        from arraycomm.testing._ranks.rank_groups import lockstep_over

        self._inner = lockstep_over(Communicator.from_mpi(world, timeout=60.0))
        self._smallest, self._record = smallest, record
        self.rank, self.size, self.usual = self._inner.rank, self._inner.size, self._inner.usual
        self.name = self._inner.name
        self.meet, self.finish = self._inner.meet, self._inner.finish
        self._own = record.with_name(f"{record.name}-failed-{self.rank}")
        # The numbers of ranks of which the last example has failed on this rank.
        self._failed_of: set[int] = set()

    def begin(self, law: str) -> None:
        """Begin with a law."""
        self._failed = False
        self._write({"law": law})

    def end(self) -> bool:
        """Return whether the law has failed."""
        self._write({"done": True})
        return self._failed

    def _write(self, line: dict[str, Any]) -> None:
        if self.rank == 0:
            with self._record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def is_anew(self, comm: Any) -> bool:
        """Return whether the last example of these ranks has failed, so that the next needs anew what it uses."""
        failed = comm.size in self._failed_of
        self._failed_of.discard(comm.size)
        return bool(comm.allreduce(failed, "or"))

    def follow(self, test: Any) -> None:
        """Run the examples that rank 0 sends."""
        self._inner.follow(self._noted(test))

    def _noted(self, test: Any) -> Any:
        def noted(comm: Any, **arguments: Any) -> Any:
            size = comm.size
            self._own.unlink(missing_ok=True)
            try:
                return test(comm=comm, **arguments)
            except BaseException as error:
                self._failed_of.add(size)
                # Other ranks may wait for this one for ever.
                self._own.write_text(json.dumps(_outcome([error])), encoding="utf-8")
                raise

        return noted

    def run(self, example: Any, test: Any, draw: Any) -> list[Any]:
        """Run an example, and say that each rank has passed."""
        from arraycomm.testing._hypothesis import ends_example

        if example.size < self._smallest:
            hypothesis.reject()
        self._write({"begun": example.call[:300], "size": example.size})
        parts = self._inner.run(example._replace(timeout=_PATIENCE), self._noted(test), draw)
        errors = [part.error for part in parts if part.error is not None]
        if not any(map(ends_example, errors)):
            ended = _outcome(errors)
            self._failed |= ended["outcome"] in ("wrong", "timed out", "error")
            self._write(ended)
            for part in parts:
                part.error = None
        return parts


# From the most to the least telling.
OUTCOMES: Final = ("wrong", "other bits", "timed out", "error", "not offered", "right")


def _outcome(errors: list[Any]) -> dict[str, Any]:
    """Return how an example ended, and what was said of it."""
    if not errors:
        return {"outcome": "right"}
    kinds = [(OUTCOMES.index(_kind(error)), number) for number, error in enumerate(errors)]
    kind, number = min(kinds)
    error = errors[number]
    return {"outcome": OUTCOMES[kind], "said": f"{type(error).__name__}: {error}"[:400]}


def _kind(error: BaseException) -> str:
    from arraycomm.testing.conformance._checks import OtherBitsError
    from docs.studies.peers.wrapper import NotOfferedError

    if isinstance(error, OtherBitsError):
        return "other bits"
    if isinstance(error, AssertionError):
        return "wrong"
    if isinstance(error, (NotOfferedError, unittest.SkipTest)):
        return "not offered"
    # Gloo waits for a time.
    return "timed out" if "Timed out" in str(error) else "error"


# Libraries: each function returns one that returns this rank's part in an example.


def _over_mpi4py(world: Any, record: Path) -> Callable[..., Any]:
    from mpi4py import MPI

    from docs.studies.peers.over_mpi4py import Mpi4py

    def over(comm: Any, anew: bool) -> Any:
        # The next example is not to get what this one leaves.
        own = comm.mpi_comm.Dup()
        own.Set_errhandler(MPI.ERRORS_RETURN)
        return Mpi4py(own)

    return over


def _over_gloo(world: Any, record: Path) -> Callable[..., Any]:
    import torch.distributed as dist

    from docs.studies.peers.over_gloo import Gloo

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = world.bcast(free.getsockname()[1])
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    groups: dict[int, Any] = {}

    def over(comm: Any, anew: bool) -> Any:
        if anew or comm.size not in groups:
            groups[comm.size] = Gloo(list(range(comm.size)))
        return groups[comm.size]

    return over


def _over_mlx(world: Any, record: Path) -> Callable[..., Any]:
    os.environ["MLX_RANK"] = str(world.rank)
    import mlx.core as mx

    from docs.studies.peers.over_mlx import Mlx

    group = mx.distributed.init(strict=True, backend="ring")
    return lambda comm, anew: Mlx(group)


def _over_arraycomm(world: Any, record: Path) -> Callable[..., Any]:
    from docs.studies.peers.over_arraycomm import Arraycomm

    return lambda comm, anew: Arraycomm(comm)


# The ranks of an example at least: MLX has no groups, and a new one of gloo is a call of all processes.
_SMALLEST: Final = {"gloo": 3, "mlx": 3}
_LIBRARIES: Final = {
    "mpi4py": _over_mpi4py,
    "gloo": _over_gloo,
    "mlx": _over_mlx,
    "arraycomm": _over_arraycomm,
}


def _disagree(kind: str, over: Callable[..., Any], record: Path) -> NoReturn:
    """Let rank 1 do something else than the others; each rank writes down how it ended."""
    import numpy as np
    from mpi4py import MPI

    from arraycomm._communicator import Communicator
    from arraycomm.testing.conformance._failures import DISAGREEMENTS
    from docs.studies.peers.wrapper import Wrapper

    rank = MPI.COMM_WORLD.rank
    own = record.with_name(f"{record.name}-{rank}")
    comm = Wrapper(over(Communicator.from_mpi(MPI.COMM_WORLD), True))
    x = np.ones(5_000, np.float32)
    usual, other = DISAGREEMENTS.get(kind) or (DISAGREEMENTS["op"][0], _OTHERS[kind])
    comm.allreduce(x)
    threading.Thread(target=_give_up, args=(own,), daemon=True).start()
    try:
        (other if rank == 1 else usual)(comm, x)
    except Exception as error:
        said = f"error {type(error).__name__}: {error}"[:300]
    else:
        said = "returned"
    # Who has waited for so long may hear of the end of others.
    if not own.exists():
        own.write_text(said, encoding="utf-8")
    if kind == "leaves" and rank == 1:
        sys.exit()
    # No rank may end while another still waits: it would be the end of the other's job.
    time.sleep(_FOR_EVER + 1)
    os._exit(0)


_OTHERS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "leaves": lambda comm, x: None,
    "raises": lambda comm, x: comm.allreduce(x, "average"),
}


def _give_up(own: Path) -> None:
    time.sleep(_FOR_EVER)
    if not own.exists():
        own.write_text("waits", encoding="utf-8")
    time.sleep(2)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
