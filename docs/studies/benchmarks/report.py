"""The benchmark's results as tables: one for each dtype and framework, a line for each size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from arraycomm.cli.bench.results import number_text, ratio_text
from docs.studies.benchmarks.results import REFERENCES, Line, name_of
from docs.studies.benchmarks.results import TITLES as TITLES_OF_ARRAYS
from docs.studies.tables import Table

# In the order of the columns.
TITLES: Final = {
    **{key: title for key, title in TITLES_OF_ARRAYS.items() if key not in REFERENCES},
    "step": "arraycomm, DistributedOptimizer",
    "local": "no communication",
    "jit": "arraycomm, jit",
    "jit-donated": "arraycomm, jit of a donated x",
    "optax": "arraycomm, optax",
    **{key: title for key, title in TITLES_OF_ARRAYS.items() if key in REFERENCES},
    "ddp": "DistributedDataParallel, gloo",
    "mpi4jax": "mpi4jax",
}

# One contender's part in a line, as `Entry.as_dict` returns it.
StoredEntry = dict[str, Any]
ARRAYS: Final = {
    "numpy": "NumPy arrays",
    "torch": "torch tensors",
    "jax": "JAX arrays",
    "cupy": "CuPy arrays",
}
_UNITS: Final = {
    "latency": ("µs per call", 1e6),
    "calls": ("µs per call", 1e6),
    "bandwidth": ("ms per call (GB/s)", 1e3),
    "trees": ("ms per tree (GB/s)", 1e3),
    "train": ("ms per step", 1e3),
    "jax": ("µs per call", 1e6),
}
_SUBJECTS: Final = {
    "calls": "Each call, {}",
    "trees": "Trees of {}",
    "train": "Training in {}",
    "jax": "Compiled programs of {}",
}
_FIRST_COLUMN: Final = {"calls": "call", "trees": "tree", "train": "model", "jax": "program"}
_WITH_BANDWIDTH: Final = frozenset(("bandwidth", "trees"))
# Modes whose contenders differ in what they do, so that each is compared with the references.
_ALL_COMPARED: Final = frozenset(("jax",))
_OWN: Final = (
    *("out", "fresh", "unchecked", "plan", "tree", "step"),
    *("jit", "jit-donated", "optax"),
)
_NOT_TIMED: Final = {"unsupported": "–", "wrong": "wrong", "error": "error"}


def tables(lines: Sequence[Line], ranks: int) -> Iterator[Table]:
    """Return the tables of the lines, in the lines' order."""
    groups: dict[tuple[str, str, str], list[Line]] = {}
    for line in lines:
        for framework in dict.fromkeys(entry["framework"] for entry in line["contenders"]):
            groups.setdefault((line["mode"], line["dtype"], framework), []).append(line)
    for (mode, dtype, framework), group in groups.items():
        unit, scale = _UNITS[mode]
        title = f"{subject(mode, dtype)}, {ARRAYS[framework]}, {ranks} ranks: {unit}"
        yield _table(title, group, framework, scale)


def subject(mode: str, dtype: str) -> str:
    """Say what the lines of a mode and a dtype are about."""
    return _SUBJECTS.get(mode, "{}").format(dtype)


def find(line: Line, framework: str, key: str) -> StoredEntry | None:
    """Return a contender's part in a line, or None if it took none."""
    matching = (e for e in line["contenders"] if (e["framework"], e["key"]) == (framework, key))
    return next(matching, None)


def complaints(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for each contender that gave a wrong result, or none."""
    return [
        f"{TITLES[entry['key']]} with {ARRAYS[entry['framework']]}, {line['dtype']}, "
        f"{name_of(line)}: {entry['reason']}"
        for line in lines
        for entry in line["contenders"]
        if entry["status"] in {"wrong", "error"}
    ]


def _table(title: str, lines: Sequence[Line], framework: str, scale: float) -> Table:
    present = {
        e["key"] for line in lines for e in line["contenders"] if e["framework"] == framework
    }
    keys = [key for key in TITLES if key in present]
    mode = lines[0]["mode"]
    pairs = comparisons(mode, keys)
    compared = [(own, other) for own, other in pairs if _any(lines, framework, other)]
    header = [
        _FIRST_COLUMN.get(mode, "size"),
        *(TITLES[key] for key in keys),
        *(f"{TITLES[own].removeprefix('arraycomm, ')} ÷ {other}" for own, other in compared),
    ]
    rows = [
        [
            name_of(line),
            *(_time(line, find(line, framework, key), scale) for key in keys),
            *(_ratio(find(line, framework, own), other) for own, other in compared),
        ]
        for line in lines
    ]
    return Table(title, header, rows)


def comparisons(mode: str, keys: Sequence[str]) -> list[tuple[str, str]]:
    """Pair arraycomm's first contender of these keys, in some modes each, with each reference."""
    own = [key for key in _OWN if key in keys]
    first = own if mode in _ALL_COMPARED else own[:1]
    return [(key, other) for key in first for other in REFERENCES if other in keys]


def _any(lines: Sequence[Line], framework: str, key: str) -> bool:
    """Return whether a contender was timed in any of the lines."""
    entries = (find(line, framework, key) for line in lines)
    return any(entry is not None and entry["status"] == "ok" for entry in entries)


def _time(line: Line, entry: StoredEntry | None, scale: float) -> str:
    if entry is None:
        return "–"
    if entry["status"] != "ok":
        return _NOT_TIMED[entry["status"]]
    text = number_text(entry["median"] * scale)
    if line["mode"] in _WITH_BANDWIDTH:
        return f"{text} ({number_text(line['nbytes'] / entry['median'] / 1e9)})"
    return text


def _ratio(entry: StoredEntry | None, other: str) -> str:
    if entry is None or other not in entry.get("ratios", {}):
        return "–"
    return ratio_text(entry["ratios"][other])
