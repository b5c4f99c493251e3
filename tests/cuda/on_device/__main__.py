"""Runs the tests that need a device within a limit, and goes on behind what fails or hangs: `make test-device`.

    python -m tests.cuda.on_device [--limit 900] [--out build/device] [--workers 4] [--jobs 2] [part ...]

A part is one run of pytest: the tests of one process, the programs that fail, or one file on 2 or on 4 ranks.
The parts come in the order of their worth. Each has a log under the folder `--out`, where summary.txt says what
became of all. The status is 0 if every part passed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path("tests/cuda/on_device")
PROGRAMS, LEAKS = "test_failures_on_device.py", "test_leaks.py"
# What moves data, and so differs with the number of ranks.
ON_RANKS = (
    "test_collectives.py",
    "test_stream_order.py",
    "test_nccl_collectives.py",
    "test_conformance_on_device.py",
)
# Seconds after which one test hangs, and after which what was asked to end is killed.
HANGING, GRACE = 90, 10


@dataclass
class Part:
    """One run of pytest, and what became of it."""

    name: str
    arguments: list[str]
    ranks: int = 1
    beside_others: bool = True
    outcome: str = "not run: the time was up"
    failed: list[str] = field(default_factory=list)
    passed: bool = False

    def command(self) -> list[str]:
        """Return the command that runs the part."""
        launcher = ["mpiexec", "-n", str(self.ranks)] if self.ranks > 1 else []
        pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rfE"]
        return [*launcher, *pytest, *self.arguments]


def parts(workers: int) -> list[Part]:
    """Return every part, in the order of their worth."""
    others = [f"--ignore={FOLDER / name}" for name in (PROGRAMS, LEAKS)]
    on_ranks = [
        Part(f"{Path(name).stem.removeprefix('test_')}-{ranks}", [str(FOLDER / name)], ranks)
        for ranks in (2, 4)
        for name in ON_RANKS
    ]
    two = len(ON_RANKS)
    return [
        Part("alone", ["-n", str(workers), "--max-worker-restart=99", *others, str(FOLDER)]),
        *on_ranks[:two],
        Part("programs", [str(FOLDER / PROGRAMS)]),
        *on_ranks[two:],
        # By itself: it measures what everyone has in use on the device.
        Part("leaks", [str(FOLDER / LEAKS)], beside_others=False),
    ]


def run(part: Part, out: Path, ends: float) -> None:
    """Run a part until the time `ends` at most, and note how pytest ended, and the tests that failed."""
    if (left := ends - time.monotonic()) < GRACE:
        return
    log = out / f"{part.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            part.command(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TESTS_HANG_AFTER": str(HANGING), "COLUMNS": "300"},
            start_new_session=True,
        )
        try:
            status = process.wait(left - GRACE)
        except subprocess.TimeoutExpired:
            # By Ctrl-C, so that pytest still reports; its launcher ends the ranks.
            process.send_signal(signal.SIGINT)
            part.failed = ["cut off by the time: its last test had not ended"]
            try:
                status = process.wait(GRACE / 2)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
    lines = log.read_text(errors="replace").splitlines()
    part.failed += [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    part.passed = status in (0, 5) and not part.failed
    part.outcome = f"{lines[-1] if lines else 'said nothing'}, status {status}"


def summary(done: list[Part]) -> Iterator[str]:
    """Yield the lines that say what became of all parts."""
    for part in done:
        yield f"{part.name:28} {part.outcome}"
        yield from (f"    {line[:200]}" for line in part.failed[:20])
    yield "every part passed" if all(part.passed for part in done) else "FAILED"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.on_device")
    parser.add_argument("part", nargs="*", help="names of parts; all by default")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path("build/device"))
    parser.add_argument("--workers", type=int, default=4, help="processes of the part `alone`")
    parser.add_argument("--jobs", type=int, default=1, help="parts that run at the same time")
    given = parser.parse_args()
    ends = time.monotonic() + given.limit
    every = parts(given.workers)
    names = [part.name for part in every]
    if unknown := [name for name in given.part if name not in names]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(names)}")
    chosen = [part for part in every if part.name in (given.part or names)]
    given.out.mkdir(parents=True, exist_ok=True)
    for jobs, beside_others in ((given.jobs, True), (1, False)):
        together = [part for part in chosen if part.beside_others == beside_others]
        with ThreadPoolExecutor(jobs) as pool:
            for running in [pool.submit(run, part, given.out, ends) for part in together]:
                running.result()
                (given.out / "summary.txt").write_text("\n".join(summary(chosen)) + "\n")
    print(*summary(chosen), sep="\n")
    return 0 if all(part.passed for part in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
