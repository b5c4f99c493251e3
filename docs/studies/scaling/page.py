# ruff: noqa: RUF001 - formulas have Greek letters
"""The text, the tables and the figure of docs/scaling.md, from the stored measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from arraycomm.cli.bench.tables import Table, as_markdown, ratio_text, size_text
from docs.studies.figure import Axis, Curve, Panel, figure
from docs.studies.scaling import fit, model, rounds
from docs.studies.scaling.findings import in_short, limits
from docs.studies.scaling.formats import listed, rate_text, time_text
from docs.studies.scaling.large import (
    LARGEST,
    NODES,
    POWERS,
    SIZES,
    better,
    cluster,
    header,
    on_one_node,
    own,
)
from docs.studies.scaling.measure import PRETENDED
from docs.studies.scaling.model import Machine
from docs.studies.scaling.real import COLLECTIVE_BYTES, Sent, Simulated
from docs.studies.scaling.texts import (
    CHECK,
    INTRODUCTION,
    LARGE,
    MODEL,
    REAL,
    SIMULATION,
    SOURCES,
)

STUDY: Final = Path(__file__).resolve().parent
MEASURED: Final = STUDY / "measured.json"
SIMULATED: Final = STUDY / "simulated.json"
FIGURE: Final = STUDY / "figure.svg"
PAGE: Final = STUDY.parents[1] / "scaling.md"

# The numbers of ranks in the columns of the tables.
SHOWN: Final = (64, 256, 1024, 2048, 4096, 16384, 131072)
PLAYED: Final = (2, 3, 8, 100, 1000, 2048)
PLAYED_BYTES: Final = 4 << 20


def stored() -> dict[str, Any]:
    """Return the measurements."""
    results: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return results


def simulated() -> tuple[list[Simulated], list[Sent]]:
    """Return what the library sent on simulated ranks: its allreduces, and other collectives."""
    calls = json.loads(SIMULATED.read_text(encoding="utf-8"))
    others = [Sent(**call) for call in calls["others"]]
    return [Simulated(**call) for call in calls["allreduce"]], others


def written(results: dict[str, Any]) -> str:
    """Return the page."""
    return "\n".join(
        [
            INTRODUCTION.format(largest=LARGEST),
            in_short(results),
            MODEL,
            _rounds(cluster(results, 1), cluster(results, 64)),
            _real(results),
            _check(results),
            _large(results),
            limits(results),
            SOURCES,
        ]
    )


def drawn(results: dict[str, Any]) -> str:
    """Return the figure."""
    legend = [
        ("own", "arraycomm, with its header"),
        ("header", "the header alone"),
        ("better", "fastest by slices or by gathering (not built)"),
        ("mpi", "MPI_Allreduce: doubling or Rabenseifner"),
    ]
    panels = [
        _panel(f"{size}, {nodes}", n, cluster(results, s))
        for nodes, s in NODES.items()
        for size, n in SIZES.items()
    ]
    axis = Axis("ranks", lambda ranks: f"{ranks:,.0f}")
    return figure("Time of an allreduce by ranks", legend, panels, axis)


def _panel(title: str, nbytes: int, machine: Machine) -> Panel:
    curves = {
        "header": lambda p: header(p, machine),
        "mpi": lambda p: model.mpi_allreduce(p, nbytes, machine),
        "better": lambda p: better(p, nbytes, machine),
        "own": lambda p: own(p, nbytes, machine),
    }
    return Panel(
        title, [Curve(style, [(p, cost(p)) for p in POWERS]) for style, cost in curves.items()]
    )


# Parts of the page


def _rounds(one: Machine, many: Machine) -> str:
    names = (
        "pairwise",
        "ring",
        "bruck",
        "bruck_alltoall",
        "doubling",
        "rabenseifner",
    )
    rows = [
        [f"`{name}`", *(_played(name, size, one) for size in PLAYED), _played(name, 2048, many)]
        for name in names
    ]
    titles = ["closed ÷ simulated", *(f"{size:,}" for size in PLAYED), "2,048, 64 a node"]
    return SIMULATION.format(
        mebibytes=PLAYED_BYTES >> 20, table=as_markdown(Table("", titles, rows))
    )


def _played(name: str, size: int, machine: Machine) -> str:
    """Return the time by the closed formula, divided by the simulated one."""
    played = rounds.play(getattr(rounds, name)(size, PLAYED_BYTES), size, machine)
    return f"{closed(name, size, machine) / played:.3f}"


def closed(name: str, size: int, machine: Machine) -> float:
    """Return what the closed formula of a schedule says, with its folds."""
    folding = {"doubling": model.by_doubling, "rabenseifner": model.by_halving}
    if name in folding:
        return folding[name](size, PLAYED_BYTES, machine)
    return model.seconds(getattr(model, name)(size, PLAYED_BYTES, machine.per_node), machine)


def _real(results: dict[str, Any]) -> str:
    calls, others = simulated()
    machines = {nodes: cluster(results, nodes) for nodes in {call.per_node for call in calls}}
    rows = [
        [
            f"{call.algorithm}, {size_text(call.nbytes)}, {call.ranks:,} ranks"
            + (f", {call.per_node} a node" if call.per_node > 1 else ""),
            f"{call.messages:,}",
            _quotient(model.messages(call.movement()), call.messages),
            f"{call.leaving:,}",
            f"{call.sent:,}",
            _quotient(model.sent_bytes(call.movement()), call.sent),
            time_text(call.seconds),
            _quotient(call.predicted(machines[call.per_node]), call.seconds),
        ]
        for call in calls
        # Not the headers in shared memory, that take nothing.
        if call.messages or call.seconds
    ]
    titles = ["", "messages a rank", "÷", "between nodes", "bytes a rank", "÷", "time", "÷"]
    return REAL.format(
        largest=max(call.ranks for call in calls),
        table=as_markdown(Table("", titles, rows)),
        kibibytes=COLLECTIVE_BYTES >> 10,
        others=as_markdown(_others(others)),
    )


def _others(calls: Sequence[Sent]) -> Table:
    sizes = sorted({call.ranks for call in calls})
    rows = []
    for name in model.COLLECTIVES:
        found = {call.ranks: call for call in calls if call.collective == name}
        ratios = sorted({_quotient(call.formula(), call.messages) for call in found.values()})
        counts = [f"{found[size].messages:,}" for size in sizes]
        rows.append([f"`{name}`", *counts, "–".join(ratios)])
    return Table("", ["messages", *(f"{size:,}" for size in sizes), "formula ÷"], rows)


def _quotient(formula: float, found: float) -> str:
    """Return what a formula says, divided by what was found; nothing, if both are nothing."""
    return "–" if formula == found == 0 else f"{formula / found:.3f}"


def _check(results: dict[str, Any]) -> str:
    machine = results["machine"]
    found = list(fit.predictions(results))
    return CHECK.format(
        machine=f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; MPICH "
        f"{results['versions']['mpich']}; {results['time'][:10]}",
        load=_load(results),
        runs=listed(results["runs"].values()),
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
        "most of all those with more ranks than cores."
    )


def _parameters(here: fit.Here) -> Table:
    machine = here.machine
    rows = [
        ["λ, a call", time_text(machine.call)],
        ["a further step of the control channel", time_text(machine.step)],
        ["σ, a slot", time_text(machine.slot)],
        ["φ, a row", time_text(machine.row)],
        ["ψ, a part of a chunk", time_text(machine.part)],
        ["starting a nonblocking collective", time_text(machine.begin)],
        ["beginning a message and waiting for it", time_text(machine.message)],
        ["a turn of a chain", time_text(machine.turn)],
        ["… for each rank of the node", time_text(machine.lane)],
        ["… for each further share of a chunk", time_text(machine.share)],
        ["a chunk over a grid, for each rank of the row and the column", time_text(machine.entry)],
        ["… for each row that is folded", time_text(machine.piece)],
        ["1/γ, fold, in the cache", rate_text(machine.fold_byte)],
        ["until others see a slot in shared memory", time_text(machine.seen)],
        ["reading another rank's slot", rate_text(machine.seen_byte)],
        ["α, of a message between ranks, with Python's polls", time_text(machine.near_latency)],
        ["1/β, of messages", rate_text(machine.near_byte)],
        ["α, inside `MPI_Allreduce`", time_text(here.mpi.near_latency)],
        ["1/β, inside `MPI_Allreduce`", rate_text(here.mpi.near_byte)],
        *([f"a change of turns, {kind}", time_text(turn)] for kind, turn in here.turn.items()),
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
            p.algorithm,
            time_text(p.predicted) + (" (fitted)" if p.fitted else ""),
            time_text(p.best),
            time_text(p.median),
            ratio_text(p.predicted / p.best),
        ]
        for p in found
    ]
    titles = ["", "algorithm", "predicted", "measured", "median", "predicted ÷ measured"]
    return Table("", titles, rows)


def _verdict(found: Sequence[fit.Prediction]) -> str:
    return " ".join(
        f"On {ranks} ranks predicted ÷ measured lies between {ratio_text(ratios[0])} and "
        f"{ratio_text(ratios[-1])}, with the median at {ratio_text(ratios[len(ratios) // 2])}."
        for ranks in sorted({p.ranks for p in found})
        if (
            ratios := sorted(
                p.predicted / p.best for p in found if p.ranks == ranks and not p.fitted
            )
        )
    )


def _alone(results: dict[str, Any]) -> Table:
    machine = fit.alone(results)
    here = replace(machine, near_latency=0.0, near_byte=0.0, fold_byte=0.0, begin=0.0)
    costs = {
        "header": ("header alone (a barrier)", model.header_of_messages),
        "small": ("allreduce of 8 bytes", lambda p, m: model.allreduce(p, 8, m, shared=False)),
        "slices": ("allreduce of 8 MiB, without messages and the bytes folded", None),
    }
    rows = []
    for what, (title, cost) in costs.items():
        for size in PRETENDED["messages"][1:]:
            measured = results["alone"][f"messages {what} {size}"][fit.BEST]
            if cost is None:
                measured -= (size - 1) / size * (8 << 20) * machine.fold_byte
                # One process that pretends does not let chunks overlap.
                predicted = model.header_of_messages(size, here)
                predicted += model.in_slices(size, 8 << 20, here, shared=True)
            else:
                predicted = cost(size, here)
            rows.append(
                [
                    f"{title}, {size:,} ranks",
                    time_text(predicted),
                    time_text(measured),
                    ratio_text(predicted / measured),
                ]
            )
    return Table("", ["work of one rank", "predicted", "measured", "ratio"], rows)


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
    parts += ["\n### Broadcast, one rank a node\n", as_markdown(_broadcasts(one))]
    for nodes, machine in (("one rank a node", one), ("64 ranks a node", many)):
        parts += [f"\n### Allreduce, {nodes}\n"]
        parts += [as_markdown(_choices(machine)), ""]
    return "\n".join(parts)


def _broadcasts(machine: Machine) -> Table:
    schedules = {
        "chain or tree": model.broadcast,
        "parts by a tree, then a ring": model.scattered_and_gathered,
    }
    rows = [
        [
            f"{size_name}: {name}",
            *(time_text(model.seconds(schedule(size, nbytes), machine)) for size in SHOWN),
        ]
        for size_name, nbytes in {"1 MiB": 1 << 20, "100 MB": 100_000_000}.items()
        for name, schedule in schedules.items()
    ]
    return Table("", ["", *(f"{size:,}" for size in SHOWN)], rows)


def _headers(one: Machine, many: Machine) -> Table:
    costs: dict[str, Callable[[int, Machine], float]] = {
        "header": header,
        "`MPI_Allreduce` of 8 B, for comparison": lambda p, m: model.mpi_allreduce(p, 8, m),
    }
    rows = [
        [f"{title}, {nodes}", *(time_text(cost(size, machine)) for size in SHOWN)]
        for nodes, machine in (("one a node", one), ("64 a node", many))
        for title, cost in costs.items()
    ]
    return Table("", ["", *(f"{size:,}" for size in SHOWN)], rows)


def _choices(machine: Machine) -> Table:
    rows = []
    for title, nbytes in SIZES.items():
        per_node = machine.per_node
        chosen = (
            model.chosen(size, nbytes, on_one_node(size, machine), per_node) for size in SHOWN
        )
        algorithms = ", then ".join(f'"{algorithm}"' for algorithm in dict.fromkeys(chosen))
        rows += [
            [f"{title}: {algorithms}", *(time_text(own(size, nbytes, machine)) for size in SHOWN)],
            [
                f"{title}: fastest by slices or by gathering (not built)",
                *(time_text(better(size, nbytes, machine)) for size in SHOWN),
            ],
            [
                f"{title}: `MPI_Allreduce`",
                *(time_text(model.mpi_allreduce(size, nbytes, machine)) for size in SHOWN),
            ],
        ]
    return Table("", ["", *(f"{size:,}" for size in SHOWN)], rows)
