"""Write docs/scaling.md and its figure; --measure and --simulate take their numbers anew first."""

from __future__ import annotations

import argparse
import json

from docs.studies.scaling.large import cluster
from docs.studies.scaling.measure import measure
from docs.studies.scaling.page import FIGURE, MEASURED, PAGE, SIMULATED, drawn, stored, written
from docs.studies.scaling.real import simulate


def main() -> None:
    """Measure and simulate if asked to, and write the page and the figure."""
    parser = argparse.ArgumentParser(prog="python -m docs.studies.scaling", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="repeat the measurements")
    parser.add_argument("--simulate", action="store_true", help="repeat the simulation")
    wanted = parser.parse_args()
    if wanted.measure:
        MEASURED.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    results = stored()
    if wanted.simulate:
        calls = simulate(cluster(results, 1))
        SIMULATED.write_text(json.dumps(calls, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(results), encoding="utf-8")
    FIGURE.write_text(drawn(results), encoding="utf-8")


if __name__ == "__main__":
    main()
