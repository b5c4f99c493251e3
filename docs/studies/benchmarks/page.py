"""The texts, charts and tables of docs/benchmarks.md and docs/evidence/benchmark-tables.md, from the stored figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

from arraycomm.cli.bench.results import ratio_text, size_text
from arraycomm.cli.bench.timing import ratio
from docs.studies.benchmarks import charts
from docs.studies.benchmarks.claims import CLAIMS, Claim
from docs.studies.benchmarks.report import complaints, find, tables
from docs.studies.benchmarks.results import OTHER, OWN, Line
from docs.studies.benchmarks.runs import NODES, PROGRAMS, RUNS, STUDY, TRAINING, Run, figures_of
from docs.studies.tables import Table, as_markdown

DOCS: Final = Path(__file__).resolve().parents[2]
PAGE: Final = DOCS / "benchmarks.md"
TABLES: Final = DOCS / "evidence" / "benchmark-tables.md"
CHARTS: Final = DOCS / "figures"

# From which ratio on the page calls a call slower.
SLOWER: Final = 1.1
WHERE_SLOWER: Final = (
    "Where arraycomm takes longer than mpi4py by more than a tenth, with the ratio of the times:"
)
BUSY: Final = "Other programs ran on it at the same time, so **take them as rough**. "
INTRODUCTION: Final = """\
---
description: 'Times of collectives, trees and training steps beside mpi4py, gloo and mpi4jax, and a command to measure on your machine'
---

# Performance

![Bars of arraycomm's time divided by another library's, one for each row of the table below; a dashed line stands at 1](figures/benchmarks.svg){{ .figure }}

How long do calls take in arraycomm, in mpi4py, in gloo (the CPU backend of `torch.distributed`) and in mpi4jax? The table has the goals that arraycomm is measured by, reached and missed: its time divided by the
other's. Ratios above 1 are in bold.

{goals}

The figures come from one machine with two cores ({processor}). {caution}No network has been measured, and GPUs in a few [figures of one card](devices.md#figures). The goals are meant for two ranks on two
cores. Four ranks on two cores show the effect of contention. [Benchmark tables](evidence/benchmark-tables.md) has all times.

What is gained by moving fewer bytes depends on the machine, above all for large arrays and trees.

## On your machine

```console
$ arraycomm bench                          # on two ranks: each call, large arrays, trees
$ arraycomm bench latency --sizes 8,1024
$ arraycomm bench --ranks 4 --json figures.json
$ arraycomm bench --compare old.json new.json --at-most 1.1   # fails if anything takes longer
```

It starts its ranks by itself; under `mpiexec` it has those. It prints each result as soon as it has been measured, and beside it the ratio to what mpi4py takes.

Other dtypes, torch's and JAX's arrays, gloo, and arrays on GPUs beside NCCL called by CuPy and PyTorch are measured from a checkout:

```console
$ arraycomm run -n 2 -m docs.studies.benchmarks.arrays latency --sizes 8,1024 --dtypes bfloat16 --frameworks torch
$ arraycomm run -n 2 -m docs.studies.benchmarks.arrays --device cuda
```

`make bench-check BASE=commit` runs the benchmark of a checkout and of a commit in turns, and fails if anything takes more than 1.1 times as long as there.

## Arrays of all sizes

![Curves of the time of an allreduce from 8 bytes to 64 MB, for float32, float16 and bfloat16](figures/allreduce-by-size.svg){{ .figure }}

{slower}

The ranks compare their calls and add in rank order, 16-bit floats with sums in float32. In return every rank gets the same bits, and 16-bit floats are rounded once instead of at every rank.

## Each call

What a program makes again and again, with NumPy arrays of float32 on two ranks: the time of arraycomm's call, which returns a new array, divided by that of mpi4py's buffer call, which fills an array that is there.

{calls}

At 64 KB `bcast`, `gather`, `scatter` and `alltoall` took 1 to 1.5 times mpi4py's time in some runs, and 3 to 4 times in others on the same machine, probably by which two cores the ranks had.

## Training steps and compiled programs

![Bars of arraycomm's time divided by another library's: training steps beside DDP, and calls and a loop in jax.jit beside mpi4jax; a dashed line stands at 1](figures/steps.svg){{ .figure }}

A training step has the same model, data and threads as with `DistributedDataParallel` over gloo. The call inside `jax.jit` stands beside the same program with mpi4jax.
"""

TABLES_INTRODUCTION: Final = """\
---
description: Every time behind the page on performance, of collectives, trees, training steps and compiled programs
---

# Benchmark tables

Every figure behind [Performance](../benchmarks.md): `allreduce` with `op="sum"`, trees of arrays shaped like the gradients of two models, training
steps, and compiled programs.

`python -m docs.studies.benchmarks --run` measures again and writes both pages and their charts;
`docs/studies/benchmarks/` holds every sample. The figures between two nodes have [a program of their own](#between-two-nodes).
"""

METHOD: Final = """\
What it costs that the ranks [compare](training.md#the-same-on-all-ranks) what their steps depend on, with `verify_every=100`, which is the default: two ranks on two cores under MPICH, the same loop with and without in turns,
step by step (`docs/studies/benchmarks/verification.py`). The ratio contains a hundredth of a step in which all arrays are compared.

| step | without, ms | ratio |
|---|---:|---:|
| torch: MLP of 20 million parameters, AdamW | 337 | 1.007 |
| torch: CNN with batch norm, AdamW (median of eleven runs) | 41 | 1.006 |
| optax: AdamW inside `jax.jit`, 8.4 million parameters | 105 | 1.003 |
| NumPy: momentum, 8.4 million parameters | 42 | 1.002 |
| torch: one layer of 520 parameters | 1.9 | 1.05 |

Each row but that of the CNN is one run. The eleven of the CNN go from 0.985 to 1.050, so a difference of a hundredth is within what two runs differ by. A small step pays for the hyperparameters, which are read in each: some tens of microseconds. On devices the cost has not been measured.

## How it is measured

- All contenders run in the same processes, on the same memory, and take turns in an order that changes from one repetition to the next. So whatever slows the machine down for a while slows down all of them.
- A sample is a loop of calls, as many as fill the contender's share of the time. It begins after a barrier, the slowest rank counts, and Python's garbage collector is off.
- Times are medians of the samples. A ratio is the median of the repetitions' ratios. Below 1, arraycomm takes less time. GB/s are the bytes of one rank's array, in units of 10⁹, divided by the time of the call.
- Before a contender is timed, its result is compared with the exact sum on every rank. The tables show "wrong" for a wrong result, and "–" if the contender cannot do the reduction: MPI has no bfloat16, and a JAX array cannot be written to.
- `out=` writes into an array of the caller; plain `arraycomm` returns a fresh one, as JAX must. `check=False` leaves out the comparison of what the ranks call; small arrays travel with it, and gain nothing. gloo sums in place, and its ranks sleep while they wait.
- The trees have the shapes of the gradients of ResNet-50 and of GPT-2 (small); another has 1,000 leaves. mpi4py and gloo reduce one leaf after another.

The results differ too. arraycomm adds in rank order, and rounds bfloat16 and float16 once, at the end. MPI and gloo round after every addition, in an order of their own.
"""


TRAINING_STEPS: Final = """\
## Steps of training

How long does a step of training take with `DistributedOptimizer`, and with torch's `DistributedDataParallel` over gloo, with `gradient_as_bucket_view=True`, its quickest way? A step is `zero_grad()`, the
forward and the backward pass over this rank's batch, and a step of SGD. Both have the same model, data and threads. Before they are timed, both take a step whose parameters are compared with those of one process on all batches.
The goal is at most 0.8.

```sh
arraycomm run -n 2 -m docs.studies.benchmarks.steps train 20 train.json
```
"""


COMPILED_PROGRAMS: Final = """\
## Programs that JAX has compiled

How long does a call of a `jax.jit` program take that reduces one array, by arraycomm's `adapters.jax.allreduce`, by the optax
transformation `adapters.jax.all_reduce`, and by mpi4jax's `allreduce`? A donated x is reduced in place. "10 steps of shallow
water" is one program with a loop: each rank has 256 × 256 cells of three fields, and gets its halo from the ranks
beside it by four calls of `sendrecv` a step. It is the same program for both libraries, which exchange the halos. The goals are at
most 0.3 of mpi4jax's time for 8 B, 0.6 for 1 MB and 0.8 for 16 MB, and 1 for the steps.

JAX dispatches programs whose calls have an order from Python, mpi4jax's among them. Programs of arraycomm are [dispatched as those without calls](../jax.md#order).

```sh
arraycomm run -n 2 -m docs.studies.benchmarks.steps jax 5 jax.json
```

If mpi4jax is not installed, its columns are empty. It builds with a compiler and without CUDA on the PATH, in an environment of its own:

```sh
python -m venv .venv-mpi4jax
.venv-mpi4jax/bin/pip install mpich 'mpi4py>=4.1' 'jax==0.10.2' optax optree array-api-compat
PATH=$PWD/.venv-mpi4jax/bin:/usr/bin:/bin CUDA_ROOT=/nonexistent .venv-mpi4jax/bin/pip install mpi4jax==0.9.1
.venv-mpi4jax/bin/pip install --no-deps --editable .
```
"""

BETWEEN_NODES: Final = """\
## Between two nodes

How long does a reduction take between two nodes, by `allreduce(x, out=y)` or a plan, and by MPI's own `Allreduce`, which is called for one leaf after the other? The nodes are network namespaces of one
machine with two cores, and the link between them is TCP over a pair of virtual interfaces. Their cores move the bytes, so the figures say what libraries do with a link, and nothing of a network.

"exchange" sends as many bytes each way, in pieces as arraycomm does: each node has to learn of the other's elements, so that the bytes of a rank's array cross the link in each direction, whoever folds them. With several ranks on a node, each
exchanges its part. No reduction takes less, and where the link's time is most of MPI's no ratio can be much lower. The last column has that floor as a part of MPI's time.

arraycomm cuts what two nodes send one another into [pieces](../architecture.md#algorithms) of up to 64,000 bytes. TCP's congestion control is BBR here: once it has measured the link by larger arrays, it holds back what does not fit into 64 KiB at once. The last row is the
third one after that.

Each time, and each ratio, is the median of those that several programs found, one after the other. In each program the three take turns.

```sh
mpiexec -hosts A,B -ppn 1 -n 2 python -m docs.studies.benchmarks.nodes docs/studies/benchmarks/nodes.json
```
"""


def stored(folder: Path = STUDY) -> dict[str, dict[str, Any]]:
    """Return the figures there are in a folder, by the name of their run."""
    paths = {run.name: figures_of(run, folder) for run in RUNS}
    return {n: json.loads(p.read_text("utf-8")) for n, p in paths.items() if p.exists()}


def written(figures: dict[str, dict[str, Any]]) -> str:
    """Return the page for readers: the charts, and the goals in a table."""
    runs = [run for run in RUNS if run.name in figures]
    busy = any(caution(figures[run.name]) for run in runs)
    introduction = INTRODUCTION.format(
        goals=_goals(figures, runs),
        processor=_processor(figures),
        slower=_slower(figures, runs),
        calls=_each_call(figures, runs),
        caution=BUSY if busy else "",
    )
    return f"{introduction}\n{METHOD}"


def tabled(figures: dict[str, dict[str, Any]]) -> str:
    """Return the page of all tables."""
    parts = [TABLES_INTRODUCTION]
    for run in RUNS:
        if run.name in figures:
            parts += _of_one_run(run, figures[run.name])
    for text, path in ((TRAINING_STEPS, TRAINING), (COMPILED_PROGRAMS, PROGRAMS)):
        if path.exists():
            parts += _of_one_mode(text, json.loads(path.read_text("utf-8")))
    if NODES.exists():
        parts += _of_nodes(json.loads(NODES.read_text("utf-8")))
    return "\n".join(parts)


def drawn(figures: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the charts, by the names of their files."""
    modes = {"train": TRAINING, "jax": PROGRAMS}
    return {
        "benchmarks.svg": charts.ratios(figures["mpich-2"]),
        "allreduce-by-size.svg": charts.by_size(figures["mpich-2"]),
        "steps.svg": charts.steps({n: json.loads(p.read_text("utf-8")) for n, p in modes.items()}),
    }


def write() -> None:
    """Write both pages and their charts."""
    figures = stored()
    PAGE.write_text(written(figures), encoding="utf-8")
    TABLES.write_text(tabled(figures), encoding="utf-8")
    for name, chart in drawn(figures).items():
        (CHARTS / name).write_text(chart, encoding="utf-8")


def _of_one_mode(text: str, results: dict[str, Any]) -> Iterator[str]:
    (found,) = tables(results["lines"], results["ranks"])
    about = f"{_machine_of(results)}\n{caution(results)}"
    yield text
    yield f"### {found.title}\n\n{about}\n{as_markdown(found)}\n"
    for complaint in complaints(results["lines"]):
        yield f"{complaint}\n"


def _of_nodes(results: dict[str, Any]) -> Iterator[str]:
    yield BETWEEN_NODES
    header = ("", "arraycomm", "MPI", "exchange", "arraycomm ÷ MPI", "exchange ÷ MPI")
    for ranks, found in results.items():
        rows = []
        runs = found["runs"]
        for work in runs[0]:
            contenders = ("arraycomm", "MPI", "exchange")
            seconds = [median(run[work][key] for run in runs) for key in contenders]
            over, least = (
                median(run[work][key] / run[work]["MPI"] for run in runs)
                for key in ("arraycomm", "exchange")
            )
            shown = f"**{ratio_text(over)}**" if over > 1 else ratio_text(over)
            times = (f"{1e6 * one:,.{1 if one < 1e-4 else 0}f}" for one in seconds)
            rows.append([work, *times, shown, ratio_text(least)])
        title = f"Two nodes with {ranks} rank{'s' * (ranks != '1')} each: µs per call"
        about = (
            f"{found['machine']['processor']}, {found['machine']['cores']} cores\n{caution(found)}"
        )
        yield f"### {title}\n\n{about}\n{as_markdown(Table('', header, rows))}\n"


def compared(results: dict[str, Any], claim: Claim) -> str:
    """Return the ratio of both times, as it was measured."""
    pair = _pair(results["lines"], claim)
    if pair is None:
        return "–"
    found = ratio(*(entry["samples"] for entry in pair))
    return f"**{ratio_text(found)}**" if found > 1 else ratio_text(found)


def caution(results: dict[str, Any]) -> str:
    """Return a warning if other programs ran at the same time, judged by the load at the start."""
    machine = results["machine"]
    if machine["load"] <= machine["cores"] / 2:
        return ""
    return "\n**Other programs kept the machine busy during the measurement: these figures are rough.**\n"


def _pair(lines: list[Line], claim: Claim) -> tuple[dict[str, Any], dict[str, Any]] | None:
    for line in lines:
        if claim.fits(line):
            own, other = find(line, *claim.own), find(line, *claim.other)
            if own and other and own["status"] == other["status"] == "ok":
                return own, other
    return None


def _processor(figures: dict[str, dict[str, Any]]) -> str:
    name: str = figures["mpich-2"]["machine"]["processor"]
    return name


def _goals(figures: dict[str, dict[str, Any]], runs: list[Run]) -> str:
    header = ["", "goal", *(run.title for run in runs)]
    rows = [
        [claim.text, claim.goal, *(compared(figures[run.name], claim) for run in runs)]
        for claim in CLAIMS
    ]
    return as_markdown(Table("", header, rows))


def _each_call(figures: dict[str, dict[str, Any]], runs: list[Run]) -> str:
    """Return the ratios of each call to mpi4py's: a row for each call, a column for each size."""
    columns: dict[str, dict[str, str]] = {}
    for run in runs:
        for line in figures[run.name]["lines"]:
            if line["mode"] == "calls" and run.ranks == 2:
                entries = {entry["key"]: entry for entry in line["contenders"]}
                own, other = entries[OWN], entries[OTHER]
                found = ratio(own["samples"], other["samples"])
                title = f"{run.title.partition(',')[0]}, {size_text(line['nbytes'])}"
                column = columns.setdefault(title, {})
                column[line["call"]] = (
                    f"**{ratio_text(found)}**" if found > 1 else ratio_text(found)
                )
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [[name, *(column.get(name, "–") for column in columns.values())] for name in names]
    return as_markdown(Table("", ["", *columns], rows))


def _slower(figures: dict[str, dict[str, Any]], runs: list[Run]) -> str:
    rows: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        for line in figures[run.name]["lines"]:
            for framework in ("numpy", "torch"):
                pair = find(line, framework, "out"), find(line, framework, "mpi4py")
                if line.get("tree") or not all(e and e["status"] == "ok" for e in pair):
                    continue
                found = ratio(*(entry["samples"] for entry in pair if entry))
                if found > SLOWER:
                    about = (run.title, line["dtype"], charts.FRAMEWORKS[framework])
                    size = f"{size_text(line['nbytes'])} ({ratio_text(found)})"
                    rows.setdefault(about, []).append(size)
    if not rows:
        return "With `out=`, `allreduce` takes at most a tenth longer than mpi4py's at every size."
    header = ("ranks", "dtype", "arrays", "sizes")
    table = Table("", header, [[*about, ", ".join(s)] for about, s in rows.items()])
    return f"{WHERE_SLOWER}\n\n{as_markdown(table)}"


def _machine_of(results: dict[str, Any]) -> str:
    machine, versions = results["machine"], results["versions"]
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"""\
{machine["processor"]}, {machine["cores"]} cores, {machine["system"]}; load {machine["load"]:.1f} at the start;
{results["time"][:10]}. {results["mpi"].partition(", package")[0]}. {software}."""


def _of_one_run(run: Run, results: dict[str, Any]) -> Iterator[str]:
    yield f"## {run.title}\n\n{_machine_of(results)}\n{caution(results)}"
    for table in tables(results["lines"], results["ranks"]):
        yield f"### {table.title}\n\n{as_markdown(table)}\n"
    for complaint in complaints(results["lines"]):
        yield f"{complaint}\n"
