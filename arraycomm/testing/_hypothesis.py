"""The context of an example, on each rank; the only module that uses internals of Hypothesis.

`note`, `event`, `target` and `assume` work in the thread and the process in which Hypothesis runs
an example. A rank in another thread or process gets a context of its own, and what it recorded is
replayed in Hypothesis's own context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import hypothesis
from hypothesis.control import (
    BuildContext,
    _current_build_context,
    current_build_context,
    should_note,
)
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.entropy import deterministic_PRNG
from hypothesis.internal.escalation import current_pytest_item
from hypothesis.reporting import current_reporter, with_reporter
from hypothesis.strategies import DataObject, SearchStrategy

from arraycomm.testing._failures import is_skip
from arraycomm.testing._ranks.transfer import dump

__all__ = ["DataObject", "deterministic_PRNG", "should_note"]

# The attribute in which Hypothesis keeps the settings of a test.
_SETTINGS: Final = "_hypothesis_internal_use_settings"
_USUAL_DEADLINE: Final = timedelta(milliseconds=200)


def adapt_settings(test: Any) -> None:
    """Let a test print how to reproduce a failure; drop a deadline that nobody has chosen.

    What Hypothesis explains are lines that differ in this thread, which are the library's: left
    out.
    """
    settings: hypothesis.settings = vars(test)[_SETTINGS]
    deadline = None if settings.deadline == _USUAL_DEADLINE else settings.deadline
    phases = [phase for phase in settings.phases if phase is not hypothesis.Phase.explain]
    adapted = hypothesis.settings(settings, print_blob=True, deadline=deadline, phases=phases)
    vars(test)[_SETTINGS] = adapted


@dataclass
class Record:
    """What one rank noted in one example."""

    notes: list[str] = field(default_factory=list)
    events: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)


@contextmanager
def recording(record: Record, *, final: bool) -> Iterator[None]:
    """Record what this thread notes; `final` if Hypothesis is to show the notes."""
    data = ConjectureData.for_choices(())
    context = BuildContext(data, is_final=final, wrapped_test=recording)
    try:
        with with_reporter(lambda note: record.notes.append(str(note))), context:
            yield
    finally:
        record.events.update(data.events)
        record.targets.update(data.target_observations)


def replay(records: Sequence[Record]) -> None:
    """Pass the ranks' notes on to Hypothesis; if all ranks noted the same, only once."""
    for rank, record in enumerate(records):
        if all(other.notes == record.notes for other in records):
            if rank == 0:
                _note_all(record.notes)
        else:
            _note_all(f"[rank {rank}] {note}" for note in record.notes)
        for value, payload in record.events.items():
            hypothesis.event(value, payload)
    labels = dict.fromkeys(label for record in records for label in record.targets)
    for label in labels:
        seen = [record.targets[label] for record in records if label in record.targets]
        hypothesis.target(max(seen), label=label)


def _note_all(notes: Iterable[str]) -> None:
    for note in notes:
        hypothesis.note(note)


def ends_example(error: BaseException) -> bool:
    """Return whether an error is not a failure: an unsatisfied assumption, or a skipped test."""
    return isinstance(error, UnsatisfiedAssumption) or is_skip(error)


def uncaptured() -> Callable[[str], None]:
    """Return a function that writes to the terminal even if pytest captures output."""
    item: Any = current_pytest_item.value
    manager = item and item.config.pluginmanager.getplugin("capturemanager")

    def show(text: str) -> None:
        if manager is not None:
            manager.suspend_global_capture()
        sys.stderr.write(text)
        sys.stderr.flush()

    return show


class DrawEndedError(Exception):
    """Hypothesis ended the example during a draw."""


class Draws:
    """Draws from the current example for rank 0, in any context."""

    def __init__(self, data: DataObject) -> None:
        self._data = data
        self._context = current_build_context()
        self._reporter = current_reporter()
        # What ended the example; to be raised again in Hypothesis's own context.
        self.ended: BaseException | None = None

    def __call__(self, strategy: SearchStrategy[Any], label: str | None) -> bytes:
        """Return what was drawn, as `dump` encodes it."""
        try:
            with self._in_context():
                return dump(self._data.draw(strategy, label))
        except BaseException as error:
            self.ended = error
            raise DrawEndedError(f"the draw ended the example: {error!r}") from None

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        with _current_build_context.with_value(self._context), with_reporter(self._reporter):
            yield
