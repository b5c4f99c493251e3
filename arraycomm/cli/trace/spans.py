"""The calls of a trace, as its file has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Span(NamedTuple):
    """A call or a message of one rank; times are seconds from the beginning of the trace.

    `last` is the rank for which this one waited, or -1; `absent` are the ranks that never came.
    """

    rank: int
    row: int
    kind: str
    operation: str
    start: float
    end: float
    line: str
    nbytes: int
    algorithm: str
    waiting: float
    transfer: float
    last: int
    absent: tuple[int, ...]
    error: str


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """Return the calls of a trace, by the time at which they began."""
    return sorted(_spans(trace), key=lambda span: span.start)


def ranks_of(trace: dict[str, Any]) -> list[int]:
    """Return the ranks whose calls are in a trace."""
    return list(trace["otherData"]["arraycomm"]["ranks"])


def _spans(trace: dict[str, Any]) -> Iterator[Span]:
    for event in trace["traceEvents"]:
        if event["ph"] != "X" or "args" not in event:
            continue
        facts, start = event["args"], event["ts"] / 1e6
        yield Span(
            rank=event["pid"],
            row=event["tid"],
            kind=event["cat"],
            operation=event["name"],
            start=start,
            end=start + event["dur"] / 1e6,
            line=facts["line"],
            nbytes=facts["bytes"],
            algorithm=facts["algorithm"],
            waiting=facts["waiting (µs)"] / 1e6,
            transfer=facts["transfer (µs)"] / 1e6,
            last=facts.get("waited for rank", -1),
            absent=tuple(facts.get("absent ranks", ())),
            error=facts.get("error", ""),
        )
