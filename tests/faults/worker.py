"""One rank of an MPI job that plays programs: many, one after the other, or one that may end the job."""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import gc
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from mpi4py import MPI

import arraycomm as ac
from arraycomm import Communicator
from tests.faults import disturbances, optimizers
from tests.faults.deviations import draw
from tests.faults.judge import LIMIT, judge
from tests.faults.play import ReleasedError, Trace, play
from tests.faults.programs import Program
from tests.faults.simulation import stuck, timeout_of
from tests.support import internals

# Seconds; the short one where some wait for ever, the long one to show who should not have waited.
SHORT: Final = 1.5
LONG: Final = 30.0
# Those for which one rank works on after the others have ended: longer than they wait for who knows of nothing.
WORKS: Final = 4.0
# How many programs in a row use torch, of four times as many: it takes long to load.
_SEEDS_OF_TORCH: Final = 50


def main() -> None:
    """Play what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--kinds", nargs="+", required=True)
    parser.add_argument("--control", default="shared")
    parser.add_argument(
        "--alone", type=Path, help="where each rank writes what came of its actions"
    )
    parser.add_argument(
        "--handles", action="store_true", help="errors are handled, and one rank works on"
    )
    arguments = parser.parse_args()
    disturbances.map_arrays()
    faulthandler.register(disturbances.SHOW_STACK, all_threads=True)
    if arguments.control == "messages":
        internals.refuse_shared_memory()
    if arguments.alone:
        program = draw(arguments.seeds[0], tuple(arguments.kinds))
        if arguments.handles:
            _play_and_go_on(program, arguments.alone)
        else:
            _play_alone(program, arguments.alone)
    else:
        _play_together(arguments.seeds, tuple(arguments.kinds))


def _play_alone(program: Program, folder: Path) -> None:
    """Play the only program of a job; what is raised is not handled."""
    optimizers.spare_torch(program)
    optimizers.preload(program)
    world = ac.init(timeout=timeout_of(program, stuck(program), SHORT, LONG))
    with (folder / str(world.rank)).open("w") as lines:

        def tell(said: dict[str, Any]) -> None:
            lines.write(json.dumps(said) + "\n")
            lines.flush()

        tell({"pid": os.getpid()})

        def rest() -> None:
            time.sleep(SHORT + LIMIT)
            raise ReleasedError

        play(world, program, Trace(tell=tell), rest)


def _play_and_go_on(program: Program, folder: Path) -> None:
    """Play the only program of a job, handle what is raised, and leave the rest to the end of Python."""
    # As in programs of users: with it, Python would not close a file that a module holds.
    atexit.unregister(gc.freeze)
    atexit.register((folder / f"registered-{os.getpid()}").write_text, DONE)
    with suppress(ac.ArrayCommError):
        _play_alone(program, folder)
    rank = ac.world().rank
    left_open = (folder / f"left-{rank}").open("w")
    left_open.write(DONE)
    _LEFT.append(left_open)
    if rank == program.seed % program.size:
        time.sleep(WORKS)


# What a rank writes at its end; and what it leaves open then.
DONE: Final = "done"
_LEFT: Final[list[Any]] = []


def _play_together(seeds: list[int], kinds: tuple[str, ...]) -> None:
    """Play many programs, each on a communicator of its own; what is raised is handled."""
    world = ac.init(timeout=LONG)
    control = MPI.COMM_WORLD.Dup()
    groups = {size: world.split(0 if world.rank < size else None) for size in range(2, 6)}
    programs = [draw(seed, kinds) for seed in seeds]
    for program in programs:
        if program.seed // _SEEDS_OF_TORCH % 4:
            optimizers.spare_torch(program)
        optimizers.preload(program)
    for program in programs:
        waits = stuck(program, tells_return=False)
        trace, group, began = Trace(), groups[program.size], time.monotonic()
        if group is not None:
            timeout = timeout_of(program, waits, SHORT, LONG)
            _take_part(world, group, program, trace, control, timeout)
        _meet(control)
        seconds = time.monotonic() - began
        trace.tell = _nothing
        traces = control.gather(trace)
        if traces is not None:
            verdict = judge(program, traces[: program.size], waits, tells_return=False)
            if seconds > (timeout_of(program, waits, SHORT, LONG) if waits else 0) + LIMIT:
                verdict.hangs += 1
                verdict.wrong.append(f"it took {seconds:.1f} s")
            said = asdict(verdict) | {"program": program.seed, "seconds": seconds}
            print(json.dumps(said), flush=True)
    # What was given up, and handled, is no failure.
    unseen = any(map(internals.has_unseen_error, internals.related(world)))
    everyone = control.gather(unseen)
    if everyone is not None:
        print(json.dumps({"unseen": any(everyone)}), flush=True)


def _nothing(said: dict[str, Any]) -> None:
    pass


def _take_part(
    world: Communicator,
    group: Communicator,
    program: Program,
    trace: Trace,
    control: MPI.Intracomm,
    timeout: float,
) -> None:
    tag = program.seed % 10_000
    made_before = len(internals.related(world))
    comm = group.dup(timeout=timeout)
    _meet_few(control, program.size)

    def rest() -> None:
        for _ in range(program.size - 1):
            while not control.Iprobe(MPI.ANY_SOURCE, tag):
                time.sleep(1e-3)
            control.recv(None, MPI.ANY_SOURCE, tag)
        raise ReleasedError

    error: BaseException | None = None
    try:
        play(comm, program, trace, rest)
    except BaseException as raised:
        error = raised
    if program.kind == "sleep" and comm.rank != program.rank:
        control.send(None, program.rank, tag)
    made = internals.related(world)[made_before:]
    if error is not None:
        for member in made:
            internals.leave_by_error(member, error)
    if _all_returned(control, program.size, trace.returned):
        for member in reversed(made):
            internals.free(member)


def _all_returned(control: MPI.Intracomm, size: int, returned: bool) -> bool:
    """Return whether all ranks of a program came to its end; the others do not take part."""
    _meet_few(control, size)
    others = [rank for rank in range(size) if rank != control.rank]
    said = [control.sendrecv(returned, rank, 0, None, rank, 0) for rank in others]
    return returned and all(said)


def _meet_few(control: MPI.Intracomm, size: int) -> None:
    """Wait for the first ranks of the job, and leave the cores to those that are not there yet."""
    others = [rank for rank in range(size) if rank != control.rank]
    sends = [control.isend(None, rank, 20_000) for rank in others]
    for rank in others:
        while not control.Iprobe(rank, 20_000):
            time.sleep(1e-4)
        control.recv(None, rank, 20_000)
    MPI.Request.Waitall(sends)


def _meet(control: MPI.Intracomm) -> None:
    """Wait for all ranks of the job, and leave the cores to those that are not there yet."""
    request = control.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
