"""The charts of docs/benchmarks.md and README.md, from the stored figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from arraycomm.cli.bench.results import size_text
from arraycomm.cli.bench.timing import ratio
from docs.studies.benchmarks.claims import CLAIMS, Claim, Entry
from docs.studies.benchmarks.report import find
from docs.studies.benchmarks.results import Line
from docs.studies.figure import Axis, Bar, Curve, Panel, bars, figure

# Beyond it, a bar would make the others too short to read.
MOST: Final = 2.0
RATIOS: Final = "arraycomm's time ÷ the other's, 2 ranks; left of the dashes it is faster"
UNITS: Final = (("MB", 1e6), ("kB", 1e3), ("B", 1.0))
STYLES: Final = {"out": "own", "mpi4py": "mpi4py", "gloo": "gloo"}
LEGEND: Final = (
    ("own", "arraycomm, allreduce(x, out=y)"),
    ("mpi4py", "mpi4py, Allreduce(x, y)"),
    ("gloo", "gloo, all_reduce(x)"),
)
PANELS: Final = (
    ("float32", "numpy"),
    ("float32", "torch"),
    ("float16", "numpy"),
    ("bfloat16", "torch"),
)
LIBRARIES: Final = {"numpy": "NumPy", "torch": "torch"}
FRAMEWORKS: Final = {"numpy": "NumPy arrays", "torch": "torch tensors"}
# What else the bars show: a step of training, and a call inside a compiled program.
MODES: Final = (
    ("train", "training step, {}, beside DDP", ("torch", "step"), ("torch", "ddp")),
    ("jax", "jax.jit, {}, beside mpi4jax", ("jax", "jit"), ("jax", "mpi4jax")),
)


def ratios(results: dict[str, Any]) -> str:
    """Return the chart of the goals: how long arraycomm takes beside the others, in one run."""
    return bars(RATIOS, list(_of_claims(results["lines"])), MOST)


def steps(figures: dict[str, dict[str, Any]]) -> str:
    """Return the same chart of training steps and of compiled programs."""
    drawn = [
        bar
        for mode, text, own, other in MODES
        for line in figures[mode]["lines"]
        for bar in _bar(line, text.format(line["model"]), own, other)
    ]
    return bars(RATIOS, drawn, MOST)


def by_size(results: dict[str, Any]) -> str:
    """Return the chart of times by size, of one run."""
    panels = [
        Panel(
            f"{dtype}, {FRAMEWORKS[framework]}",
            [
                Curve(style, points)
                for key, style in STYLES.items()
                if (points := list(_points(results["lines"], dtype, (framework, key))))
            ],
        )
        for dtype, framework in PANELS
    ]
    axis = Axis("bytes of each rank's array", _bytes)
    return figure("Time of an allreduce by the size of the array, 2 ranks", LEGEND, panels, axis)


def _bytes(size: float) -> str:
    unit, scale = next(u for u in UNITS if size >= u[1])
    return f"{size / scale:.0f} {unit}"


def _of_claims(lines: list[Line]) -> Iterator[Bar]:
    for claim in CLAIMS:
        text = f"{_amount(claim)}, {LIBRARIES[claim.own[0]]}, beside {claim.other[1]}"
        for line in lines:
            if claim.fits(line):
                yield from _bar(line, text, claim.own, claim.other)


def _amount(claim: Claim) -> str:
    if claim.tree is None:
        return f"{size_text(claim.nbytes)} of {claim.dtype}"
    return f"a tree of {claim.tree}" if claim.tree[0].isdigit() else f"gradients of {claim.tree}"


def _bar(line: Line, text: str, own: Entry, other: Entry) -> Iterator[Bar]:
    pair = find(line, *own), find(line, *other)
    if all(entry and entry["status"] == "ok" for entry in pair):
        yield Bar(text, ratio(*(entry["samples"] for entry in pair if entry)))


def _points(lines: list[Line], dtype: str, entry: Entry) -> Iterator[tuple[float, float]]:
    for line in lines:
        found = find(line, *entry)
        if line["dtype"] == dtype and not line.get("tree") and found and found["status"] == "ok":
            yield line["nbytes"], found["median"]
