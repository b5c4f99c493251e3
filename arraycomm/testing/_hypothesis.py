"""The only place that touches what Hypothesis keeps to itself: the context of an example.

`note`, `event`, `target` and `assume` work in the thread and the process in which Hypothesis runs
an example. A rank that is another thread or process gets a context of its own, whose record is
replayed where Hypothesis can hear it.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis.control import BuildContext, current_build_context, should_note
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.entropy import deterministic_PRNG
from hypothesis.internal.escalation import current_pytest_item
from hypothesis.reporting import current_reporter, with_reporter
from hypothesis.strategies import DataObject, SearchStrategy

from arraycomm.testing._values import dump

__all__ = ["DataObject", "deterministic_PRNG", "should_note"]


@dataclass
class Record:
    """What one rank noted in one example."""

    notes: list[str] = field(default_factory=list)
    events: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)


@contextmanager
def recording(record: Record, *, final: bool) -> Iterator[None]:
    """Let this thread note, and keep what it notes; `final` where notes are to be shown."""
    data = ConjectureData.for_choices(())
    context = BuildContext(data, is_final=final, wrapped_test=recording)
    try:
        with with_reporter(lambda said: record.notes.append(str(said))), context:
            yield
    finally:
        record.events.update(data.events)
        record.targets.update(data.target_observations)


def replay(records: Sequence[Record]) -> None:
    """Tell Hypothesis what the ranks have noted: once where all said the same."""
    for rank, record in enumerate(records):
        if all(other.notes == record.notes for other in records):
            if rank == 0:
                _note_all(record.notes)
        else:
            _note_all(f"[rank {rank}] {said}" for said in record.notes)
        for value, payload in record.events.items():
            hypothesis.event(value, payload)
    labels = dict.fromkeys(label for record in records for label in record.targets)
    for label in labels:
        seen = [record.targets[label] for record in records if label in record.targets]
        hypothesis.target(max(seen), label=label)


def _note_all(notes: Any) -> None:
    for said in notes:
        hypothesis.note(said)


def ends_example(error: BaseException) -> bool:
    """Tell whether an error is no failure: the example does not count, or the test is skipped."""
    kinds: list[type[BaseException]] = [UnsatisfiedAssumption, unittest.SkipTest]
    if (outcomes := sys.modules.get("_pytest.outcomes")) is not None:
        kinds.append(outcomes.Skipped)
    return isinstance(error, tuple(kinds))


def uncaptured() -> Callable[[str], None]:
    """Return a way to write to the terminal, also where pytest holds back what a test writes."""
    item: Any = current_pytest_item.value
    manager = item and item.config.pluginmanager.getplugin("capturemanager")

    def show(text: str) -> None:
        if manager is not None:
            manager.suspend_global_capture()
        sys.stderr.write(text)
        sys.stderr.flush()

    return show


class DrawEndedError(Exception):
    """Hypothesis ended the example while it drew."""


class Draws:
    """Draws from the example under way, for rank 0, from whichever context it asks."""

    def __init__(self, data: DataObject) -> None:
        self._data = data
        self._context = current_build_context()
        self._reporter = current_reporter()
        # What ended the example, to be raised where Hypothesis waits for it.
        self.ended: BaseException | None = None

    def __call__(self, strategy: SearchStrategy[Any], label: str | None) -> bytes:
        """Return what was drawn, as it travels to all ranks."""
        try:
            with self._in_context():
                return dump(self._data.draw(strategy, label))
        except BaseException as error:
            self.ended = error
            raise DrawEndedError(f"the draw ended the example: {error!r}") from None

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        from hypothesis.control import _current_build_context

        with _current_build_context.with_value(self._context), with_reporter(self._reporter):
            yield
