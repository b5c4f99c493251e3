"""Write docs/scaling.md and its figure; with --measure, take the measurements first."""

from __future__ import annotations

import argparse
import json

from docs.studies.scaling.measure import measure
from docs.studies.scaling.page import FIGURE, MEASURED, PAGE, drawn, stored, written


def main() -> None:
    """Measure if asked to, and write the page and the figure."""
    parser = argparse.ArgumentParser(prog="python -m docs.studies.scaling", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="repeat the measurements")
    if parser.parse_args().measure:
        MEASURED.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    results = stored()
    PAGE.write_text(written(results), encoding="utf-8")
    FIGURE.write_text(drawn(results), encoding="utf-8")


if __name__ == "__main__":
    main()
