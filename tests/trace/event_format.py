"""What Chrome's Trace Event Format asks of a file, as far as traces of arraycomm use it.

By its document: a JSON object with `traceEvents`; each event has `name`, `ph`, `pid`, `tid` and `ts`, a number
of microseconds. Complete events (X) have `dur`. Metadata events (M) have a name that is known, and the
argument that belongs to it. Flow events begin (s) and end (f) in pairs of the same name, category and id;
each lies in a slice of its row, to which it is bound: an `f` with `bp` "e" to the slice around it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import pairwise
from typing import Any, Final

Event = dict[str, Any]

_EVERY: Final = {"name": str, "ph": str, "pid": int, "tid": int, "ts": float}
_FURTHER: Final[dict[str, dict[str, type]]] = {
    "M": {"args": dict},
    "X": {"cat": str, "dur": float},
    "s": {"cat": str, "id": int},
    "f": {"cat": str, "id": int, "bp": str},
}
_METADATA: Final = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
# Half a nanosecond, in microseconds.
_ROUNDING: Final = 5e-4


def check_format(trace: dict[str, Any]) -> None:
    """Fail if a trace does not follow the format."""
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    events = trace["traceEvents"]
    for event in events:
        _check_fields(event)
    # Viewers do not ask for it, but whoever reads a part of the file does.
    for before, after in pairwise(events):
        assert before["ts"] <= after["ts"], (before, after)
    slices = _rows(events)
    _check_names(events, slices)
    for row in slices.values():
        _check_nesting(row)
    _check_flows(events, slices)


def _check_fields(event: Event) -> None:
    wanted = _EVERY | _FURTHER[event["ph"]]
    assert set(wanted) <= set(event) <= {*wanted, "args"}, event
    for name, kind in wanted.items():
        value = event[name]
        if kind is float:
            assert type(value) in (int, float), event
            assert math.isfinite(value), event
            assert value >= 0, event
        else:
            assert type(value) is kind, event
    assert type(event.get("args", {})) is dict
    assert event.get("bp", "e") == "e"
    if event["ph"] == "M":
        argument, kind = _METADATA[event["name"]]
        assert {name: type(value) for name, value in event["args"].items()} == {argument: kind}


def _rows(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append(event)
    return rows


def _check_names(events: list[Event], slices: dict[tuple[int, int], list[Event]]) -> None:
    """Each process that has slices has one name, and so has each of its rows."""
    for name, parts in (("process_name", 1), ("thread_name", 2)):
        found = [(e["pid"], e["tid"])[:parts] for e in events if e["name"] == name]
        assert len(found) == len(set(found))
        assert {row[:parts] for row in slices} <= set(found)


def _check_nesting(row: list[Event]) -> None:
    """No two slices of a row overlap, unless one lies in the other."""
    times = sorted((e["ts"], -e["dur"]) for e in row)
    open_until: list[float] = []
    for start, negative in times:
        end = start - negative
        while open_until and open_until[-1] <= start + _ROUNDING:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + _ROUNDING, row
        open_until.append(end)


def _check_flows(events: list[Event], slices: dict[tuple[int, int], list[Event]]) -> None:
    ends: dict[str, dict[tuple[str, str, int], Event]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            key = (event["name"], event["cat"], event["id"])
            assert key not in ends[event["ph"]], event
            ends[event["ph"]][key] = event
            row = slices[event["pid"], event["tid"]]
            assert any(
                e["ts"] - _ROUNDING <= event["ts"] <= e["ts"] + e["dur"] + _ROUNDING for e in row
            ), event
    assert set(ends["s"]) == set(ends["f"])
    for key, begun in ends["s"].items():
        assert begun["ts"] <= ends["f"][key]["ts"], key
