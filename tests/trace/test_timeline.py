"""Who waited for whom, from records whose times are known."""

from __future__ import annotations

from typing import Any

from arraycomm._trace import timeline as timelines
from arraycomm._trace.records import CALL, IRECV, RECV, REQUEST, SEND, Clock, Part, Record
from arraycomm.cli.trace.spans import spans_of
from arraycomm.cli.trace.tables import report
from tests.trace.event_format import check_format

US = 1000


def record(kind: str, started: int, ended: int, **values: Any) -> Record:
    """Return a record with times in microseconds."""
    operation = {CALL: "allreduce", REQUEST: "allreduce"}.get(kind, kind.removeprefix("i"))
    facts = {"step": 1, "nbytes": 8, "algorithm": "header", "site": "train.py:7", "error": ""}
    facts |= values
    times = {name: US * facts.pop(name, 0) for name in ("posted", "agreed")}
    return Record(
        operation, kind, operation, 0, started=US * started, ended=US * ended, **times, **facts
    )


def trace_of(*ranks: list[Record], offsets: tuple[int, ...] = ()) -> dict[str, Any]:
    size = len(ranks)
    groups = [("world", list(range(size)))]
    parts = []
    for rank, records in enumerate(ranks):
        clocks = [Clock(0, US * offsets[rank], 1)] if offsets else []
        parts.append(Part(rank, size, "node", "run", clocks, groups, records))
    made = timelines.timeline(parts)
    check_format(made)
    return made


def waits(trace: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """Return rank, microseconds of waiting and of transfer, and the rank waited for, of each call."""
    return [
        (span.rank, round(1e6 * span.waiting), round(1e6 * span.transfer), span.last)
        for span in spans_of(trace)
    ]


def test_ranks_wait_for_the_one_that_was_ready_last() -> None:
    trace = trace_of(
        [record(CALL, 0, 60, posted=10, agreed=52)],
        [record(CALL, 20, 60, posted=50, agreed=51)],
        [record(CALL, 5, 61, posted=15, agreed=53)],
    )
    assert waits(trace) == [(0, 40, 10, 1), (2, 35, 11, 1), (1, 0, 10, -1)]
    assert "The other ranks waited 75 µs for rank 1, 75 µs of it in allreduce at train.py:7." in (
        report(spans_of(trace), [0, 1, 2])
    )


def test_clocks_are_corrected_before_ranks_are_compared() -> None:
    trace = trace_of(
        [record(CALL, 1000, 1060, posted=1010, agreed=1052)],
        [record(CALL, 20, 60, posted=50, agreed=51)],
        offsets=(0, 1000),
    )
    assert waits(trace) == [(0, 40, 10, 1), (1, 0, 10, -1)]


def test_receive_waits_for_the_send_and_a_long_send_for_the_receive() -> None:
    short = record(SEND, 100, 101, peer=1, tag=0)
    long = record(SEND, 200, 290, peer=1, tag=0)
    trace = trace_of(
        [short, long],
        [record(RECV, 60, 110, peer=0, tag=0), record(IRECV, 250, 290, peer=0, tag=0)],
    )
    assert waits(trace) == [(1, 40, 10, 0), (0, 0, 1, -1), (0, 50, 40, 1), (1, 0, 40, -1)]
    flows = [event for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert [(event["ph"], event["id"], event["pid"]) for event in flows] == [
        *(("s", 1, 0), ("f", 1, 1), ("s", 2, 0), ("f", 2, 1))
    ]


def test_message_sent_before_the_trace_has_no_sender_in_it() -> None:
    trace = trace_of(
        [record(SEND, 100, 101, peer=1, tag=0)],
        [record(RECV, 10, 20, peer=0, tag=0), record(RECV, 90, 120, peer=0, tag=0)],
    )
    assert waits(trace) == [(1, 0, 10, -1), (1, 10, 20, 0), (0, 0, 1, -1)]


def test_call_that_failed_names_the_ranks_that_never_came() -> None:
    trace = trace_of([record(CALL, 0, 3000, posted=1, error="PeerError")], [], [])
    [span] = spans_of(trace)
    assert (span.absent, span.transfer) == ((1, 2), 0)
    names = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert names == ["allreduce", "waiting for ranks 1, 2"]
    assert " ".join(report([span], [0])).endswith(
        "Rank 0 waited 3.0 ms in allreduce at train.py:7 and raised PeerError; no such call of rank "
        "1, 2 was recorded."
    )


def test_what_overlaps_has_rows_of_its_own() -> None:
    trace = trace_of(
        [
            record(CALL, 0, 10, posted=1, agreed=2),
            record(REQUEST, 10, 50, step=2, posted=11, agreed=12),
            record(REQUEST, 20, 60, step=3, posted=50, agreed=51),
            record(CALL, 30, 40, step=4, posted=31, agreed=32),
            record(REQUEST, 50, 70, step=5, posted=61, agreed=62),
        ]
    )
    assert [span.row for span in spans_of(trace)] == [0, 1, 2, 0, 1]


def test_table_adds_up_each_line() -> None:
    rank = [
        record(CALL, 10 * n, 10 * n + 4, step=n, posted=10 * n + 1, agreed=10 * n + 2)
        for n in range(3)
    ]
    lines = report(spans_of(trace_of(rank)), [0])
    assert lines[1].split() == [
        *("train.py:7", "allreduce", "header", "3", "24", "B", "0", "µs", "9", "µs")
    ]


def test_message_arrives_no_sooner_than_it_was_sent() -> None:
    """Also if clocks differ by what cannot be corrected."""
    trace = trace_of(
        [record(SEND, 100, 130, peer=1, tag=0)], [record(RECV, 60, 100, peer=0, tag=0)]
    )
    assert [event["ts"] for event in trace["traceEvents"] if event["ph"] in "sf"] == [40, 40]
