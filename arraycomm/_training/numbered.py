"""Reductions of gradients in numbered steps, at the same place of the program on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from arraycomm._calls.operation import Context
from arraycomm._callsite import call_site
from arraycomm._errors import MismatchError
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.details import CallDetail, exchange_details
from arraycomm._protocol.mismatch import by_ranks
from arraycomm._training.comparison.verification import Shows, compare
from arraycomm._transports.base import Steps
from arraycomm._transports.control import ControlChannel
from arraycomm._trees.fusion import TreeMemory
from arraycomm._trees.leaves import Onto
from arraycomm._trees.reduce import AllreduceGradients

# Bits of a header's free word: which dtypes a result cannot have, the step, whether it is marked,
# the place.
_STEP_FROM: Final = 32
_MARK_AT: Final = 51
_PLACE_FROM: Final = 52
_PLACE_BITS: Final = 11


@dataclass(frozen=True, slots=True)
class Where:
    """Where a rank reduces gradients: the step, counted from 1, and the place in its program.

    0 stands for a rank that does not count its steps, or is in no program; it is in step with any
    other. `marked` tells that skipped steps count as well.
    """

    step: int = 0
    place: int = 0
    marked: bool = False

    def word(self) -> int:
        """Return this as bits of a header's free word."""
        step = _wrapped(self.step, _MARK_AT - _STEP_FROM)
        place = _wrapped(self.place, _PLACE_BITS)
        return step << _STEP_FROM | self.marked << _MARK_AT | place << _PLACE_FROM

    @classmethod
    def read(cls, word: int) -> Where:
        """Return what a free word stands for."""
        step = (word >> _STEP_FROM) % (1 << (_MARK_AT - _STEP_FROM))
        place = (word >> _PLACE_FROM) % (1 << _PLACE_BITS)
        return cls(step, place, bool(word >> _MARK_AT & 1))

    def __str__(self) -> str:
        place = f", call {self.place} of its program" if self.place else ""
        return f"update {self.step}{place}"


def _wrapped(number: int, bits: int) -> int:
    """Return a number from 1 on as one that has this many bits, and 0 as 0."""
    return (number - 1) % ((1 << bits) - 1) + 1 if number else 0


class Numbering:
    """The numbers of one optimizer's updates on this rank."""

    def __init__(self) -> None:
        self._number, self._marked = 0, False

    def mark(self) -> None:
        """Note that the program has come to an update, which may be skipped."""
        self._number += 1
        self._marked = True

    @contextmanager
    def update(self, place: int = 0) -> Iterator[Where]:
        """Say where an update is made that is not skipped.

        If it fails, it does not count: a rank that failed before the call has not counted it.
        """
        self._number += not self._marked
        where, self._marked = Where(self._number, place, self._marked), False
        try:
            yield where
        except Exception:
            self._number -= not where.marked
            raise

    def settle(self, number: int) -> None:
        """Go on from a number on which all ranks have agreed."""
        self._number = number


class NumberedGradients(AllreduceGradients):
    """The reduction of the gradients of one step, which is the same on all ranks."""

    def __init__(
        self,
        context: Context,
        memory: TreeMemory,
        tree: Any,
        op: str,
        where: Where,
        numbering: Numbering | None,
        look: Shows,
        bucket_bytes: int,
        compression: str | None,
        missing: str = "zeros",
        onto: Onto | None = None,
    ) -> None:
        super().__init__(context, memory, tree, op, bucket_bytes, compression, missing, onto)
        self._where, self._numbering = where, numbering
        # Another thread may make the steps of what waits behind other calls.
        self._site = call_site() if self.group.engine.queue else None
        self.word |= where.word()
        self._look = look((self.signature.leaves, where.place))
        self.further_words = () if self._look is None else self._look.words

    def steps(self, agreement: Agreement) -> Steps:
        ranks = [Where.read(word) for word in agreement.free_words()]
        steps = {where.step for where in ranks} - {0}
        places = {where.place for where in ranks} - {0}
        # JAX may trace a branch once for several programs, so that only some ranks count what they
        # skip.
        alike = len({where.marked for where in ranks if where.step}) < 2
        if len(places) > 1 or (alike and len(steps) > 1):
            yield from refuse_places(
                self.group.control,
                CallDetail(self.name, str(self._where), self._site or call_site()),
                "updates",
                "Every rank must make, or skip, the same updates; what skips one by this rank's "
                "gradients alone, as optax.apply_if_finite does, has to be inside: "
                "DistributedOptimizer(optax.apply_if_finite(...))",
            )
        if not alike and self._numbering is not None:
            self._numbering.settle(max(steps))
        yield from compare(self.group, agreement, self._look)
        yield from super().steps(agreement)


def refuse_places(control: ControlChannel, local: CallDetail, what: str, remedy: str) -> Steps:
    """Raise the same error on all ranks, with each one's place and line of the program."""
    details = yield from exchange_details(control, local)
    control.ended = True
    lines = by_ranks([f"{detail.call}, at {detail.site}" for detail in details])
    raise MismatchError(
        f"{local.head}: the ranks are in different {what} of one optimizer: {lines}. {remedy}"
    )
