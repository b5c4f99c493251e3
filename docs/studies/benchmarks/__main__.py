"""Write the pages and charts of the benchmark from the stored figures; with --run, take them first."""

from __future__ import annotations

import argparse
import sys

from docs.studies.benchmarks.page import write
from docs.studies.benchmarks.runs import (
    RUNS,
    take,
    take_adapters,
    take_floors,
    take_messages,
    take_overlap,
    take_programs,
    take_training,
)


def main() -> int:
    """Run the benchmark if asked to, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m docs.studies.benchmarks", description=__doc__)
    parser.add_argument("--run", action="store_true", help="run the benchmark first")
    parser.add_argument("--seconds", default="1.2", help="time for each line of a table")
    arguments = parser.parse_args()
    failed = [run for run in RUNS if arguments.run and not take(run, arguments.seconds)]
    if arguments.run:
        for run in RUNS:
            take_floors(run)
        take_overlap()
        take_training("20")
        take_programs("5")
        take_adapters("6")
        take_messages("2")
    write()
    for run in failed:
        print(f"{run.title}: the benchmark failed", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
