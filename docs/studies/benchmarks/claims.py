"""The goals: which contender should take at most which part of another one's time?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from arraycomm.cli.bench.rows import nbytes_of
from docs.studies.benchmarks.results import Line
from docs.studies.benchmarks.trees import TREES

Entry = tuple[str, str]  # framework and contender


@dataclass(frozen=True, slots=True)
class Claim:
    """A goal: `own` takes at most `goal` of the time of `other`."""

    text: str
    goal: str
    dtype: str
    nbytes: int
    own: Entry
    other: Entry
    tree: str | None = None

    def fits(self, line: Line) -> bool:
        """Return whether a line of figures is of this dtype, size and tree."""
        about = (line["dtype"], line["nbytes"], line.get("tree"), line.get("call"))
        return about == (self.dtype, self.nbytes, self.tree, None)


CLAIMS: Final = (
    Claim(
        "8 bytes of float32, NumPy: `comm.allreduce(x, out=y)` against mpi4py's `Allreduce(x, y)`",
        *("at most 2", "float32", 8),
        *(("numpy", "out"), ("numpy", "mpi4py")),
    ),
    Claim(
        "8 bytes of float32, torch: the same with the same tensors",
        *("below 1", "float32", 8),
        *(("torch", "out"), ("torch", "mpi4py")),
    ),
    Claim(
        "64 MB of float32, NumPy: against mpi4py's `Allreduce(x, y)`",
        *("at most 1", "float32", 64 << 20),
        *(("numpy", "out"), ("numpy", "mpi4py")),
    ),
    Claim(
        "8 MB of float16, NumPy: against mpi4py's `Allreduce(x, y)`",
        *("below 0.25", "float16", 8 << 20),
        *(("numpy", "out"), ("numpy", "mpi4py")),
    ),
    Claim(
        "64 MB of bfloat16, torch: against gloo's `all_reduce(x)`",
        *("below 0.5", "bfloat16", 64 << 20),
        *(("torch", "out"), ("torch", "gloo")),
    ),
    *(
        Claim(
            f"a tree, {name}, NumPy: `plan(tree)` against one `Allreduce(x, y)` of mpi4py a leaf",
            *("at most 0.67", "float32", nbytes_of(TREES[name])),
            *(("numpy", "plan"), ("numpy", "mpi4py")),
            name,
        )
        for name in TREES
    ),
    *(
        Claim(
            f"a tree, {name}, torch: `plan(tree)` against one `all_reduce(x)` of gloo a leaf",
            *("at most 0.33", "float32", nbytes_of(TREES[name])),
            *(("torch", "plan"), ("torch", "gloo")),
            name,
        )
        for name in TREES
    ),
)
