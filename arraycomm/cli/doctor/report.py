"""What the doctor has found, laid out for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from statistics import median
from textwrap import fill
from typing import Any, Final

from arraycomm.cli.doctor.advice import fault_tolerance

Findings = dict[str, Any]
Row = Sequence[str]

_CONNECTIONS: Final = {"mpi": "MPI", "processes": "memory of one node, without MPI"}
# As many ranks as have room in a line.
_MATRIX: Final = 12
_WIDTH: Final = 80


def as_text(found: Findings) -> str:
    """Return the sections one below the other, each with aligned columns."""
    sections = [
        _section("MPI", _about_mpi(found["mpi"])),
        _section("Ranks", _about_ranks(found)),
        _section("Machine", _about_machine(found["machine"])),
        _section("Frameworks", _about_frameworks(found["frameworks"])),
    ]
    if found.get("pairs"):
        title = "Allreduce of 8 bytes between two ranks, in microseconds"
        sections.append(_section(title, _about_pairs(found["pairs"], len(found["ranks"]))))
    advice = found["advice"] or ["nothing is wrong"]
    sections.append("\n".join(["Advice", *(_filled("  ", line, 4) for line in advice)]))
    return f"arraycomm {found['version']}\n\n" + "\n\n".join(sections)


def _section(title: str, rows: Iterator[Row]) -> str:
    lines = [[cell or "-" for cell in row] for row in rows]
    columns = max(map(len, lines))
    padded = [[*line, *[""] * (columns - len(line))] for line in lines]
    # What stands last in its line goes on in further lines.
    widths = [
        max(
            (len(p[i]) for p, line in zip(padded, lines, strict=True) if i < len(line) - 1),
            default=0,
        )
        for i in range(columns)
    ]
    texts = []
    for line in lines:
        begin = "".join(f"{c.ljust(w)}  " for c, w in zip(line[:-1], widths, strict=False))
        texts.append(_filled(f"  {begin}", line[-1]))
    return "\n".join([title, *texts])


def _filled(begin: str, text: str, indent: int = 0) -> str:
    """Return a text in lines that fit a terminal, each below the beginning of the first."""
    return fill(
        text,
        _WIDTH,
        initial_indent=begin,
        subsequent_indent=" " * (indent or len(begin)),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _about_mpi(mpi: Findings) -> Iterator[Row]:
    if "library" in mpi:
        yield "library", mpi["library"]
        yield "file", mpi["file"]
        yield "ABI", mpi["family"]
    if "error" in mpi:
        yield "error", mpi["error"]
    else:
        yield "mpi4py", mpi["mpi4py"]
        yield "threads", mpi["threads"]
        yield "GPU-aware", "yes" if mpi["gpu_aware"] else "no"
        yield "fault tolerance", fault_tolerance(mpi)
    if "launcher" in mpi:
        yield "launcher", mpi["launcher"] or "none that belongs to this MPI"


def _about_ranks(found: Findings) -> Iterator[Row]:
    ranks: list[Findings] = found["ranks"]
    nodes = {rank["node"] for rank in ranks}
    yield "started by", found["started_by"]
    if "backend" in found:
        backend: str = found["backend"]
        yield "connected by", _CONNECTIONS.get(backend, backend)
    yield "ranks", f"{len(ranks)} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}"
    for place, alike in groupby(enumerate(ranks), key=lambda item: item[1]):
        numbers = [rank for rank, _ in alike]
        bound = len(place["cores"]) < place["of"]
        yield (
            f"rank{'s' if len(numbers) > 1 else ''} {_spans(numbers)}",
            place["node"],
            f"{'bound to core' if bound else 'any of cores'} {_spans(place['cores'])}",
            f"OMP_NUM_THREADS={place['threads']}"
            if place["threads"]
            else "OMP_NUM_THREADS not set",
        )


def _spans(numbers: Sequence[int]) -> str:
    """Name consecutive numbers by the first and the last."""
    runs = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    spans = ([number for _, number in run] for _, run in runs)
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)


def _about_machine(machine: Findings) -> Iterator[Row]:
    yield "Python", machine["python"]
    yield "system", machine["system"]
    shared = machine["shared_memory"]
    if shared is not None:
        size, free = (f"{shared[key] / (1 << 20):.0f} MiB" for key in ("bytes", "free"))
        yield "shared memory", f"{shared['path']}: {size}, of which {free} are free"
    yield "CUDA", machine["cuda"]
    yield "NCCL", machine["nccl"]
    native = machine["native"]
    yield "native part", native["level"] if native["used"] else f"not used: {native['reason']}"


def _about_frameworks(frameworks: list[Findings]) -> Iterator[Row]:
    yield "framework", "version", "arrays on", "read", "transposed", "result"
    for row in frameworks:
        name = row["framework"]
        if not row["installed"]:
            yield name, "not installed"
        elif "error" in row:
            yield name, row.get("version", ""), row["error"]
        else:
            counts = (row[key] for key in ("copies", "copies_transposed", "copies_of_result"))
            yield name, row["version"], row["on"], *map(_copies, counts)


def _copies(count: int) -> str:
    return {0: "no copy", 1: "1 copy"}.get(count, f"{count} copies")


def _about_pairs(pairs: list[Findings], size: int) -> Iterator[Row]:
    times = {tuple(pair["ranks"]): pair.get("seconds") for pair in pairs}
    if size > _MATRIX:
        worked = sorted(t for t in times.values() if t is not None)
        yield "fastest", _micros(worked[0] if worked else None)
        yield "median", _micros(median(worked) if worked else None)
        yield "slowest", _micros(worked[-1] if worked else None)
        return
    yield "rank", *map(str, range(size))
    for a in range(size):
        yield str(a), *("" if a == b else _micros(times[min(a, b), max(a, b)]) for b in range(size))


def _micros(seconds: float | None) -> str:
    return "failed" if seconds is None else f"{seconds * 1e6:.1f}"
