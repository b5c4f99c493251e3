"""The reduction of gradients in numbered steps, at the same place of their programs on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from arraycomm._callsite import call_site
from arraycomm._collectives.operation import Context
from arraycomm._errors import MismatchError
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.details import CallDetail, exchange_details
from arraycomm._protocol.mismatch import by_ranks
from arraycomm._transports.base import Steps
from arraycomm._trees.fusion import TreeMemory
from arraycomm._trees.reduce import AllreduceGradients

# Bits of a header's free word: which dtypes a result cannot have, then the step, then the place.
_STEP_FROM: Final = 32
_PLACE_FROM: Final = 52
_PLACE_BITS: Final = 11


@dataclass(frozen=True, slots=True)
class Where:
    """Where a rank reduces gradients: in which step, counted from 1, and at which place of its program.

    0 stands for a rank that does not count its steps, or is in no program; it is in step with any other.
    """

    step: int = 0
    place: int = 0

    def word(self) -> int:
        """Return this as bits of a header's free word."""
        step = _wrapped(self.step, _PLACE_FROM - _STEP_FROM)
        return step << _STEP_FROM | _wrapped(self.place, _PLACE_BITS) << _PLACE_FROM

    @classmethod
    def read(cls, word: int) -> Where:
        """Return what a free word stands for."""
        step = (word >> _STEP_FROM) % (1 << (_PLACE_FROM - _STEP_FROM))
        return cls(step, (word >> _PLACE_FROM) % (1 << _PLACE_BITS))

    def __str__(self) -> str:
        place = f", call {self.place} of its program" if self.place else ""
        return f"update {self.step}{place}"


def _wrapped(number: int, bits: int) -> int:
    """Return a number from 1 on as one that has so many bits, and 0 as 0."""
    return (number - 1) % ((1 << bits) - 1) + 1 if number else 0


class NumberedGradients(AllreduceGradients):
    """The reduction of the gradients of one step, which is the same on all ranks."""

    def __init__(
        self,
        context: Context,
        memory: TreeMemory,
        tree: Any,
        op: str,
        where: Where,
        bucket_bytes: int,
        compression: str | None,
        missing: str = "zeros",
    ) -> None:
        super().__init__(context, memory, tree, op, bucket_bytes, compression, missing)
        self._where, self._site = where, call_site()
        self.length |= where.word()

    def steps(self, agreement: Agreement) -> Steps:
        ranks = [Where.read(word) for word in agreement.free_words()]
        for numbers in ({where.step for where in ranks}, {where.place for where in ranks}):
            if len(numbers - {0}) > 1:
                yield from self._refuse()
        yield from super().steps(agreement)

    def _refuse(self) -> Steps:
        """Raise the same error on all ranks, with the line of the program in which each is."""
        control = self.group.control
        local = CallDetail(self.name, str(self._where), self._site)
        details = yield from exchange_details(control, local, CallDetail)
        control.ended = True
        lines = by_ranks([f"{detail.call}, at {detail.site}" for detail in details])
        raise MismatchError(
            f"{self.name}: the ranks are in different updates of one optimizer: {lines}. Every rank "
            "must make, or skip, the same updates; what skips one by this rank's gradients alone, as "
            "optax.apply_if_finite does, has to be inside: "
            "DistributedOptimizer(optax.apply_if_finite(...))"
        )
