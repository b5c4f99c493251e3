"""The control channel in shared memory: its steps, and what a rank tells of its waits, which is always read whole."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from arraycomm._transports import control, notes
from arraycomm._transports.control import PAYLOAD, SharedControl, message_slot
from tests.support import internals
from tests.support.on_ranks import alone

# Nothing in it depends on what else runs.
pytestmark = alone


@pytest.fixture
def controls() -> list[SharedControl]:
    """The boards of two ranks in one memory."""
    memory = np.zeros(SharedControl.nbytes(2), np.uint8)
    return [SharedControl(rank, 2, memory) for rank in range(2)]


@pytest.fixture
def hurried() -> Iterator[None]:
    """Let threads take turns after microseconds, in the middle of everything."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_slots_between_nodes_hold_a_mebibyte_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_MESSAGES", internals.SLOTS[2])
    assert message_slot(2) == PAYLOAD + (1 << 20)
    assert message_slot(3) == PAYLOAD + (1 << 20) // 3 // 8 * 8
    for size in (4, 8, 100, 8192):
        assert message_slot(size) == PAYLOAD + (1 << 20) // size // 8 * 8
    # Room for a small array, on any number of ranks.
    assert message_slot(1 << 17) == 256


def test_the_last_text_told_is_read(controls: list[SharedControl]) -> None:
    teller, reader = controls
    assert reader.notes.wait_status(0) == ""
    for text in ("in bcast", "", "in a longer text, with ü", "x" * 10_000, "in recv"):
        teller.notes.report_wait(text)
        assert reader.notes.wait_status(0) == text[:512]
        assert reader.notes.wait_status(1) == ""


def test_a_step_to_which_all_have_come_meanwhile_is_not_given_up(controls, monkeypatch) -> None:
    for each in controls:
        each.post()
    monkeypatch.setattr(controls[0], "done", [True, False].pop)
    assert not controls[0].withdraw()


def test_a_step_that_was_given_up_stays_so_whoever_comes_to_it(controls) -> None:
    early, late = controls
    early.post()
    assert early.withdraw()
    late.post()
    assert early.withdraw()
    assert not late.done()


@pytest.mark.usefixtures("hurried")
def test_a_text_is_read_whole_while_another_is_told(controls: list[SharedControl]) -> None:
    teller, reader = controls
    texts = ["is waiting " + "a" * 400, "has waited in vain " + "b" * 30]
    teller.notes.report_wait(texts[0])
    told = threading.Event()

    def tell() -> None:
        for place in range(20_000):
            teller.notes.report_wait(texts[place % 2])
        told.set()

    thread = threading.Thread(target=tell)
    thread.start()
    read = set()
    while not told.is_set():
        read.add(reader.notes.wait_status(0))
    thread.join()
    assert read <= set(texts)


def test_a_text_that_is_told_over_while_it_is_read_is_read_again(
    controls: list[SharedControl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two texts come between the look at which one holds and the look at what it says."""
    teller, reader = controls
    teller.notes.report_wait("a text that is not read")
    coming = ["another", "the last"]

    def tell_meanwhile() -> None:
        texts, coming[:] = coming[:], []
        for text in texts:
            teller.notes.report_wait(text)

    monkeypatch.setattr(notes, "fence", tell_meanwhile)
    assert reader.notes.wait_status(0) == "the last"
