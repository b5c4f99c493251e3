"""Write docs/benchmarks.md from the figures in docs/benchmarks/; with --run, take them first."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from arraycomm.cli.bench_report import Line, complaints, find, tables
from arraycomm.cli.bench_tables import Table, as_markdown, number_text, ratio_text
from arraycomm.cli.bench_timing import ratio
from arraycomm.cli.bench_trees import TREES
from arraycomm.cli.overlap import overlap_table

DOCS: Final = Path(__file__).resolve().parent
ROOT: Final = DOCS.parent
FIGURES: Final = DOCS / "benchmarks"
PAGE: Final = DOCS / "benchmarks.md"


@dataclass(frozen=True, slots=True)
class Run:
    """One job of the benchmark: its name, its environment, its ranks, and its other arguments."""

    name: str
    title: str
    environment: str
    ranks: int
    arguments: tuple[str, ...]


RUNS: Final = (
    Run(
        *("mpich-2", "MPICH, 2 ranks", ".venv", 2),
        ("--dtypes", "float32,bfloat16,float16", "--frameworks", "numpy,torch,jax"),
    ),
    Run(
        *("mpich-4", "MPICH, 4 ranks", ".venv", 4),
        ("--dtypes", "float32,bfloat16", "--frameworks", "numpy,torch"),
    ),
    Run(
        *("openmpi-2", "Open MPI, 2 ranks", ".venv-openmpi", 2),
        ("--dtypes", "float32,bfloat16", "--frameworks", "numpy,torch"),
    ),
)

Place = tuple[str, str]  # framework and contender


@dataclass(frozen=True, slots=True)
class Claim:
    """A goal: `own` takes at most `goal` of the time of `other`."""

    text: str
    goal: str
    dtype: str
    nbytes: int
    own: Place
    other: Place
    tree: str | None = None


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
            *("at most 0.67", "float32", TREES[name].nbytes),
            *(("numpy", "plan"), ("numpy", "mpi4py")),
            name,
        )
        for name in TREES
    ),
    *(
        Claim(
            f"a tree, {name}, torch: `plan(tree)` against one `all_reduce(x)` of gloo a leaf",
            *("at most 0.33", "float32", TREES[name].nbytes),
            *(("torch", "plan"), ("torch", "gloo")),
            name,
        )
        for name in TREES
    ),
)

INTRODUCTION: Final = """\
# Benchmarks

How long `allreduce` with `op="sum"` takes in arraycomm, in mpi4py's `Allreduce`, and in gloo, the
CPU backend of `torch.distributed`; and how long trees of arrays take, as the gradients of two models. The figures are of one small machine, and those of another will
differ; run the benchmark on yours:

```sh
mpiexec -n 2 python -m arraycomm bench
mpiexec -n 2 python -m arraycomm bench latency --sizes 8,1024 --dtypes float32 --frameworks torch
python -m arraycomm bench --ranks 4 --json figures.json   # launches itself
```

`python -m arraycomm bench --device cuda` times arrays that stay on GPUs, beside NCCL called by CuPy
and by PyTorch, and beside a plain copy; no figures of a GPU have been taken.

`python docs/benchmarks.py --run` takes the figures of this page anew and writes the page;
`docs/benchmarks/` holds every sample of them.

The tables are of an earlier state of the code, in which plans are slower. On another machine, with less memory bandwidth (Xeon, 2.5 GHz,
2 cores, MPICH, two ranks), `plan` of the tree of ResNet-50 takes 45 to 48 ms against 71 to 73 ms of mpi4py's, a ratio of 0.62 to 0.67, where
only NumPy is loaded, and 52 to 57 ms, a ratio of up to 0.78, where PyTorch is loaded as well.
"""

METHOD: Final = """\
## How it is measured

- All contenders run in the same processes, on the same memory, and take turns: each repetition
  samples every contender once, in an order that changes from one repetition to the next. What slows
  the machine for a while slows them all.
- A sample is a loop of calls, as many as fill the contender's share of the time: a thousand or so
  for the smallest arrays, one for the largest. It begins after a barrier, and the slowest rank
  counts. Python's garbage collector is off meanwhile.
- Times are medians of the samples. A ratio is the median of the repetitions' ratios, so that it may
  differ a little from the ratio of the medians; below 1, arraycomm takes less time.
- GB/s are the bytes of one rank's array, in units of 10⁹, by the time of the call.
- Before a contender is timed, its result is compared with the exact sum on every rank. One whose
  result is wrong is shown as "wrong", one that cannot do it as "–": MPI has no bfloat16, and a JAX
  array cannot be written to.
- `out=` writes into an array of the caller's, plain `arraycomm` returns a fresh one, as JAX has to.
  `check=False` leaves out the comparison of what the ranks call; small arrays travel with it, and
  gain nothing. gloo sums in place. It also waits asleep, so that its small calls depend on the
  system's scheduler, while MPI and arraycomm poll.
- Trees are those of the gradients of ResNet-50 and of GPT-2 (small), and one of 1,000 leaves. `plan(tree)` and `allreduce_tree` return
  fresh arrays; mpi4py and gloo reduce one leaf after another, mpi4py into other arrays of the caller's, gloo in place.
- With more ranks than cores, all depends on who gives up its core to whom.

What the same call gives differs too. arraycomm adds in the order of ranks, and rounds bfloat16 and
float16 once, at the end; MPI and gloo round after every addition, in an order of their own.
"""


OVERLAP: Final = """\
## Beside other work

How much of a nonblocking call is hidden behind work that the caller does meanwhile: (call + work −
both) ÷ the shorter of call and work. Sleeping stands for what waits (a disk, a device), a matrix product
for what computes without Python's lock. On a machine whose cores are all busy computing, a call that
needs them too cannot be hidden altogether.

```sh
python -m arraycomm overlap --ranks 2
```
"""


def main() -> int:
    """Run the benchmark if asked to, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="take the figures anew")
    parser.add_argument("--seconds", default="1.2", help="time for each line of a table")
    arguments = parser.parse_args()
    failed = [run for run in RUNS if arguments.run and not take(run, arguments.seconds)]
    if arguments.run:
        take_overlap()
    PAGE.write_text(written(stored()), encoding="utf-8")
    for run in failed:
        print(f"{run.title}: the benchmark failed", file=sys.stderr)
    return int(bool(failed))


def take(run: Run, seconds: str) -> bool:
    """Take the figures of one run, where its environment exists; tell whether that went well."""
    python = ROOT / run.environment / "bin" / "python"
    if not python.exists():
        print(f"{run.title}: there is no {run.environment}; its figures stay", file=sys.stderr)
        return True
    print(f"{run.title} …", file=sys.stderr)
    command = [str(python), "-m", "arraycomm", "bench", "--ranks", str(run.ranks), *run.arguments]
    command += ["--seconds", seconds, "--json", f"docs/benchmarks/{run.name}.json"]
    FIGURES.mkdir(exist_ok=True)
    # Open MPI refuses to work for root unless it is told twice.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | root, stdout=subprocess.DEVNULL, check=False
    )
    return done.returncode == 0


def take_overlap() -> None:
    """Take the figures of calls beside other work."""
    command = [str(ROOT / ".venv/bin/python"), "-m", "arraycomm", "overlap"]
    command += ["--json", "docs/benchmarks/overlap.json"]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def stored() -> dict[str, dict[str, Any]]:
    """Return the figures there are, by the name of their run."""
    paths = {run.name: FIGURES / f"{run.name}.json" for run in RUNS}
    return {n: json.loads(p.read_text("utf-8")) for n, p in paths.items() if p.exists()}


def written(figures: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    runs = [run for run in RUNS if run.name in figures]
    parts = [INTRODUCTION, _in_short(figures, runs), METHOD]
    for run in runs:
        parts += _of_one_run(run, figures[run.name])
    if (FIGURES / "overlap.json").exists():
        results = json.loads((FIGURES / "overlap.json").read_text("utf-8"))
        found = overlap_table(results["lines"], results["ranks"])
        parts += [OVERLAP, f"### {found.title}\n\n{as_markdown(found)}\n"]
    return "\n".join(parts)


def compared(results: dict[str, Any], claim: Claim) -> str:
    """Return both times and their ratio, as it was measured."""
    pair = _pair(results["lines"], claim)
    if pair is None:
        return "–"
    own, other = pair
    unit, scale = ("µs", 1e6) if claim.nbytes < 1 << 16 else ("ms", 1e3)
    times = (f"{number_text(entry['median'] * scale)} {unit}" for entry in (own, other))
    return f"{' against '.join(times)}: **{ratio_text(ratio(own['samples'], other['samples']))}**"


def caution(results: dict[str, Any]) -> str:
    """Return a sentence where other programs ran at the same time, by the load at the start."""
    machine = results["machine"]
    if machine["load"] <= machine["cores"] / 2:
        return ""
    return "\n**Other programs kept the machine busy meanwhile: these figures are rough.**\n"


def _pair(lines: list[Line], claim: Claim) -> tuple[dict[str, Any], dict[str, Any]] | None:
    for line in lines:
        about = (line["dtype"], line["nbytes"], line.get("tree"))
        if about == (claim.dtype, claim.nbytes, claim.tree):
            own, other = find(line, *claim.own), find(line, *claim.other)
            if own and other and own["status"] == other["status"] == "ok":
                return own, other
    return None


def _in_short(figures: dict[str, dict[str, Any]], runs: list[Run]) -> str:
    header = ["", "goal", *(run.title for run in runs)]
    rows = [
        [claim.text, claim.goal, *(compared(figures[run.name], claim) for run in runs)]
        for claim in CLAIMS
    ]
    return f"""\
## In short

{as_markdown(Table("", header, rows))}

The number in bold is arraycomm's time by the other's. The goals are meant for two ranks on two
cores; four ranks on two cores show what contention does.
"""


def _of_one_run(run: Run, results: dict[str, Any]) -> Iterator[str]:
    machine, versions = results["machine"], results["versions"]
    said = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"""\
## {run.title}

{machine["processor"]}, {machine["cores"]} cores, {machine["system"]}; load {machine["load"]:.1f} at the start;
{results["time"][:10]}. {results["mpi"].partition(", package")[0]}. {said}.
{caution(results)}"""
    for table in tables(results["lines"], results["ranks"]):
        yield f"### {table.title}\n\n{as_markdown(table)}\n"
    for complaint in complaints(results["lines"]):
        yield f"{complaint}\n"


if __name__ == "__main__":
    sys.exit(main())
