"""Write docs/evidence/peers.md; with --try, try the laws on the libraries of this environment first."""

from __future__ import annotations

import argparse
import json

from docs.studies.peers import page, runs


def main() -> None:
    """Try what is asked for, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m docs.studies.peers", description=__doc__)
    parser.add_argument(
        "--try",
        nargs="+",
        default=(),
        choices=list(page.COLUMNS),
        dest="runs",
        metavar="COLUMN",
        help=f"columns to try again: {', '.join(page.COLUMNS)}; mpi4py's in the environment of that MPI",
    )
    parser.add_argument("--examples", type=int, default=runs.EXAMPLES)
    arguments = parser.parse_args()
    for run in arguments.runs:
        library = run.partition("-")[0]
        found = {
            "versions": runs.versions(library),
            "laws": runs.try_laws(library, arguments.examples),
            "disagreements": runs.try_disagreements(library),
        }
        known = page.stored() if page.RESULTS.exists() else {}
        known[run] = found
        page.RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    page.PAGE.write_text(page.written(page.stored()), encoding="utf-8")


if __name__ == "__main__":
    main()
