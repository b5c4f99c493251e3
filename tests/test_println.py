"""What `println` writes, where, and what happens if it cannot be written."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing import run

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} "


def _printed(size: int, call: Callable[[Communicator, Any], None]) -> str:
    """Return what a call on all ranks writes to the file that it gets."""
    file = io.StringIO()
    run(size, call, file)
    return file.getvalue()


LINES: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, f"{TIME}\\[0/2\\] a 0\n{TIME}\\[1/2\\] a 1\n"),
    "sep and end": ({"sep": "-", "end": "; ", "timestamp": False}, r"\[0/2\] a-0; \[1/2\] a-1; "),
    "as print": ({"sep": None, "end": None, "timestamp": False}, r"\[0/2\] a 0\n\[1/2\] a 1\n"),
    "one rank": ({"ranks": 1}, rf"{TIME}\[1/2\] a 1\n"),
    "several ranks": ({"ranks": (1, 0), "timestamp": False}, r"\[0/2\] a 0\n\[1/2\] a 1\n"),
    "no rank": ({"ranks": []}, ""),
}


@pytest.mark.parametrize(("options", "expected"), LINES.values(), ids=LINES)
def test_lines(options: dict[str, Any], expected: str) -> None:
    printed = _printed(2, lambda c, f: ac.println("a", c.rank, comm=c, file=f, **options))
    assert re.fullmatch(expected, printed)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "a 1\n"),
        ({"sep": "", "end": "."}, "a1."),
        ({"timestamp": True}, rf"{TIME}a 1\n"),
        ({"ranks": 0}, "a 1\n"),
        ({"ranks": ()}, ""),
    ],
)
def test_before_init_the_process_is_rank_0_of_1(options: dict[str, Any], expected: str) -> None:
    file = io.StringIO()
    ac.println("a", 1, file=file, **options)
    assert re.fullmatch(expected, file.getvalue())


WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "sep": (TypeError, "println: sep must be a string or None; got 3", {"sep": 3}),
    "end": (TypeError, "println: end must be a string or None; got 3", {"end": 3}),
    "file": (TypeError, "println: file must have a method write; got 'log'", {"file": "log"}),
    "ranks": (ValueError, r"println: ranks must be ranks from 0 to 1; got \(2,\)", {"ranks": (2,)}),
    "rank": (TypeError, "println: ranks must be a rank or several; got 1.5", {"ranks": 1.5}),
}


@pytest.mark.parametrize(("kind", "message", "options"), WRONG.values(), ids=WRONG)
def test_wrong_argument_is_told_to_all(
    kind: type[Exception], message: str, options: dict[str, Any]
) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(kind if comm.rank else ac.PeerError, match=message):
            ac.println("a", comm=comm, **(options if comm.rank else {}))
        assert comm.allreduce(1) == 2

    run(2, check)
    with pytest.raises(kind, match=message.replace("from 0 to 1", "from 0 to 0")):
        ac.println("a", **options)


def test_what_the_output_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, "ascii")
    run(2, lambda c: ac.println("é→\ud800", c.rank, comm=c, file=file, timestamp=False))
    lines = [rf"[{rank}/2] \xe9\u2192\ud800 {rank}" for rank in range(2)]
    assert raw.getvalue().decode().splitlines() == lines


def test_without_a_standard_output_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    ac.println("before init")
    assert run(2, lambda c: [ac.println("a", comm=c), c.allreduce(1)][1]) == [2, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_output_raises_on_rank_0_and_the_ranks_go_on() -> None:
    def check(comm: Communicator) -> Any:
        with open("/dev/full", "wb", buffering=0) as raw:
            file = io.TextIOWrapper(raw, "utf-8", write_through=True)
            if comm.rank:
                ac.println("a", comm=comm, file=file)
            else:
                with pytest.raises(OSError, match="No space left"):
                    ac.println("a", comm=comm, file=file)
            file.detach()
        return comm.allreduce(1)

    assert run(2, check) == [2, 2]
