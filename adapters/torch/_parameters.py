"""The parameters of one torch optimizer: whose gradients are reduced, and whose are to be."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final

import torch

import arraycomm as ac
from arraycomm.adapters.torch._slots import (
    UNREDUCED,
    Slot,
    State,
    changed,
    marked_slot,
    marked_slots,
    nobody,
    slot_of,
    take_over,
    writes_to,
)


class Parameters:
    """The parameters of one optimizer, by their numbers, and their gradients in this step."""

    def __init__(self, gradients: Any, groups: Callable[[], Sequence[dict[str, Any]]]) -> None:
        # `groups` returns those of the optimizer.
        self.gradients, self._groups = gradients, groups
        self._tensors: list[torch.Tensor] | None = None
        # Whether a step goes on.
        self.stepping = False
        self.slots: list[Slot] = []
        # Those with gradients of backward passes for this step.
        self.touched: list[int] = []
        # Those whose gradients the backward pass that goes on has accumulated; None without one.
        self.accumulated: Collection[int] | None = None
        # Those whose gradients are being reduced.
        self._sent: set[int] = set()
        # Whether all gradients are known to be what the reduction of this step has left.
        self._unchanged = False
        # A weak reference to what the hooks report to.
        self._reducer: Callable[[], object] = lambda: None
        # Those whose gradients backward passes have left unreduced, and why.
        self.left: dict[int, str] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters by their numbers.

        They are kept during passes and steps alone, so that it is noticed if the program drops one.
        """
        if self._tensors is None:
            found = [tensor for group in self._groups() for tensor in group["params"]]
            if len(set(map(id, found))) < len(found):
                found = list({id(tensor): tensor for tensor in found}.values())
            self._tensors = found
        return self._tensors

    def rest(self) -> None:
        """Keep no parameter, unless a step or a pass goes on."""
        if not self.stepping and self.accumulated is None:
            self._tensors = None

    def adopt(self, reducer: Any) -> bool:
        """Have the hooks of the optimizer's parameters report to a reducer; tell if any is new."""
        before, self._tensors = self._tensors, None
        tensors = self.tensors
        if marked_slots(tensors) == (slots := self.slots):
            if [*map(_reducer_of, slots)].count(self._reducer) < len(slots):
                self._report_to(reducer, None)
            return False
        had_reduced = any(slot.reduced for slot in self.slots)
        unseen = [n for n, tensor in enumerate(tensors) if marked_slot(tensor) is None]
        slots, old = list(map(slot_of, tensors)), self.slots
        is_new = list(map(id, slots)) != list(map(id, old))
        if is_new:
            self._leave_old(slots, before, reducer)
            self._tensors, self.slots, self.touched, self.left = tensors, slots, [], {}
            self._report_to(reducer, *([None, reducer] if old else []))
        # Gradients in a step of parameters whose hooks no backward pass has called. If others have
        # been reduced in the step, these are compared between the ranks.
        for number in unseen if old and self.stepping else ():
            slot, grad = self.slots[number], self.tensors[number].grad
            if slot.state(grad) in UNREDUCED:
                slot.reduced = slot.replaced = had_reduced
                self.left[number] = UNSEEN
        return is_new

    def _leave_old(
        self, slots: Sequence[Slot], before: list[torch.Tensor] | None, reducer: Any
    ) -> None:
        """End what goes on with the parameters so far, and let those go that are none any more."""
        stay = dict(zip(map(id, slots), self.tensors, strict=True))
        if before is not None:
            self._tensors = before
            reducer.abandon()
        # Of those that have gone nobody knows whether their gradients were zeroed before.
        self._tensors = [stay.get(id(slot), _GONE) for slot in self.slots]
        if all(id(self.slots[number]) in stay for number in self.touched):
            self.note_skipped()
        for slot in self.slots:
            if id(slot) not in stay:
                slot.reducer = nobody if slot.reducer() is reducer else slot.reducer
        if self.slots and self.gradients.rounds is not None:
            self.gradients.rounds.note_others()
        if self.slots:
            # Keep what is remembered of the parameters that stay; of a copy's, of all.
            numbers = {id(slot): number for number, slot in enumerate(slots)}
            pairs = ((old, numbers.get(id(slot))) for old, slot in enumerate(self.slots))
            stays = {old: new for old, new in pairs if new is not None}
            self.gradients.renumber(stays, len(slots))

    def _report_to(self, reducer: object, *instead_of: object) -> None:
        """Have the hooks report to a reducer, maybe only in place of some."""
        self._reducer = weakref.ref(reducer)
        for number, slot in enumerate(self.slots):
            if not instead_of or slot.reducer() in instead_of:
                slot.reducer, slot.number = self._reducer, number

    @property
    def grads(self) -> list[torch.Tensor | None]:
        """The gradients as they are now."""
        return [tensor.grad for tensor in self.tensors]

    # What this rank adds to a reduction

    def means(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Return what this rank adds to the reduction of these parameters' gradients."""
        slots, tensors, own = self.slots, self.tensors, self._reducer
        during = self.accumulated or ()
        virtual = self.gradients.virtual
        unreduced: dict[int, Any] = {}
        for number in numbers:
            slot, grad = slots[number], tensors[number].grad
            if number in during and slot.reducer is own and slot.may_be_sent(grad):
                self._sent.add(number)
                slot.sent, slot.shown, slot.sent_version = grad, grad, slot.version
                unreduced[number] = grad
            elif slot.reduced and slot.sent is None and slot.whole is None:
                unreduced[number] = None
            else:
                unreduced[number] = self._unreduced(number)
            if virtual is not None and virtual.is_complete and unreduced[number] is not None:
                raise _added_twice(number)
        means: dict[int, Any] = self.gradients.sums.mean_of(unreduced)
        if self.gradients.compression is None:
            return means
        sent = self.gradients.sent([*means.values()], paths(means))
        return dict(zip(means, sent, strict=True))

    def all_unreduced(self) -> list[Any]:
        """Return what this step's gradients are if no rank can say which are stale."""
        return [self._unreduced(number, stale=True) for number in range(len(self.tensors))]

    def _unreduced(self, number: int, *, stale: bool = False) -> torch.Tensor | None:
        """Return a gradient that has to be reduced, and note that this has begun.

        `stale` says that one which was reduced in a step before is no exception.
        """
        slot = self.slots[number]
        if self.accumulated is not None and slot.reducer() is not self._reducer():
            # In this pass, the other optimizer reduces it that has the parameter, too.
            return None
        parameter = self.tensors[number]
        slot.take_apart(parameter)
        grad = parameter.grad
        state = slot.state(grad)
        open_ = state is State.LOCAL or (stale and state is State.STALE)
        if slot.sent is None and grad is not None and open_:
            _check_gradient(grad, number)
            if number in (self.accumulated or ()) and writes_to(grad) != slot.version:
                raise _changed_inside(number)
            self._sent.add(number)
            slot.send(parameter)
        return slot.shown

    def forget_sent(self) -> None:
        """Take the gradients that were being reduced for unreduced ones, if they are."""
        for number in self._sent:
            slot = self.slots[number]
            slot.sent = slot.shown = None
        self._sent.clear()

    def shown_in_step(self) -> dict[str, bool]:
        """Return what a rank in its step says of its gradients; see `Place`."""
        slots, grads = self.slots, self.grads
        pairs = [(slots[number], grads[number]) for number in changed(slots, grads)]
        self._unchanged = not pairs
        states = {slot.state(grad) for slot, grad in pairs}
        return {
            "pending": bool(self.gradients.sums) or not states.isdisjoint(UNREDUCED),
            "replaced": State.REPLACED in states or any(slot.replaced for slot, _ in pairs),
            "changed": State.CHANGED in states,
            "stale": State.STALE in states,
        }

    def others(self) -> list[Any]:
        """Return to what else the hooks of these parameters report."""
        reducers = {id(slot.reducer): slot.reducer() for slot in self.slots}
        own = self._reducer()
        return [each for each in reducers.values() if each is not None and each is not own]

    # What a reduction gives

    def settle(self, leaves: Mapping[int, Any], *, unless_changed: bool = False) -> None:
        """Take over reduced gradients, None where no rank had one; maybe only what is unchanged."""
        if not leaves:
            return
        self._unchanged = False
        tensors, slots = self.tensors, self.slots
        plain: list[tuple[Slot, torch.Tensor]] = []
        with torch.no_grad():
            for number, reduced in leaves.items():
                tensor, slot = tensors[number], slots[number]
                if isinstance(reduced, torch.Tensor) and slot.may_be_taken_over(tensor.grad):
                    plain.append((slot, reduced))
                    continue
                if reduced is None and number not in self._sent:
                    continue
                written = slot.sent is not None and writes_to(slot.sent) != slot.sent_version
                if unless_changed and (written or tensor.grad is not slot.sent):
                    continue
                if written:
                    self.gradients.fail(_changed_inside(number))
                slot.settle(tensor, like(tensor, reduced))
            if plain:
                take_over([slot for slot, _ in plain], [reduced for _, reduced in plain])
        if self.gradients.is_counted:
            self.touched += [number for number, reduced in leaves.items() if reduced is not None]

    def settle_virtual(self, means: Mapping[int, Any]) -> None:
        """Take over the means of virtual ranks, and let go what else was sent.

        That is all before the last round, and in it what only a rank that plays none has had.
        """
        tensors, virtual = self.tensors, self.gradients.virtual
        assert virtual is not None
        for number, (slot, tensor) in enumerate(zip(self.slots, tensors, strict=True)):
            if number in means:
                continue
            if number in self._sent:
                slot.sent = slot.shown = None
                tensor.grad, slot.base = slot.base, None
                slot.note_reduced(tensor.grad)
            elif tensor.grad is not None and slot.state(tensor.grad) is State.STALE:
                if tensor.grad.any():
                    self.gradients.fail(kept_gradient(number))
                if virtual.has(number):
                    # Zeros of zero_grad(), which ranks that have sent a gradient have no more.
                    tensor.grad = None
        self._unchanged = False
        self.touched += self._sent - means.keys()
        self.settle({number: like(tensors[number], mean) for number, mean in means.items()})

    def replace(self, given: Sequence[Any]) -> None:
        """Replace all gradients by reduced ones of another rank."""
        self._unchanged = False
        for tensor, slot, grad in zip(self.tensors, self.slots, given, strict=True):
            tensor.grad = like(tensor, grad)
            slot.note_reduced(tensor.grad)

    # Steps

    def are_zeroed(self, numbers: Iterable[int]) -> bool:
        """Return whether the gradients of these parameters are None or zeros by now."""
        return all(self.slots[n].was_zeroed(self.tensors[n].grad) for n in numbers)

    def note_skipped(self, *, stepping: bool = False) -> None:
        """Go on to the next step if the gradients of this one have been zeroed without it.

        In a step, zeros are what the program has made of reduced gradients, as by clipping.
        """
        virtual = self.gradients.virtual
        if virtual is not None and virtual.is_complete and not virtual.is_last:
            # There are none until the last round.
            return
        are_gone = self.are_zeroed(self.touched)
        if stepping:
            are_gone = all(self.tensors[number].grad is None for number in self.touched)
        if self.touched and are_gone:
            self.finish_step(skipped=True)

    def finish_step(self, *, skipped: bool = False) -> None:
        """Go on to the next step."""
        self.forget_reduced()
        self.gradients.finish_step(skipped=skipped)

    def forget_reduced(self) -> None:
        """Take gradients that are assigned from now on for this rank's own."""
        self.touched, self.left = [], {}
        slots = self.slots
        if not self._unchanged:
            grads = self.grads
            for number in changed(slots, grads):
                slots[number].forget_reduced(grads[number])
        self._unchanged = False
        for slot in slots:
            slot.reduced = slot.replaced = False


def paths(numbers: Iterable[int]) -> list[str]:
    """Return what errors call the gradients of parameters."""
    return [f"the gradient of parameter {number}" for number in numbers]


_reducer_of: Final = attrgetter("reducer")
_GONE: Final = torch.empty(0)

UNSEEN: Final = (
    "the parameter came without add_param_group, or torch has swapped its contents, and backward() "
    "did not know it; call optimizer.zero_grad() after such a change, before backward()"
)


def _check_gradient(grad: torch.Tensor, number: int) -> None:
    """Raise for a gradient that cannot be reduced."""
    if grad.requires_grad:
        raise TypeError(
            f"the gradient of parameter {number} has a history (backward(create_graph=True)), "
            "which a reduction over ranks would lose; use torch.autograd.grad(..., "
            "create_graph=True), which leaves .grad alone, or no_sync(optimizer)"
        )
    if grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient of parameter {number} is of layout {grad.layout}, and only dense "
            "gradients are reduced; make the layer with sparse=False"
        )


def _changed_inside(number: int) -> RuntimeError:
    return RuntimeError(
        f"DistributedOptimizer: the gradient of parameter {number} was changed inside backward(), "
        "before it was reduced, as by a hook after its accumulation; change .grad after backward()"
    )


def kept_gradient(number: int) -> RuntimeError:
    """Return the error of a gradient of the step before in a round of virtual ranks."""
    return RuntimeError(
        f"DistributedOptimizer: the gradient of parameter {number} is that of the step before, "
        "which the program would see, and could clip, in each round of virtual ranks; call "
        "optimizer.zero_grad() before backward()"
    )


def _added_twice(number: int) -> RuntimeError:
    return RuntimeError(
        f"DistributedOptimizer: the gradient of parameter {number} is in the total of this round "
        "of virtual ranks, and there is another one; call step() once after the backward pass of "
        "each round, and run further passes before it in no_sync(optimizer), without re-entrant "
        "checkpoints"
    )


def like(parameter: torch.Tensor, reduced: Any) -> torch.Tensor | None:
    """Return a reduced gradient as a tensor where the parameter is."""
    if reduced is None:
        return None
    if not isinstance(reduced, torch.Tensor):
        # This rank had no gradient at all, so the result is NumPy's.
        reduced = ac.exchange(reduced, "torch")
    tensor: torch.Tensor = reduced.to(parameter.device)
    return tensor
