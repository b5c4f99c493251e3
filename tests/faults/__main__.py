"""Run many programs, and print what came of them."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.faults.judge import Verdict

OUTCOMES = (
    *("right", "argument error", "MismatchError", "PeerError", "DeadlockError"),
    *("CommTimeoutError", "job ended", "left alone"),
)


class Summary:
    """What came of programs, counted."""

    def __init__(self, again: str) -> None:
        # The end of the command line that plays a program once more.
        self._again = again
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: list[Verdict] = []
        self.slowest: dict[str, float] = defaultdict(float)
        self.mismatch_seconds = 0.0
        self.programs = self.wrong_numbers = self.hangs = self.left_processes = 0
        self.left_files = 0

    def add(self, verdict: Verdict) -> None:
        """Count a program, and show at once what is wrong with it."""
        kind = verdict.program.kind
        self.programs += 1
        self.outcomes[kind][verdict.outcome] += 1
        self.slowest[kind] = max(self.slowest[kind], verdict.seconds)
        self.mismatch_seconds = max(self.mismatch_seconds, verdict.mismatch_seconds)
        self.wrong_numbers += verdict.wrong_numbers
        self.hangs += verdict.hangs
        self.left_processes += verdict.left_processes
        self.left_files += verdict.left_files
        if verdict.wrong:
            self.failed.append(verdict)
            part = f" --part {verdict.part}" if verdict.part else ""
            again = f"--programs 1 --seed {verdict.program.seed}{part}{self._again}"
            print(f"{verdict.program.text}: {'; '.join(verdict.wrong)}")
            print(f"again: python -m tests.faults {again}", flush=True)

    def table(self) -> str:
        """Return all of it as a table in Markdown."""
        shown = [o for o in OUTCOMES if any(counts[o] for counts in self.outcomes.values())]
        lines = [
            f"| deviation | programs | {' | '.join(shown)} | slowest, s |",
            "|---" + "|---:" * (len(shown) + 2) + "|",
        ]
        for kind in sorted(self.outcomes):
            counts = self.outcomes[kind]
            cells = " | ".join(str(counts[o] or "") for o in shown)
            lines.append(f"| {kind} | {counts.total()} | {cells} | {self.slowest[kind]:.1f} |")
        totals = " | ".join(str(sum(c[o] for c in self.outcomes.values())) for o in shown)
        lines.append(f"| all | {self.programs} | {totals} | {max(self.slowest.values()):.1f} |")
        return "\n".join(lines)

    def verdict(self) -> str:
        """Return what must be nothing, in one line."""
        return (
            f"hangs: {self.hangs}; wrong numbers: {self.wrong_numbers}; left processes: "
            f"{self.left_processes}; left files: {self.left_files}; not as promised: {len(self.failed)}; slowest MismatchError: "
            f"{self.mismatch_seconds * 1000:.0f} ms"
        )


def main() -> int:
    """Run what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--transport", choices=("threads", "mpich", "openmpi"), default="threads")
    parser.add_argument("--control", choices=("shared", "messages"), default="shared")
    parser.add_argument("--kinds", nargs="*", help="deviations to draw from")
    parser.add_argument("--part", choices=("together", "alone"), default="")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, for threads")
    parser.add_argument("--show", action="store_true", help="print the programs that failed")
    arguments = parser.parse_args()
    again = f" --transport {arguments.transport} --control {arguments.control}"
    summary = Summary(
        again + (f" --kinds {shlex.join(arguments.kinds)}" if arguments.kinds else "")
    )
    for verdict in _verdicts(arguments):
        summary.add(verdict)
    if arguments.show:
        for failed in summary.failed:
            print(failed.program)
    print(summary.table())
    print(summary.verdict())
    return 1 if summary.failed else 0


def _verdicts(arguments: argparse.Namespace) -> Iterator[Verdict]:
    seeds = range(arguments.seed, arguments.seed + arguments.programs)
    if arguments.transport == "threads":
        from tests.faults import on_threads

        kinds = tuple(arguments.kinds or on_threads.KINDS)
        return on_threads.run_programs(seeds, kinds, arguments.jobs)
    from tests.faults import on_mpi

    return on_mpi.run_programs(
        seeds, arguments.transport, arguments.control, arguments.kinds, arguments.part
    )


if __name__ == "__main__":
    sys.exit(main())
