"""docs/evidence/peers.md: what each library came to when the script last ran."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from docs.studies.peers.laws import ANY_LIBRARY, DISAGREEMENTS, OF_ARRAYCOMM

PAGE: Final = Path(__file__).resolve().parents[2] / "evidence" / "peers.md"
RESULTS: Final = Path(__file__).with_name("results.json")
TEXT: Final = Path(__file__).with_name("page.txt")

# By the name of a run: the heading of its column.
COLUMNS: Final = {
    "arraycomm": "arraycomm",
    "mpi4py-mpich": "mpi4py, MPICH",
    "mpi4py-openmpi": "mpi4py, Open MPI",
    "gloo": "torch, gloo",
    "mlx": "MLX, ring",
}
_WORDS: Final = {
    "wrong": "wrong",
    "other bits": "other bits",
    "timed out": "timed out",
    "error": "refused",
}


def stored() -> dict[str, Any]:
    """Return what each run has found."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def written(results: Mapping[str, Any]) -> str:
    """Return the whole page."""
    text = TEXT.read_text(encoding="utf-8")
    tables = {
        "VERSIONS": _versions(results),
        "ANY": _table("law", ANY_LIBRARY, results, "laws", _of_law),
        "OWN": _table("law", OF_ARRAYCOMM, results, "laws", _of_law),
        "DISAGREEMENTS": _table(
            "rank 1 makes", tuple(DISAGREEMENTS), results, "disagreements", _of_disagreement
        ),
    }
    for name, table in tables.items():
        text = text.replace(f"@{name}@\n", table)
    return text


def _columns(results: Mapping[str, Any]) -> dict[str, str]:
    return {run: heading for run, heading in COLUMNS.items() if run in results}


def _versions(results: Mapping[str, Any]) -> str:
    said = []
    for run, heading in _columns(results).items():
        found = results[run]["versions"]
        names = [f"{name} {value}" if name != "MPI" else value for name, value in found.items()]
        said.append(f"- {heading}: {', '.join(names)}\n")
    return "".join(said) + "\n"


def _table(head: str, rows: Sequence[str], results: Mapping[str, Any], part: str, cell: Any) -> str:
    lines = [(head, *_columns(results).values()), ("---",) * (1 + len(_columns(results)))]
    for row in rows:
        cells = [cell(results[run][part].get(row), row) for run in _columns(results)]
        lines.append((DISAGREEMENTS.get(row) or row.replace("_", " "), *cells))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def _of_law(found: Mapping[str, Any] | None, law: str = "") -> str:
    """Say how many examples came to what, unless all were right."""
    if found is None:
        return "–"
    counts = dict(found["counts"])
    tried = sum(counts.values())
    right, lacking = counts.pop("right", 0), counts.pop("not offered", 0)
    said = [f"{counts[kind]} {word}" for kind, word in _WORDS.items() if kind in counts]
    if found["ended"] != "well":
        said.append(_end_of(found))
    elif not right and not said:
        return "not offered"
    if not said:
        return "holds" if not lacking else f"holds ({lacking} of {tried} not offered)"
    return f"**{', '.join(said)}** of {tried + (found['ended'] != 'well')}"


def _end_of(found: Mapping[str, Any]) -> str:
    if found["ended"] == "crash":
        return "dies"
    waited_for = found.get("waited_for")
    return "hangs" if waited_for is None else f"hangs after 1 {_WORDS[waited_for]}"


def _of_disagreement(found: Sequence[str] | None, kind: str = "") -> str:
    """Say how the ranks ended."""
    if found is None:
        return "–"
    # What rank 1 is to raise is not counted.
    if any("NotOffered" in said and "average" not in said for said in found):
        return "not offered"
    kinds = [said.split()[0] for said in found]
    if kind == "leaves":
        # Rank 1 makes no call.
        kinds[1] = ""
    if set(kinds) == {"error", ""}:
        return "error on the others"
    if set(kinds) == {"error"}:
        return "error on every rank"
    if set(kinds) == {"returned"}:
        return "**no error**"
    said = []
    for ending, words in _ENDS.items():
        ranks = [str(rank) for rank, own in enumerate(kinds) if own == ending]
        if ranks:
            said.append(f"{words} on {', '.join(ranks)}")
    return f"**{'; '.join(said)}**"


_ENDS: Final = {"error": "error", "returned": "no error", "waits": "hangs", "died": "crash"}
