"""The text and the tables of docs/benchmarks.md, from the stored figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from arraycomm.cli.bench.lines import Line
from arraycomm.cli.bench.overlap import overlap_table
from arraycomm.cli.bench.report import complaints, find, tables
from arraycomm.cli.bench.tables import Table, as_markdown, number_text, ratio_text
from arraycomm.cli.bench.timing import ratio
from docs.studies.benchmarks.claims import CLAIMS, Claim
from docs.studies.benchmarks.runs import OVERLAP, RUNS, TRAINING, Run, figures_of

PAGE: Final = Path(__file__).resolve().parents[2] / "benchmarks.md"

INTRODUCTION: Final = """\
# Benchmarks

How long does `allreduce` with `op="sum"` take in arraycomm, in mpi4py's `Allreduce`, and in gloo, the
CPU backend of `torch.distributed`? And how long do trees of arrays take, shaped like the gradients of two models? The figures come from one small machine. Other
machines give other figures, so run the benchmark on yours:

```sh
mpiexec -n 2 python -m arraycomm bench
mpiexec -n 2 python -m arraycomm bench latency --sizes 8,1024 --dtypes float32 --frameworks torch
python -m arraycomm bench --ranks 4 --json figures.json   # launches itself
```

`python -m arraycomm bench --device cuda` times arrays that stay on GPUs, beside NCCL called by CuPy
and by PyTorch, and beside a plain copy. No GPU has been measured so far.

`python -m docs.studies.benchmarks --run` measures again and writes this page;
`docs/studies/benchmarks/` holds every sample.

The tables were measured with an earlier version of the code, whose plans are slower. On another machine with less memory bandwidth (Xeon, 2.5 GHz,
2 cores, MPICH, two ranks), `plan` of the tree of ResNet-50 takes 45 to 48 ms if only NumPy is loaded. mpi4py takes 71 to 73 ms: a ratio of 0.62 to 0.67.
If PyTorch is loaded as well, `plan` takes 52 to 57 ms, a ratio of up to 0.78.
"""

METHOD: Final = """\
## How it is measured

- All contenders run in the same processes, on the same memory, and take turns. Each repetition
  samples every contender once, in an order that changes from one repetition to the next. So whatever slows
  the machine down for a while slows down all of them.
- A sample is a loop of calls, as many as fill the contender's share of the time: about a thousand
  for the smallest arrays, one for the largest. It begins after a barrier, and the slowest rank
  counts. Python's garbage collector is off during a sample.
- Times are medians of the samples. A ratio is the median of the repetitions' ratios, so it may
  differ a little from the ratio of the medians. Below 1, arraycomm takes less time.
- GB/s are the bytes of one rank's array, in units of 10⁹, divided by the time of the call.
- Before a contender is timed, its result is compared with the exact sum on every rank. The tables show "wrong" for a
  wrong result, and "–" if the contender cannot do the reduction: MPI has no bfloat16, and a JAX
  array cannot be written to.
- `out=` writes into an array of the caller; plain `arraycomm` returns a fresh one, as JAX must.
  `check=False` leaves out the comparison of what the ranks call. Small arrays are sent together with it, and
  gain nothing. gloo sums in place. Its ranks sleep while they wait, so its small calls depend on the
  system's scheduler, while MPI and arraycomm poll.
- The trees have the shapes of the gradients of ResNet-50 and of GPT-2 (small); another has 1,000 leaves. `plan(tree)` and `allreduce_tree` return
  fresh arrays. mpi4py and gloo reduce one leaf after another, mpi4py into other arrays of the caller, gloo in place.
- With more ranks than cores, the times depend mostly on which rank gives up its core to which other.

The results differ too. arraycomm adds in rank order, and rounds bfloat16 and
float16 once, at the end. MPI and gloo round after every addition, in an order of their own.
"""


OTHER_WORK: Final = """\
## Overlap with other work

How much of a nonblocking call is hidden behind the work that the caller does in the meantime? The tables show (call + work −
both) ÷ the shorter of call and work. Sleeping stands for waiting (on a disk or a device), a matrix product
for computing without Python's lock. If all cores of a machine are busy computing, a call that
needs them too cannot be hidden completely.

```sh
python -m arraycomm overlap --ranks 2
```
"""

TRAINING_STEPS: Final = """\
## Steps of training

How long does a step of training take with `DistributedOptimizer`, which reduces gradients during the
backward pass, and with torch's `DistributedDataParallel` over gloo? A step is `zero_grad()`, the
forward and the backward pass over this rank's batch, and a step of SGD. Both have the same model,
data and threads. Before they are timed, both take a step whose parameters are compared with those
of one process on all batches. The goal is at most 0.8. `DistributedDataParallel` is given
`gradient_as_bucket_view=True`, its quickest way.

"Reduction hidden" is 1 − (step − step without communication) ÷ (reduction alone). It is less than 100 % if the
reduction needs cores that the backward pass would use.

```sh
python -m arraycomm bench train --ranks 2
```
"""


def stored() -> dict[str, dict[str, Any]]:
    """Return the figures there are, by the name of their run."""
    paths = {run.name: figures_of(run) for run in RUNS}
    return {n: json.loads(p.read_text("utf-8")) for n, p in paths.items() if p.exists()}


def written(figures: dict[str, dict[str, Any]]) -> str:
    """Return the page."""
    runs = [run for run in RUNS if run.name in figures]
    parts = [INTRODUCTION, _in_short(figures, runs), METHOD]
    for run in runs:
        parts += _of_one_run(run, figures[run.name])
    if OVERLAP.exists():
        results = json.loads(OVERLAP.read_text("utf-8"))
        found = overlap_table(results["lines"], results["ranks"])
        parts += [OTHER_WORK, f"### {found.title}\n\n{as_markdown(found)}\n"]
    if TRAINING.exists():
        results = json.loads(TRAINING.read_text("utf-8"))
        (found,) = tables(results["lines"], results["ranks"])
        about = f"{_machine_of(results)}\n{caution(results)}"
        parts += [TRAINING_STEPS, f"### {found.title}\n\n{about}\n{as_markdown(found)}\n"]
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
    """Return a warning if other programs ran at the same time, judged by the load at the start."""
    machine = results["machine"]
    if machine["load"] <= machine["cores"] / 2:
        return ""
    return "\n**Other programs kept the machine busy during the measurement: these figures are rough.**\n"


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
## Summary

{as_markdown(Table("", header, rows))}

The number in bold is arraycomm's time divided by the other's. The goals are meant for two ranks on two
cores. Four ranks on two cores show the effect of contention.
"""


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
