"""Programs on ranks that are threads of this process."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from multiprocessing import get_context
from typing import Final

from arraycomm import Communicator
from arraycomm.testing import run
from tests.faults import optimizers
from tests.faults.deviations import DEVIATIONS, OF_PROCESSES, draw
from tests.faults.judge import LIMIT, Verdict, judge
from tests.faults.play import ReleasedError, Trace, play
from tests.faults.simulation import stuck, timeout_of

KINDS: Final = tuple(kind for kind in DEVIATIONS if kind not in OF_PROCESSES)
# Seconds; the short one where some wait for ever, the long one to show who should not have waited.
SHORT: Final = 0.6
LONG: Final = 20.0


def run_programs(seeds: Sequence[int], kinds: tuple[str, ...], jobs: int = 1) -> Iterator[Verdict]:
    """Run programs, in this many processes at once: most of the time somebody only waits."""
    if jobs == 1:
        yield from (run_program(seed, kinds) for seed in seeds)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        yield from pool.map(partial(run_program, kinds=kinds), seeds, chunksize=20)


def run_program(seed: int, kinds: tuple[str, ...] = KINDS) -> Verdict:
    """Run the program of a number, and judge what came of it."""
    program = draw(seed, kinds)
    optimizers.preload(program)
    traces = [Trace() for _ in range(program.size)]
    sleeping = sum(a.kind == "sleep" for actions in program.actions for a in actions)
    waits = stuck(program)
    timeout = timeout_of(program, waits, SHORT, LONG)
    ended = threading.Semaphore(0)

    def rest() -> None:
        for _ in range(program.size - sleeping):
            if not ended.acquire(timeout=LONG):
                break
        raise ReleasedError

    def body(comm: Communicator) -> None:
        try:
            play(comm, program, traces[comm.rank], rest)
        finally:
            ended.release()

    before = threading.active_count()
    started = time.monotonic()
    raised: BaseException | None = None
    # What the ranks print is no part of what this process does.
    with redirect_stdout(io.StringIO()):
        try:
            run(program.size, body, timeout=timeout)
        except BaseException as error:
            raised = error
    seconds = time.monotonic() - started
    verdict = judge(program, traces, waits)
    if program.kind == "lost error" and raised is None:
        verdict.wrong.append("nobody tells of the error of a request")
    verdict.seconds = seconds
    if seconds > (timeout if waits else 0) + LIMIT:
        verdict.hangs += 1
        verdict.wrong.append(f"it took {seconds:.1f} s")
    verdict.left_processes = _left(before)
    if verdict.left_processes:
        verdict.wrong.append(f"{verdict.left_processes} threads are left")
    return verdict


def _left(before: int, patience: float = 2.0) -> int:
    """Return how many threads are left, after those that are about to end have ended."""
    deadline = time.monotonic() + patience
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(1e-3)
    return max(threading.active_count() - before, 0)
