# ruff: noqa: RUF001 - formulas have Greek letters
"""What an allreduce costs between nodes, by a model of header, slices and chain; writes docs/evidence/scaling.md.

python -m docs.studies.scaling, after docs.studies.benchmarks.nodes has measured two nodes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil, log2
from pathlib import Path
from statistics import median
from typing import Any, Final

from arraycomm._reduce.chain import chunk_bytes, is_quicker, largest_chunk
from arraycomm._reduce.chunks import overlapping_chunk
from arraycomm._transports.base import DIRECT_RANKS
from arraycomm._transports.control import PAYLOAD, message_slot
from arraycomm.cli.bench.results import number_text
from docs.studies.tables import Table, as_markdown

STUDY: Final = Path(__file__).parent
PAGE: Final = STUDY.parent / "evidence" / "scaling.md"
SIZES: Final = {
    "8 B": 8,
    "1 KB": 1 << 10,
    "64 KB": 64 << 10,
    "1 MB": 1 << 20,
    "16 MB": 16 << 20,
    "64 MB": 64 << 20,
}
NODES: Final = 2, 4, 16, 64, 256, 1024

TEXT: Final = """\
---
description: A model of what an allreduce costs on many nodes
---

<!-- Written by docs/studies/scaling.py; change that program, not this page. -->

# Scaling to many ranks

What does an `allreduce` cost between nodes? Two nodes have been measured, and they were network namespaces of one machine.
**The figures for more nodes are a model's, not measurements.** The model has three algorithms: an array is sent with the header, in
slices, or along a chain of nodes. [Architecture](../architecture.md#algorithms) says when each is chosen.

## The model

A message of *n* bytes takes α + n β (Hockney 1994), a byte that is folded γ, and a byte that is copied κ. A rank sends one message
at a time, and may receive another meanwhile. There are *N* nodes of *m* ranks, *p* = *N m* in all. The ranks of a node share its link.

| step | time |
| --- | --- |
| header of ranks that agree | log₂ N (α + 128 β) |
| "header": the array is sent with it | in addition (N − 1) m n β and (p − 1) n γ |
| "slices" in K chunks of c bytes | the longer of messages, K 2 (p − 1) α + n β (m + 1) (N − 1) / N, and folds, n γ; and c γ |
| "chain" in K chunks of c bytes | (K + 2 N − 1) (α + c β + c γ + 2 c κ) |
| Rabenseifner's algorithm in MPI libraries, for comparison | 2 log₂ p α + 2 n β (p − 1) / p + n γ |

- What ranks show goes by Bruck's algorithm, from the first rank of each node to those of other nodes. Logarithms are rounded up.
- By slices a rank folds its part of a chunk while the parts of the next chunk are on their way, so only one chunk's fold shows.
  Chunks of many ranks are long, since each costs a latency for every rank: √(2 p n α / γ) bytes, with 2 α / γ taken as 32 KiB.
- Up to {direct} ranks send slices by messages of their own. More ranks use the collectives of the MPI, which may need fewer.
- Along a chain each node folds its ranks' elements onto the total of the nodes before, and the result goes back. So a link carries
  each byte once in each direction, however many ranks a node has. A chunk passes 2 N − 1 turns before it is back at the first node.
- The model has no contention between nodes, no noise of the operating system, no ranks that arrive late, and no time that Python takes.

## Two nodes: measured

{about}; MPICH over TCP. α and β are those of the column "exchange": each rank sends as many bytes as each node needs of the other, and does
nothing else. γ and κ are assumed to be 1 ÷ {fold} GB/s and 1 ÷ {copy} GB/s. On two cores two ranks of a node wait for those of the other one.

{measured}
## More nodes: the model

Assumptions: α = 1.5 µs and 1 / β = 25 GB/s, as of networks of 200 Gb/s; folds of {fold} GB/s, copies of {copy} GB/s. The algorithm is the one that
arraycomm chooses.

{predicted}
## Limits

- Between nodes, arrays of up to 1 MiB divided by the ranks, and 128 bytes at least, are sent with the header. The bytes that a node
  receives then grow with the ranks: from 1,024 nodes of 64 ranks, 8 bytes of each are {received}.
- With one rank a node, slices take two messages to each rank: on 1,024 nodes latencies alone take {latencies}.
- Along a chain the first and the last node are far apart: on 1,024 nodes of 64 ranks a short array takes {far}.
- Rabenseifner's algorithm folds in the order of a tree. arraycomm keeps the order of ranks, so that results are the same bits on any
  number of nodes.
- Above some hundred nodes use NCCL, or the MPI's own reduction, if results may depend on the order.

## Sources

- J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby: *Efficient Algorithms for All-to-All Communications in
  Multiport Message-Passing Systems*, IEEE TPDS 8(11), 1997.
- R. Hockney: *The Communication Challenge for MPP: Intel Paragon and Meiko CS-2*, Parallel Computing 20(3), 1994.
- R. Rabenseifner: *Optimization of Collective Reduction Operations*, ICCS 2004.
"""


@dataclass(frozen=True)
class Machine:
    """N nodes of m ranks; seconds of a message, of each byte of it, and of each byte that is folded and copied."""

    nodes: int
    ranks: int
    latency: float = 1.5e-6
    per_byte: float = 1 / 25e9
    fold: float = 1 / 10e9
    copy: float = 1 / 10e9

    @property
    def size(self) -> int:
        return self.nodes * self.ranks

    def header(self, nbytes: int = 0) -> float:
        """Return the seconds of a header, and of arrays of this many bytes that are sent with it."""
        rounds, others = ceil(log2(self.nodes)), (self.nodes - 1) * self.ranks
        shown = rounds * (self.latency + PAYLOAD * self.per_byte)
        return shown + others * nbytes * self.per_byte + (self.size - 1) * nbytes * self.fold

    def slices(self, nbytes: int) -> float:
        """Return the seconds of an array that goes in slices, without the header."""
        chunks = ceil(nbytes / overlapping_chunk(nbytes, self.size))
        crossing = (self.ranks + 1) * (self.nodes - 1) / self.nodes
        messages = chunks * 2 * (self.size - 1) * self.latency + nbytes * crossing * self.per_byte
        folds = nbytes * self.fold
        return max(messages, folds) + folds / chunks

    def chain(self, nbytes: int) -> float:
        """Return the seconds of an array that goes along the chain of nodes, without the header."""
        chunk = min(chunk_bytes(nbytes, self.nodes, largest_chunk(self.ranks)), nbytes)
        turns = ceil(nbytes / chunk) + 2 * self.nodes - 1
        return turns * (self.latency + chunk * (self.per_byte + self.fold + 2 * self.copy))

    def rabenseifner(self, nbytes: int) -> float:
        """Return the seconds of an MPI library's own reduction, with one rank a node."""
        moved = 2 * nbytes * (self.size - 1) / self.size * self.per_byte
        return 2 * ceil(log2(self.size)) * self.latency + moved + nbytes * self.fold

    def allreduce(self, nbytes: int) -> tuple[str, float]:
        """Return the algorithm that arraycomm chooses for float32, and the seconds of a call."""
        if nbytes <= message_slot(self.size) - PAYLOAD:
            return "header", self.header(nbytes)
        if self.ranks > 1 and is_quicker(nbytes, self.nodes, self.ranks, 1):
            return "chain", self.header() + self.chain(nbytes)
        return "slices", self.header() + self.slices(nbytes)


def time_text(seconds: float) -> str:
    """Return seconds as the page shows them."""
    unit, scale = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("µs", 1e6)
    return f"{number_text(seconds * scale)} {unit}"


def measured(results: dict[str, Any]) -> str:
    """Return the table of what two nodes took, beside the model with their latency and bandwidth."""
    rows = []
    for ranks, of_ranks in results.items():
        runs = of_ranks["runs"]
        took = {
            (name, key): median(run[name][key] for run in runs)
            for name in SIZES
            for key in runs[0][name]
        }
        machine = Machine(
            2, int(ranks), took["8 B", "exchange"], took["64 MB", "exchange"] / SIZES["64 MB"]
        )
        for name, nbytes in SIZES.items():
            algorithm, predicted = machine.allreduce(nbytes)
            found = took[name, "arraycomm"]
            rows.append(
                [
                    f"{name}, 2 nodes of {ranks}",
                    algorithm,
                    *map(time_text, (took[name, "exchange"], predicted, found, took[name, "MPI"])),
                    f"{predicted / found:.2f}",
                ]
            )
    columns = ["", "algorithm", "exchange", "model", "measured", "MPI", "model ÷ measured"]
    return as_markdown(Table("", columns, rows)) + "\n"


def predicted(ranks: int) -> str:
    """Return the table of more nodes with this many ranks each."""
    rows = []
    for name, nbytes in SIZES.items():
        found = [Machine(nodes, ranks).allreduce(nbytes) for nodes in NODES]
        names = list(dict.fromkeys(algorithm for algorithm, _ in found))
        rows.append([f"{name}: {', then '.join(names)}", *(time_text(took) for _, took in found)])
        if ranks == 1:
            bound = [time_text(Machine(nodes, 1).rabenseifner(nbytes)) for nodes in NODES]
            rows.append([f"{name}: Rabenseifner", *bound])
    title = f"{ranks} rank{'s' * (ranks > 1)} a node"
    return as_markdown(Table("", [title, *(f"{nodes:,} nodes" for nodes in NODES)], rows)) + "\n"


def page() -> str:
    """Return the page."""
    results = json.loads((STUDY / "benchmarks" / "nodes.json").read_text("utf-8"))
    about, many = next(iter(results.values()))["machine"], Machine(1024, 64)
    return TEXT.format(
        direct=DIRECT_RANKS,
        about=f"{about['processor']}, {about['cores']} cores, {about['system']}",
        fold=number_text(1e-9 / many.fold),
        copy=number_text(1e-9 / many.copy),
        measured=measured(results),
        predicted="\n".join(predicted(ranks) for ranks in (1, 64)),
        received=f"{8 * many.size / 1e6:.1f} MB",
        latencies=time_text(2 * 1023 * many.latency),
        far=time_text(many.chain(64 << 10)),
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
