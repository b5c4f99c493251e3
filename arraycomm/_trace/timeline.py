"""All ranks' parts as one timeline in the Trace Event Format, which Chrome and Perfetto draw."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from arraycomm._protocol.mismatch import name_ranks
from arraycomm._trace.clocks import corrected
from arraycomm._trace.records import (
    BLOCKING,
    CALL,
    ISEND,
    MESSAGES,
    REQUEST,
    SEND,
    WAIT,
    Part,
    Record,
)

Event = dict[str, Any]
# A communicator of the family, by its name and its ranks.
_Group = tuple[str, tuple[int, ...]]

_SENDS: Final = (SEND, ISEND)
# The row of a rank's blocking calls; what overlaps with them, and with one another, has further
# rows.
_MAIN: Final = 0


@dataclass
class Span:
    """A record in the time of rank 0, and what other ranks have to do with it.

    Times are nanoseconds.
    """

    rank: int
    record: Record
    group: _Group
    start: int
    # When this rank was ready for the others.
    posted: int
    end: int
    # When the last of the others was ready, and which rank that is; -1 if nobody was waited for.
    ready: int
    last: int = -1
    # Ranks that have no record of the call, which has failed here.
    absent: tuple[int, ...] = ()
    # The other end of a message.
    peer: Span | None = None
    # Its row in the drawing of its rank.
    lane: int = _MAIN

    @property
    def waiting(self) -> int:
        """Nanoseconds for which this rank has waited for the last one."""
        return self.ready - self.posted


def timeline(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the trace of these parts as an object of the Trace Event Format."""
    spans = sorted(_spans(parts), key=lambda span: (span.start, -span.end))
    _match_calls(spans)
    _match_messages(spans)
    _lay_out(spans)
    origin = min((span.start for span in spans), default=0)
    events = [*_metadata(parts, spans), *sorted(_events(spans, origin), key=_order)]
    about = {
        "size": max((part.size for part in parts), default=0),
        "ranks": [part.rank for part in parts],
        "dropped": {str(part.rank): part.dropped for part in parts if part.dropped},
        "clocks": {str(part.rank): [clock._asdict() for clock in part.clocks] for part in parts},
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"arraycomm": about}}


def _spans(parts: Iterable[Part]) -> Iterator[Span]:
    for part in parts:
        groups = [(name, tuple(ranks)) for name, ranks in part.groups]
        for record in part.records:
            start, end = (corrected(t, part.clocks) for t in (record.started, record.ended))
            posted = corrected(record.posted, part.clocks) if record.posted else start
            ready = corrected(record.agreed, part.clocks) if record.agreed else posted
            if record.kind == WAIT:
                ready = end
            yield Span(part.rank, record, groups[record.group], start, posted, end, ready)


# Who waited for whom


def _match_calls(spans: Iterable[Span]) -> None:
    """Find for each collective call the rank that was ready last."""
    calls: defaultdict[tuple[_Group, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.record.kind in (CALL, REQUEST) and span.record.posted:
            calls[span.group, span.record.step].append(span)
    for (group, _), together in calls.items():
        absent = tuple(sorted(set(group[1]) - {span.rank for span in together}))
        last = max(together, key=lambda span: span.posted)
        for span in together:
            if span.record.agreed:
                if span is not last:
                    span.ready, span.last = _within(span, last.posted), last.rank
                else:
                    span.ready = span.posted
            elif span.record.error:
                span.ready, span.absent = span.end, absent


def _match_messages(spans: Iterable[Span]) -> None:
    """Find the two ends of each message: those between two ranks with one tag arrive in order."""
    sends: defaultdict[Any, list[Span]] = defaultdict(list)
    receives: defaultdict[Any, list[Span]] = defaultdict(list)
    for span in spans:
        record, ranks = span.record, span.group[1]
        if record.kind not in MESSAGES or record.error or not 0 <= record.peer < len(ranks):
            continue
        peer = ranks[record.peer]
        if record.kind in _SENDS:
            sends[span.group, span.rank, peer, record.tag].append(span)
        else:
            receives[span.group, peer, span.rank, record.tag].append(span)
    for key, received in receives.items():
        waiting = iter(received)
        for sent in sends.get(key, []):
            # A message that was under way when the trace began has no sender in it.
            receive = next((span for span in waiting if span.end >= sent.start), None)
            if receive is None:
                break
            sent.peer, receive.peer = receive, sent
            _wait(receive, sent)
            if sent.end > receive.start:
                # A long message is taken from the sender's memory, once the receiver is there.
                _wait(sent, receive)


def _wait(span: Span, other: Span) -> None:
    span.ready, span.last = _within(span, other.start), other.rank


def _within(span: Span, time: int) -> int:
    return min(max(time, span.posted), span.end)


# Rows


def _lay_out(spans: Iterable[Span]) -> None:
    """Give each span a row of its rank in which it overlaps with no other."""
    ends: defaultdict[int, list[int]] = defaultdict(lambda: [0])
    for span in spans:
        lanes = ends[span.rank]
        first = _MAIN if span.record.kind in BLOCKING else _MAIN + 1
        free = (n for n in count(first) if n >= len(lanes) or lanes[n] <= span.start)
        span.lane = next(free)
        lanes.extend([0] * (span.lane + 1 - len(lanes)))
        lanes[span.lane] = span.end


# Events


def _metadata(parts: Iterable[Part], spans: Iterable[Span]) -> Iterator[Event]:
    lanes = {(span.rank, span.lane) for span in spans}
    for part in parts:
        yield _about(part.rank, "process_name", name=f"rank {part.rank} ({part.host})")
        yield _about(part.rank, "process_sort_index", sort_index=part.rank)
    for rank, lane in sorted(lanes):
        row = "calls" if lane == _MAIN else f"requests and messages {lane}"
        yield _about(rank, "thread_name", lane, name=row)
        yield _about(rank, "thread_sort_index", lane, sort_index=lane)


def _about(rank: int, what: str, lane: int = _MAIN, **values: Any) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "ts": 0, "args": values}


def _events(spans: Iterable[Span], origin: int) -> Iterator[Event]:
    numbers = count(1)
    for span in spans:
        yield _slice(span, span.record.operation, span.start, span.end, origin, _facts(span))
        if span.record.kind == WAIT:
            continue
        if span.ready > span.posted:
            name = f"waiting for {_whom(span)}"
            yield _slice(span, name, span.posted, span.ready, origin, None)
        if span.end > span.ready and not span.absent:
            yield _slice(span, "transfer", span.ready, span.end, origin, None)
        if span.peer is not None and span.record.kind in _SENDS:
            number = next(numbers)
            yield _flow("s", span, span.start, origin, number)
            # Inside the slice that it leads to.
            end = max(span.peer.start, span.peer.end - 1, span.start)
            yield _flow("f", span.peer, end, origin, number)


def _order(event: Event) -> tuple[float, int]:
    """Events by time; arrows come after the slices that they connect."""
    return event["ts"], "Xsf".index(event["ph"])


def _slice(
    span: Span, name: str, start: int, end: int, origin: int, facts: dict[str, Any] | None
) -> Event:
    """Return a complete event; one without facts is a part of a call, drawn inside it."""
    kind = span.record.kind if facts is not None else name.partition(" ")[0]
    event = {"ph": "X", "name": name, "cat": kind, **_place(span, start, origin)}
    event["dur"] = (end - start) / 1000
    return event if facts is None else {**event, "args": facts}


def _flow(phase: str, span: Span, time: int, origin: int, number: int) -> Event:
    event = {"ph": phase, "name": "message", "cat": "message", "id": number}
    return {**event, **_place(span, time, origin), **({"bp": "e"} if phase == "f" else {})}


def _place(span: Span, time: int, origin: int) -> Event:
    """Return where an event lies; times are microseconds."""
    return {"pid": span.rank, "tid": span.lane, "ts": (time - origin) / 1000}


def _whom(span: Span) -> str:
    ranks = [span.last] if span.last >= 0 else list(span.absent)
    return name_ranks(ranks) if ranks else "other ranks"


def _facts(span: Span) -> dict[str, Any]:
    """Return what Perfetto shows of a call that is clicked, and what tables are made of."""
    record = span.record
    facts: dict[str, Any] = {
        "call": record.described,
        "line": record.site,
        "bytes": record.nbytes,
        "algorithm": record.algorithm,
        "communicator": span.group[0],
        "waiting (µs)": span.waiting / 1000,
        "transfer (µs)": 0.0 if span.absent else (span.end - span.ready) / 1000,
    }
    if span.last >= 0 and span.waiting:
        facts["waited for rank"] = span.last
    if span.absent:
        facts["absent ranks"] = list(span.absent)
    if record.error:
        facts["error"] = record.error
    if record.kind in (CALL, REQUEST):
        facts["step"] = record.step
    return facts
