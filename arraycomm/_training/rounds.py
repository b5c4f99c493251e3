"""Rounds: one optimizer's gradients, reduced bucket by bucket, at the same place on every rank.

A round is part of a backward pass, or of a step. Every rank shows with each bucket where it is: in
which step, which evaluation of a closure, and which round. A rank that is in a step, and had no
backward pass of its own in it, takes part in the rounds of the others' backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.requests import Request
from arraycomm._callsite import call_site
from arraycomm._communicator import Communicator, runner_of, trees_of
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.details import CallDetail
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import LeafSpec
from arraycomm._reduce.chunks import reserve
from arraycomm._training.comparison.verification import Look, Shows, compare, nothing_shown
from arraycomm._training.numbered import refuse_places
from arraycomm._transports.base import Bytes, Steps
from arraycomm._trees.fusion import Fusion, TreeMemory, recent_fusions
from arraycomm._trees.layout import Spec
from arraycomm._trees.leaves import Leaves as TreeLeaves
from arraycomm._trees.leaves import Onto, Parts
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.reduce import AllreduceGradients

_NAME: Final = "DistributedOptimizer"
# Bits of the word in which a header carries a place.
_FLAGS, _COUNT, _STEP = 8, 12, 31

# The gradients of some parameters, by the parameters' numbers.
Leaves: TypeAlias = dict[int, Any]


class Place(NamedTuple):
    """Where a rank is in its training."""

    step: int = 1
    # Of the step's closure, 0 without one; and the round in it.
    evaluation: int = 0
    number: int = 0
    # Gradients had been reduced for the step before, which was not taken.
    skipped: bool = False
    # In `step()`, not in a backward pass.
    stepping: bool = False
    # Gradients of a backward pass of its own have been reduced in this step.
    worked: bool = False
    # Gradients are still to be reduced: in `step()` those of no backward pass, at the end of a pass
    # those that came after their reduction had begun.
    pending: bool = False
    # In `step()`: reduced gradients were replaced, or written to, or are those of a step before.
    replaced: bool = False
    changed: bool = False
    stale: bool = False
    # The optimizer's parameters are others than in the last round.
    others: bool = False

    def word(self) -> int:
        """Return the place as a word of a header."""
        step, evaluation, number, *flags = self
        word = step % (1 << _STEP)
        for count in (evaluation, number):
            word = word << _COUNT | count % (1 << _COUNT)
        for flag in flags:
            word = word << 1 | flag
        return word

    @classmethod
    def read(cls, word: int) -> Place:
        """Return the place that a word stands for."""
        flags = [bool(word >> bit & 1) for bit in reversed(range(_FLAGS))]
        counts = word >> _FLAGS
        number, evaluation = counts % (1 << _COUNT), (counts >> _COUNT) % (1 << _COUNT)
        return cls(counts >> 2 * _COUNT, evaluation, number, *flags)

    @property
    def has_nothing(self) -> bool:
        """Whether the rank is in `step()` after a backward pass that has reduced all."""
        return self.stepping and not self.pending

    def __str__(self) -> str:
        step = f"step {self.step}" + (" (after a skipped step)" if self.skipped else "")
        if self.evaluation:
            step = f"evaluation {self.evaluation} of the closure in {step}"
        if self.others:
            step = f"{step} with other parameters than before"
        if self.stepping:
            return f"{step}, in step()" + (f" after {self.number} backward()" * self.worked)
        return f"{step}, in its backward() {self.number + 1}"


def compare_places(group: Group, agreement: Agreement, own: Place, site: str) -> Steps:
    """Return where all ranks are; raise on all if they cannot reduce gradients together there."""
    places = [Place.read(word) for word in agreement.free_words()]
    alike = len({(p.step, p.evaluation, p.number, p.others) for p in places}) == 1
    stepping = all(p.stepping for p in places) or not any(p.stepping and p.worked for p in places)
    if not (alike and stepping):
        yield from refuse_places(
            group.control,
            CallDetail(_NAME, str(own), site),
            "steps",
            "Every rank must take, or skip, the same steps, with as many backward passes, and "
            "exchange parameters in the same ones; decide that from .grad after backward(), "
            "which is the same on all ranks",
        )
    return places


class Reduced(NamedTuple):
    """The reduced gradients of a bucket, and where each rank was."""

    leaves: Leaves
    places: list[Place]


class Part(NamedTuple):
    """This rank's part in the reduction of a bucket.

    `make` returns the gradients, and `look` what this rank shows of what its step depends on. They
    are called inside the call, so that the others hear of their errors. If the gradients may be
    overwritten, some of the results are those very objects. With `onto`, which has the totals in
    the order of their numbers, the results are totals.
    """

    bucket: Bucket
    make: Callable[[], Leaves]
    place: Place
    look: Shows = nothing_shown
    may_overwrite: bool = False
    onto: Onto | None = None

    def look_at(self) -> Look | None:
        """Return what is shown, with the first bucket alone: of arrays in a step's first round."""
        if self.bucket.index:
            return None
        first = not (self.place.number or self.place.evaluation)
        return self.look(stepping=self.place.stepping, arrays=first)


class Bucket:
    """Parameters whose gradients are reduced together, by their numbers.

    The first reduction prepares the others of gradients that `fit` slots of one buffer, into which
    they are copied by `fill`. So does the first one of `nothing`, which a rank has in a step after
    a backward pass that has reduced all.
    """

    def __init__(
        self,
        index: int,
        numbers: Sequence[int],
        fit: Callable[[Sequence[Any], Sequence[Any]], bool] | None = None,
        fill: Callable[[Sequence[Any], Sequence[Any]], None] = lambda slots, gradients: None,
    ) -> None:
        # As a tree of them has them, whether a reduction is prepared or not.
        self.index, self.numbers = index, sorted(numbers)
        self.fusions = recent_fusions()
        self.nothing: Leaves = dict.fromkeys(self.numbers)
        self.fill, self._fit = fill, fit
        self._prepared: _Prepared | None = None
        self._prepared_nothing: _Prepared | None = None

    def prepared(self, gradients: Leaves) -> _Prepared | None:
        """Return what an earlier reduction of gradients like these has prepared, if one has."""
        if gradients is self.nothing:
            return self._prepared_nothing
        if self._prepared is None or self._fit is None:
            return None
        fits = self._fit(self._prepared.slots, [*gradients.values()])
        return self._prepared if fits else None

    def prepare(self, made: ReduceBucket, gradients: Leaves) -> None:
        """Prepare reductions like this one."""
        if gradients is self.nothing:
            self._prepared_nothing = _Prepared(made)
        elif (
            self._fit is not None
            and len(made.parts.sources) == len(self.numbers)
            and (self._prepared is None or self._prepared.fusion is not made.fusion)
        ):
            self._prepared = _Prepared(made)


class _Prepared:
    """What reductions of one bucket have in common if their gradients are alike.

    All have the buffer of the first one, with its results. So these are copied before the next.
    """

    def __init__(self, made: ReduceBucket) -> None:
        self.signature, self.fusion, self.packed = made.signature, made.fusion, made.packed
        slots = made.packed.leaves()
        pairs = zip(slots, made.parts.sources, strict=True)
        self.slots = [to_framework(slot, like) for slot, like in pairs]
        self.parts = Parts(list(map(view, slots)), [slot.dtype for slot in slots])


class Rounds:
    """The rounds of one optimizer, and this rank's place."""

    def __init__(self, comm: Communicator, op: str, options: Mapping[str, Any]) -> None:
        self.comm, self.op, self.options = comm, op, options
        self.place = Place()

    def start(self, part: Part) -> Request:
        """Start to reduce a bucket; the request's result is `Reduced`."""
        return runner_of(self.comm).start(ReduceBucket, self, part)

    def reduce(self, part: Part) -> Reduced:
        """Reduce a bucket."""
        reduced: Reduced = runner_of(self.comm).call(ReduceBucket, self, part)
        return reduced

    def finish_round(self, place: Place) -> None:
        """Note the end of a round of backward passes."""
        worked = self.place.worked or not place.stepping
        place = self.place
        self.place = place._replace(number=place.number + 1, worked=worked, others=False)

    def note_others(self, *, others: bool = True) -> None:
        """Note whether the optimizer's parameters are others than in the last round."""
        self.place = self.place._replace(others=others)

    def finish_step(self, *, skipped: bool = False, kept: bool = False) -> None:
        """Go on to the next step, maybe after one whose gradients have only been kept."""
        others = kept and self.place.others
        self.place = Place(self.place.step + 1, skipped=skipped, others=others)

    def next_evaluation(self) -> None:
        """Go on to the next evaluation of a closure."""
        place = self.place
        self.place = Place(place.step, place.evaluation + 1, skipped=place.skipped)


class ReduceBucket(AllreduceGradients):
    """The reduction of one bucket in a round."""

    def __init__(self, context: Context, rounds: Rounds, part: Part) -> None:
        bucket, make, place, _, may_overwrite, onto = part
        self._bucket, self._place, self._site = bucket, place, call_site()
        self.may_overwrite = may_overwrite
        memory, op, options = trees_of(rounds.comm), rounds.op, rounds.options
        self._gradients = gradients = make()
        self._prepared: _Prepared | None = None
        repeats = may_overwrite or gradients is bucket.nothing
        if repeats and context.place_tree(()) is context.host_tree:
            self._prepared = bucket.prepared(gradients)
        if self._prepared is None:
            super().__init__(context, memory, gradients, op, **options, onto=onto)
            settings = (*self.signature.settings, ("bucket", bucket.index))
            self.signature = replace(self.signature, settings=settings)
            if repeats and self.placement is context.host_tree:
                bucket.prepare(self, gradients)
        else:
            self._repeat(self._prepared, context, memory, op, **options, onto=onto)
        self.word = place.word()
        self._look = part.look_at()
        self.further_words = () if self._look is None else self._look.words

    def _repeat(
        self,
        prepared: _Prepared,
        context: Context,
        memory: TreeMemory,
        op: str,
        bucket_bytes: int,
        compression: str | None,
        onto: Onto | None,
    ) -> None:
        """Look at nothing that is known of gradients like these."""
        Operation.__init__(self, context, context.host_tree)
        self.negotiable, self._onto = True, onto
        self._memory, self._host, self.op = memory, context.host_tree, op
        self._bucket_bytes, self._compression = bucket_bytes, compression
        self.signature, self.nbytes = prepared.signature, prepared.fusion.nbytes
        self.fusion, self.packed, self.parts = prepared.fusion, prepared.packed, prepared.parts
        self.copies = len(self.parts.present)

    def fusion_of(self, specs: tuple[Spec, ...]) -> Fusion:
        return self._bucket.fusions(specs, self._bucket_bytes)

    def check_taken(self, calls: Sequence[CallDetail], agreed: Sequence[LeafSpec]) -> None:
        # All ranks' gradients are of one framework, which has their dtypes; words say no dtypes.
        pass

    def pack(self, room: int) -> Bytes | None:
        prepared = self._prepared
        if prepared is None:
            return super().pack(room)
        gradients = list(self._gradients.values())
        if self.fusion.nbytes <= room:
            if prepared.slots:
                self._bucket.fill(prepared.slots, gradients)
            return self.packed.buffer
        reserve(self.group.transport, self.fusion.nbytes)
        small = [leaf for leaf in range(len(gradients)) if leaf not in self.fusion.large]
        if small:
            self._bucket.fill([prepared.slots[n] for n in small], [gradients[n] for n in small])
        # Large ones are reduced from where they lie, and results are written over them.
        self.parts = copy(self.parts)
        self.parts.sources = list(self.parts.sources)
        for leaf in self.fusion.large:
            self.parts.sources[leaf] = self.placement.view(gradients[leaf])
        return None

    def steps(self, agreement: Agreement) -> Steps:
        self._places = yield from compare_places(self.group, agreement, self._place, self._site)
        if not self._bucket.index:
            yield from compare(self.group, agreement, self._look)
        if self._prepared is not None and agreement.calls is not None:
            # Another rank has not the same gradients.
            self.leaves = TreeLeaves(flatten(self._gradients), self.placement.view)
            self.added = self.leaves.views
        yield from super().steps(agreement)

    def result(self, agreement: Agreement) -> Reduced:
        if self._prepared is None or agreement.calls is not None:
            made = super().result(agreement)
            if self._onto is not None:
                made = dict(zip(sorted(self._bucket.numbers), made, strict=True))
            return Reduced(made, self._places)
        reduced = [self._reduced.get(n, slot) for n, slot in enumerate(self._prepared.slots)]
        return Reduced(dict(zip(self._gradients, reduced, strict=False)), self._places)
