"""Write the pages and charts of the benchmark from the stored figures; with --run, take them first."""

from __future__ import annotations

import argparse
import sys

from docs.studies.benchmarks.page import write
from docs.studies.benchmarks.runs import RUNS, take, take_mode


def main() -> int:
    """Run the benchmark if asked to, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m docs.studies.benchmarks", description=__doc__)
    parser.add_argument("--run", action="store_true", help="run the benchmark first")
    parser.add_argument("--seconds", default="1.2", help="time for each line of a table")
    arguments = parser.parse_args()
    failed = [run for run in RUNS if arguments.run and not take(run, arguments.seconds)]
    if arguments.run:
        take_mode("train", "20")
        take_mode("jax", "5")
    write()
    for run in failed:
        print(f"{run.title}: the benchmark failed", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
