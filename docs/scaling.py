# ruff: noqa: RUF001 - formulas have Greek letters
"""Write docs/scaling.md and docs/scaling.svg: many ranks on paper, checked on few.

Both come from docs/scaling/measured.json; with --measure, the figures in it are taken first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import scaling_fit as fit
import scaling_model as model
import scaling_rounds as rounds
from scaling_figure import Curve, Panel, figure
from scaling_measure import PRETENDED, measure
from scaling_model import Machine

from arraycomm._collectives.algorithms import CHUNK_BYTES
from arraycomm._transports.control import MESSAGE_SLOT
from arraycomm.cli.bench_tables import Table, as_markdown, number_text, ratio_text, size_text

DOCS: Final = Path(__file__).resolve().parent
MEASURED: Final = DOCS / "scaling" / "measured.json"
PAGE: Final = DOCS / "scaling.md"
FIGURE: Final = DOCS / "scaling.svg"

POWERS: Final = tuple(1 << k for k in range(1, 18))
SHOWN: Final = (64, 256, 1024, 2048, 4096, 16384, 131072)
LARGEST: Final = POWERS[-1]
SIZES: Final = {"8 B": 8, "64 KiB": 64 << 10, "100 MB": 100_000_000}
NODES: Final = {"one rank a node": 1, "64 ranks a node": 64}
# Message rates of one sender: the gap between two messages that are under way at once (LogGP).
GAP: Final = 0.3e-6
PLAYED: Final = (2, 3, 8, 100, 1000, 2048)
PLAYED_BYTES: Final = 4 << 20

Compared = Callable[[int, int, Machine], float]

INTRODUCTION: Final = """\
<!-- Written by docs/scaling.py; change that file, not this one. -->

# Many ranks

What an `allreduce` and its header cost on up to {largest:,} ranks. Nobody has run arraycomm on so many:
this page is arithmetic. A model of each algorithm is written down, its messages are played one by one
to see that the formulas are right, it is compared with measurements on 2, 4 and 8 ranks, and then
followed to where it leads.

`python docs/scaling.py` writes this page and its figure from `docs/scaling/measured.json`; with
`--measure` it takes the measurements first.
"""

MODEL: Final = """\
## The model

A message of *n* bytes takes α + n β (Hockney 1994), and adding *n* bytes to others takes n γ. All ranks
send at the same time, each one message at a time and in both directions. What Python does
for each rank is counted as well, since it grows with the ranks: σ to look at a slot of the board, φ to
fold a row that came with the header, ψ to lay out, move and fold a rank's part of a chunk. λ is the
call itself. p is the number of ranks, and log p is ⌈log₂ p⌉.

| step | time |
| --- | --- |
| header, board in shared memory | λ + p σ |
| header, board of messages, while the MPI doubles | λ + log p α + (p − 1) 256 β + p σ |
| header, board of messages, once the MPI takes a ring | λ + (p − 1) (α + 256 β) + p σ |
| header as a reduction of digests (**not built**) | λ + log p (α + 64 β) |
| "header": the array came along | p φ + (p − 1) n γ |
| "steps": a slot of shared memory after another | ⌈n / slot⌉ p (σ + φ) + (p − 1) n γ |
| "gather" | log p α + (p − 1) n β + p ψ + (p − 1) n γ |
| "slices", for each chunk of 4 MiB: all to all, fold | (p − 1) α + n β (p − 1) / p + p ψ + n γ (p − 1) / p |
| … and allgather by a ring | (p − 1) α + n β (p − 1) / p |
| slices of everything, both movements in few rounds (**not built**) | 2 log p α + n β (log p / 2 + 1) + p ψ + n γ |
| recursive doubling | log p (α + n β + n γ) |
| Rabenseifner | 2 log p α + 2 n β (p − 1) / p + n γ (p − 1) / p |

- Which allgather there is depends on the MPI. MPICH 5.0.2 doubles (Bruck's way where p is no power of
  two) while all ranks' bytes together are below 512 KiB (80 KiB), and takes a ring from there on: its
  header is a ring from {ring:,} ranks on, or from {ring_odd:,} where p is no power of two. Chunks of 4 MiB
  always take the ring. Open MPI's own nonblocking allgather sends to each rank separately, which
  costs (p − 1) α on any number of ranks.
- `MPI_Ialltoallv` sends to each rank separately in both. (p − 1) α supposes that one message ends before
  the next begins. MPICH keeps several under way at once: in the terms of LogGP (Alexandrov et al. 1995)
  they then take (p − 1) g + α, with a gap g between messages that is smaller than α. A ring gains
  nothing by that, as each of its rounds waits for the one before.
- "In few rounds" sends slices through other ranks (Bruck et al. 1997): half of the array in each of log p
  rounds. Every slice is still folded by one rank, in the order of ranks. "The best in rank order" below is
  the fastest of slices of the whole array, with either all to all and either allgather, and of gathering
  everything in few rounds.
- Recursive doubling and Rabenseifner's way are what MPI libraries do inside `MPI_Allreduce` (Thakur,
  Rabenseifner, Gropp 2005; Chan et al. 2007 derive their costs and lower bounds). They fold in the order of a tree. That gives the same
  integers and bits, and another rounding of floats.
- Digests of headers agree when their minimum is their maximum. Both may count a rank twice, so that the
  reduction takes log p rounds for any p (dissemination).
- With several ranks a node, those that send to other nodes at the same time share the node's link;
  the others' messages stay within the node, with an α and β of their own.
"""

CHECK: Final = """\
## The check: 2, 4 and 8 ranks

{machine}. **Two cores**: 4 and 8 ranks take turns, so that all they do costs 2 and 4 times as
much, and each wait costs a change of turns. This checks how the work grows with the ranks; it says
nothing about a network. {load}

Fitted, to one process which pretends to have up to 1,024 ranks (λ, σ, φ, ψ, γ), to two ranks on one core
(turns), and to two ranks on two cores, where the table says so (α, β):

{parameters}

Predicted are the others. These jobs ran {runs} times, and of each the run with the lowest medians is kept. Times are
the least of its repetitions, since other programs only ever add; the medians stand beside them.

{comparison}

{verdict}
The model lets ranks take turns in a fixed order and knows no caches: with more ranks than cores, small arrays depend
on the system's scheduler, and slices of large ones are smaller and stay in the cache more often.

What a rank does by itself does not have to be extrapolated: one process pretends that all others have
answered, and runs the library's own code on {pretended:,} slots.

{alone}
"""

LARGE: Final = """\
## Up to {largest:,} ranks

![Time of an allreduce by ranks, for three sizes, with one and with 64 ranks a node](scaling.svg)

Assumed: α = {alpha} µs and 1/β = {bandwidth:.0f} GB/s between nodes, {near_alpha} µs and {near_bandwidth:.0f} GB/s within one, folds of {fold:.0f} GB/s, no
contention in the network, powers of two as p. 200 Gb/s are 25 GB/s, and a latency of 1.2 µs is published for
such a network ([Azure HBv3](https://docs.azure.cn/en-us/virtual-machines/hbv3-performance)); some
more is for the distances in a large machine. λ, σ, φ and ψ are those measured above.
The board is one of messages between nodes, and shared memory where all ranks are on one.
"""

SOURCES: Final = """\
## Sources

- A. Alexandrov, M. Ionescu, K. Schauser, C. Scheiman: *LogGP: Incorporating Long Messages into the LogP
  Model*, SPAA 1995.
- J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby: *Efficient Algorithms for All-to-All Communications in
  Multiport Message-Passing Systems*, IEEE TPDS 8(11), 1997.
- E. Chan, M. Heimlich, A. Purkayastha, R. van de Geijn: *Collective Communication: Theory, Practice, and
  Experience*, Concurrency and Computation 19(13), 2007.
- R. Hockney: *The Communication Challenge for MPP: Intel Paragon and Meiko CS-2*, Parallel Computing 20(3), 1994.
- R. Rabenseifner: *Optimization of Collective Reduction Operations*, ICCS 2004.
- R. Thakur, R. Rabenseifner, W. Gropp: *Optimization of Collective Communication Operations in MPICH*, IJHPCA 19(1), 2005.
- Which algorithm MPICH takes is the table of selections inside its library; Open MPI's is in
  `ompi/mca/coll/libnbc`.
"""


def main() -> None:
    """Measure if asked to, and write page and figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="take the measurements anew")
    if parser.parse_args().measure:
        MEASURED.parent.mkdir(exist_ok=True)
        MEASURED.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    results = stored()
    PAGE.write_text(written(results), encoding="utf-8")
    FIGURE.write_text(drawn(results), encoding="utf-8")


def stored() -> dict[str, Any]:
    """Return the measurements."""
    results: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return results


def cluster(results: dict[str, Any], per_node: int) -> Machine:
    """Return the large machine that is assumed, with what Python costs here."""
    here = fit.fitted(results).machine
    return replace(
        here,
        latency=1.5e-6,
        per_byte=1 / 25e9,
        near_latency=0.5e-6,
        near_byte=1 / 10e9,
        fold_byte=1 / 10e9,
        per_node=per_node,
    )


def written(results: dict[str, Any]) -> str:
    """Return the page."""
    return "\n".join(
        [
            INTRODUCTION.format(largest=LARGEST),
            _in_short(results),
            MODEL.format(ring=_ring_from(even=True), ring_odd=_ring_from(even=False)),
            _rounds(cluster(results, 1), cluster(results, 64)),
            _check(results),
            _large(results),
            _limits(results),
            SOURCES,
        ]
    )


def drawn(results: dict[str, Any]) -> str:
    """Return the figure."""
    legend = [
        ("own", "arraycomm, with its header"),
        ("header", "the header alone"),
        ("better", "best in rank order, header of digests (not built)"),
        ("digests", "a header of digests alone (not built)"),
        ("mpi", "MPI_Allreduce: doubling or Rabenseifner"),
    ]
    rows = [
        [_panel(f"{size}, {nodes}", n, cluster(results, s)) for nodes, s in NODES.items()]
        for size, n in SIZES.items()
    ]
    return figure("Time of an allreduce by ranks", legend, rows)


def _panel(title: str, nbytes: int, machine: Machine) -> Panel:
    curves = {
        "header": lambda p: header(p, machine),
        "digests": lambda p: model.header_of_digests(p, machine),
        "mpi": lambda p: model.mpi_allreduce(p, nbytes, machine),
        "better": lambda p: better(p, nbytes, machine),
        "own": lambda p: own(p, nbytes, machine),
    }
    return Panel(
        title, [Curve(style, [(p, cost(p)) for p in POWERS]) for style, cost in curves.items()]
    )


# What is compared


def on_one_node(size: int, machine: Machine) -> bool:
    """Tell whether all ranks share memory."""
    return size <= machine.per_node


def header(size: int, machine: Machine) -> float:
    """The header as it is."""
    return model.header(size, machine, on_one_node(size, machine))


def own(size: int, nbytes: int, machine: Machine) -> float:
    """What arraycomm takes."""
    return model.allreduce(size, nbytes, machine, shared=on_one_node(size, machine))


def better(size: int, nbytes: int, machine: Machine) -> float:
    """The best that keeps the order of the ranks, with a header of digests."""
    return model.header_of_digests(size, machine) + model.in_rank_order(size, nbytes, machine)


def in_one_chunk(size: int, nbytes: int, machine: Machine) -> float:
    """What "slices" would take without chunks."""
    return model.header_of_messages(size, machine) + model.one_chunk(size, nbytes, machine)


def first(true_from: Callable[[int], bool]) -> int | None:
    """Return the first power of two from which on something holds for all of them."""
    found = None
    for size in reversed(POWERS):
        if not true_from(size):
            break
        found = size
    return found


# Parts of the page


def _in_short(results: dict[str, Any]) -> str:
    one, many = cluster(results, 1), cluster(results, 64)
    lines = [
        *_short_header(one, many),
        *_short_choice(one),
    ]
    return "## In short\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def _short_header(one: Machine, many: Machine) -> Iterator[str]:
    ring, digests = (model.header_of_messages(LARGEST, one), model.header_of_digests(LARGEST, one))
    doubled = model.header_of_messages(LARGEST, one, model.bruck)
    yield (
        f"The header as it is, an allgather, takes {_time(model.header_of_messages(1024, one))} on 1,024 ranks and "
        f"**{_time(ring)} on {LARGEST:,}**, one a node; with 64 a node "
        f"{_time(header(1024, many))} and {_time(header(LARGEST, many))}. "
        f"On {LARGEST:,} ranks, {_time(LARGEST * one.slot)} of it are Python looking at slots."
    )
    yield (
        f"A header of digests would take {_time(digests)} there. The allgather takes more than twice that from "
        f"**{_count(_header_twice(one))} ranks** on ({_count(_header_twice(many))} with 64 a node), and more than ten times from "
        f"{_count(_header_times(one, 10))} ({_count(_header_times(many, 10))}). An allgather that never took the ring would "
        f"still take {_time(doubled)} on {LARGEST:,} ranks."
    )
    yield (
        f"An `MPI_Allreduce` of 8 bytes takes {_time(model.mpi_allreduce(1024, 8, one))} on 1,024 ranks in this model: "
        f"the header is more than twice that from {_count(_dearer_than_mpi(one))} ranks on. A slot of 256 bytes a rank is "
        f"{2 * MESSAGE_SLOT * LARGEST / 1e6:.0f} MB of memory for each of {LARGEST:,} ranks."
    )


def _short_choice(one: Machine) -> Iterator[str]:
    n = SIZES["100 MB"]
    yield (
        f'For 100 MB arraycomm chooses "slices", which take {_time(own(64, n, one))} on 64 ranks, {_time(own(1024, n, one))} '
        f"on 1,024 and {_time(own(LARGEST, n, one))} on {LARGEST:,}: each of 24 chunks has 2 (p − 1) latencies. Rabenseifner's way "
        f"takes {_time(model.by_halving(1024, n, one))} and {_time(model.by_halving(LARGEST, n, one))}."
    )
    yield (
        f"Without chunks the same way would take {_time(in_one_chunk(1024, n, one))} and {_time(in_one_chunk(LARGEST, n, one))}; the "
        f"best that keeps the order of ranks, with a header of digests, {_time(better(1024, n, one))} and {_time(better(LARGEST, n, one))}."
    )


def _rounds(one: Machine, many: Machine) -> str:
    names = (
        "pairwise",
        "ring",
        "bruck",
        "bruck_alltoall",
        "dissemination",
        "doubling",
        "rabenseifner",
    )
    rows = [
        [f"`{name}`", *(_played(name, size, one) for size in PLAYED), _played(name, 2048, many)]
        for name in names
    ]
    titles = ["closed ÷ played", *(f"{size:,}" for size in PLAYED), "2,048, 64 a node"]
    return f"""\
## The messages, played one by one

`docs/scaling_rounds.py` plays each schedule with a clock for every rank: who sends how many bytes to whom in
which round. A rank goes on when its message is sent and the one for it is there. The closed formula by the
time so played, for {PLAYED_BYTES >> 20} MiB on the machine assumed below:

{as_markdown(Table("", titles, rows))}
"""


def _played(name: str, size: int, machine: Machine) -> str:
    """Return the closed formula's time by the played one's."""
    played = rounds.play(getattr(rounds, name)(size, PLAYED_BYTES), size, machine)
    return f"{closed(name, size, machine) / played:.3f}"


def closed(name: str, size: int, machine: Machine) -> float:
    """Return what the closed formula of a schedule says, with its folds."""
    folding = {"doubling": model.by_doubling, "rabenseifner": model.by_halving}
    if name in folding:
        return folding[name](size, PLAYED_BYTES, machine)
    return model.seconds(getattr(model, name)(size, PLAYED_BYTES, machine.per_node), machine)


def _check(results: dict[str, Any]) -> str:
    machine = results["machine"]
    found = list(fit.predictions(results))
    return CHECK.format(
        machine=f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; MPICH "
        f"{results['versions']['mpich']}; {results['time'][:10]}",
        load=_load(results),
        runs=_listed(results["runs"].values()),
        parameters=as_markdown(_parameters(fit.fitted(results))),
        comparison=as_markdown(_comparison(found)),
        verdict=_verdict(found),
        pretended=max(PRETENDED["messages"]),
        alone=as_markdown(_alone(results)),
    )


def _load(results: dict[str, Any]) -> str:
    load = results["machine"]["load"]
    if load <= results["machine"]["cores"] / 2:
        return ""
    return (
        f"**Other programs ran at the same time** (load about {load:.0f}): the figures are rough, "
        "those of more ranks than cores most."
    )


def _parameters(here: fit.Here) -> Table:
    machine = here.machine
    rows = [
        ["λ, a call", _time(machine.call)],
        ["a further step of the board", _time(machine.step)],
        ["σ, a slot", _time(machine.slot)],
        ["φ, a row", _time(machine.row)],
        ["ψ, a part of a chunk", _time(machine.part)],
        ["a nonblocking collective, begun", _time(machine.begin)],
        ["1/γ, fold, in the cache", _rate(machine.fold_byte)],
        ["until a slot in shared memory is seen", _time(machine.seen)],
        ["another rank's slot, read", _rate(machine.seen_byte)],
        ["α, of a message between ranks, with Python's polls", _time(machine.near_latency)],
        ["1/β, of messages", _rate(machine.near_byte)],
        ["α, inside `MPI_Allreduce`", _time(here.mpi.near_latency)],
        ["1/β, inside `MPI_Allreduce`", _rate(here.mpi.near_byte)],
        *([f"a change of turns, {kind}", _time(turn)] for kind, turn in here.turn.items()),
    ]
    return Table("", ["", "fitted"], rows)


def _comparison(found: Sequence[fit.Prediction]) -> Table:
    names = {
        "shared": "shared memory",
        "messages": "messages",
        "mpi": "`MPI_Allreduce`",
    }
    rows = [
        [
            f"{names[p.kind]}, {size_text(p.nbytes)}, {p.ranks} ranks",
            p.way,
            _time(p.predicted) + (" (fitted)" if p.fitted else ""),
            _time(p.best),
            _time(p.median),
            ratio_text(p.predicted / p.best),
        ]
        for p in found
    ]
    titles = ["", "way", "predicted", "measured", "median", "predicted ÷ measured"]
    return Table("", titles, rows)


def _verdict(found: Sequence[fit.Prediction]) -> str:
    return " ".join(
        f"On {ranks} ranks predicted ÷ measured lies between {ratio_text(ratios[0])} and "
        f"{ratio_text(ratios[-1])}, in the middle at {ratio_text(ratios[len(ratios) // 2])}."
        for ranks in sorted({p.ranks for p in found})
        if (
            ratios := sorted(
                p.predicted / p.best for p in found if p.ranks == ranks and not p.fitted
            )
        )
    )


def _alone(results: dict[str, Any]) -> Table:
    machine = fit.fitted(results).machine
    here = replace(machine, near_latency=0.0, near_byte=0.0, fold_byte=0.0, begin=0.0)
    costs = {
        "header": ("header alone (a barrier)", model.header_of_messages),
        "small": ("allreduce of 8 bytes", lambda p, m: model.allreduce(p, 8, m, shared=False)),
        "slices": ("allreduce of 8 MiB, without messages and folded bytes", None),
    }
    rows = []
    for what, (title, cost) in costs.items():
        for size in PRETENDED["messages"][1:]:
            measured = results["alone"][f"messages {what} {size}"][fit.BEST]
            if cost is None:
                measured -= (size - 1) / size * (8 << 20) * machine.fold_byte
                predicted = model.allreduce(size, 8 << 20, here, shared=False)
            else:
                predicted = cost(size, here)
            rows.append(
                [
                    f"{title}, {size:,} ranks",
                    _time(predicted),
                    _time(measured),
                    ratio_text(predicted / measured),
                ]
            )
    return Table("", ["one rank's own work", "predicted", "measured", "ratio"], rows)


def _large(results: dict[str, Any]) -> str:
    one, many = cluster(results, 1), cluster(results, 64)
    text = LARGE.format(
        largest=LARGEST,
        alpha=one.latency * 1e6,
        bandwidth=1e-9 / one.per_byte,
        near_alpha=one.near_latency * 1e6,
        near_bandwidth=1e-9 / one.near_byte,
        fold=1e-9 / one.fold_byte,
    )
    parts = [text, "### The header\n", as_markdown(_headers(one, many))]
    for nodes, machine in (("one rank a node", one), ("64 ranks a node", many)):
        parts += [f"\n### What arraycomm chooses, and what would take less: {nodes}\n"]
        parts += [as_markdown(_choices(machine)), ""]
    return "\n".join(parts)


def _headers(one: Machine, many: Machine) -> Table:
    ways: dict[str, Callable[[int, Machine], float]] = {
        "as it is, with MPICH": header,
        "an allgather that always doubles": lambda p, m: model.header_of_messages(
            p, m, model.bruck
        ),
        "a reduction of digests (not built)": model.header_of_digests,
        "`MPI_Allreduce` of 8 B, for comparison": lambda p, m: model.mpi_allreduce(p, 8, m),
    }
    rows = [
        [f"{title}, {nodes}", *(_time(cost(size, machine)) for size in SHOWN)]
        for nodes, machine in (("one a node", one), ("64 a node", many))
        for title, cost in ways.items()
    ]
    return Table("", ["", *(f"{size:,}" for size in SHOWN)], rows)


def _choices(machine: Machine) -> Table:
    rows = []
    for title, nbytes in SIZES.items():
        chosen = (model.chosen(size, nbytes, on_one_node(size, machine)) for size in SHOWN)
        ways = ", then ".join(f'"{way}"' for way in dict.fromkeys(chosen))
        rows += [
            [f"{title}: {ways}", *(_time(own(size, nbytes, machine)) for size in SHOWN)],
            [
                f"{title}: best in rank order, digests (not built)",
                *(_time(better(size, nbytes, machine)) for size in SHOWN),
            ],
            [
                f"{title}: `MPI_Allreduce`",
                *(_time(model.mpi_allreduce(size, nbytes, machine)) for size in SHOWN),
            ],
        ]
    return Table("", ["", *(f"{size:,}" for size in SHOWN)], rows)


def _limits(results: dict[str, Any]) -> str:
    one, many = cluster(results, 1), cluster(results, 64)
    lines = [
        *_limits_of_slices(one, many),
        *_limits_of_order(many),
        *_limits_of_steps(many),
        *_limits_of_few(one, many),
        *_limits_of_headers(one),
    ]
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines) + "\n"


def _limits_of_slices(one: Machine, many: Machine) -> Iterator[str]:
    for title in ("64 KiB", "100 MB"):
        n = SIZES[title]
        yield (
            f'{title}: "slices" with its header takes more than twice as long as `MPI_Allreduce` from '
            f"{_twice(n, model.mpi_allreduce, one, many)}, and more than twice as long as the best "
            f"that keeps the order of the ranks from {_twice(n, better, one, many)}."
        )
    n = SIZES["100 MB"]
    yield (
        f"Chunks of 4 MiB are chosen for the cache of one node. Their latencies are a tenth of the time of 100 MB from "
        f"{_count(first(lambda p: _latencies(p, n, one) > 0.1 * own(p, n, one)))} ranks on, and half of it from "
        f"{_count(first(lambda p: _latencies(p, n, one) > 0.5 * own(p, n, one)))}. One chunk of everything has 24 times fewer: then "
        f'"slices" takes more than `MPI_Allreduce` twice over only from {_count(first(lambda p: in_one_chunk(p, n, one) > 2 * model.mpi_allreduce(p, n, one)))}.'
    )
    gained = (LARGEST - 1) * (one.latency - GAP) * 24
    yield (
        f"Where messages overlap, with a gap of {GAP * 1e6:g} µs between two, the all to all of 100 MB takes {_time(gained)} less "
        f"on {LARGEST:,} ranks, of {_time(own(LARGEST, n, one))}; the rings remain."
    )


def _limits_of_order(many: Machine) -> Iterator[str]:
    n = SIZES["100 MB"]
    yield (
        "With 64 ranks a node, slices send all ranks' elements over the node's link, while Rabenseifner's way has folded "
        f"those of a node before: on 256 ranks 100 MB take {_time(better(256, n, many))} at best in rank order, against "
        f"{_time(model.mpi_allreduce(256, n, many))}. A chain of nodes, each going on with the fold of the one before, "
        "would keep the order and send each byte over a link once; it is not in this model."
    )


def _limits_of_steps(many: Machine) -> Iterator[str]:
    n, size = 64 << 10, many.per_node
    steps, slices = (
        model.header_on_board(size, many) + way(size, n, many, True)
        for way in (model.in_steps, model.in_slices)
    )
    on_node = [p for p in POWERS if 2 <= p <= size]
    dearer = [p for p in on_node if model.in_steps(p, n, many, True) > model.in_slices(p, n, many)]
    yield (
        f'On one node every rank folds what all ranks show: 64 KiB on {size} ranks take {_time(steps)} by "steps", which is '
        f'chosen, and {_time(slices)} by "slices". Steps take more from {_count(min(dearer, default=None))} ranks on; the limit of '
        "16 steps does not depend on the ranks except by the size of a slot."
    )


def _limits_of_few(one: Machine, many: Machine) -> Iterator[str]:
    n = SIZES["64 KiB"]
    yield (
        f"On {LARGEST:,} ranks Python's part of the best for 64 KiB is {_time(LARGEST * one.part)} of {_time(better(LARGEST, n, one))}: "
        f"a NumPy call and some bookkeeping for each rank. It is half of the time from {_count(first(lambda p: p * one.part > 0.5 * better(p, n, one)))} ranks on. "
        "No algorithm mends that while rows are folded one by one in Python."
    )
    yield (
        "With `reproducible=False`, and for integers and bit operations, whose results do not depend on the "
        "order, MPI's own reduction may stand in; arraycomm does not use it today: "
        f"8 bytes on {LARGEST:,} ranks take {_time(own(LARGEST, 8, one))}, and would take "
        f"{_time(model.header_of_digests(LARGEST, one) + model.mpi_allreduce(LARGEST, 8, one))} with a header of digests."
    )
    yield (
        "`MPI_Ialltoall` with equal slices takes few rounds in MPICH for slices of up to 2 KiB, `MPI_Ialltoallv`, which "
        f"arraycomm calls, never. A chunk of 4 MiB has such slices from {CHUNK_BYTES // 2048:,} ranks on, 64 KiB from 32."
    )


def _limits_of_headers(one: Machine) -> Iterator[str]:
    odd = model.header_of_messages(1000, one)
    yield (
        f"The ring is a matter of the MPI's choice: 1,000 ranks take {_time(odd)} for a header, 1,024 take "
        f"{_time(model.header_of_messages(1024, one))}."
    )
    yield (
        "Arrays of up to 128 bytes travel with the header between nodes. A header of digests has no room for them: "
        "they would need a movement of their own, as the green curves have it."
    )
    yield (
        "Not in the model: contention between nodes, noise of the operating system, ranks that arrive late, "
        "the memory of buffers, the time to set a job up."
    )


# Where curves cross


def _header_times(machine: Machine, times: float) -> int | None:
    return first(lambda p: header(p, machine) > times * model.header_of_digests(p, machine))


def _header_twice(machine: Machine) -> int | None:
    return _header_times(machine, 2)


def _dearer_than_mpi(machine: Machine) -> int | None:
    return first(
        lambda p: model.header_of_messages(p, machine) > 2 * model.mpi_allreduce(p, 8, machine)
    )


def _twice(nbytes: int, other: Compared, one: Machine, many: Machine) -> str:
    """Say from how many ranks on arraycomm takes twice as long as another way."""
    from_one, from_many = (
        first(lambda p, m=machine: own(p, nbytes, m) > 2 * other(p, nbytes, m))
        for machine in (one, many)
    )
    return f"{_count(from_one)} ranks on ({_count(from_many)} with 64 a node)"


def _latencies(size: int, nbytes: int, machine: Machine) -> float:
    return -(-nbytes // CHUNK_BYTES) * 2 * (size - 1) * machine.latency


def _ring_from(*, even: bool) -> int:
    return (model.RING_FROM if even else model.RING_FROM_ODD) // MESSAGE_SLOT


# Texts


def _time(seconds: float) -> str:
    unit, scale = next(
        ((u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if seconds * s >= 1), ("ns", 1e9)
    )
    return f"{number_text(seconds * scale)} {unit}"


def _listed(numbers: Iterable[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"


def _rate(per_byte: float) -> str:
    return f"{number_text(1e-9 / per_byte)} GB/s" if per_byte > 0 else "not measurable"


def _count(ranks: int | None) -> str:
    return "no number of" if ranks is None else f"{ranks:,}"


if __name__ == "__main__":
    sys.exit(main())
