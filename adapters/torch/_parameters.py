"""The parameters of one torch optimizer: whose gradients are reduced, and whose are to be."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

import arraycomm as ac
from arraycomm.adapters.torch._slots import Slot, slot_of, writes_to


class Parameters:
    """The parameters of one optimizer, by their numbers, and their gradients in this step."""

    def __init__(self, gradients: Any) -> None:
        self.gradients = gradients
        self.tensors: list[torch.Tensor] = []
        self.slots: list[Slot] = []
        # Those with gradients of backward passes for this step.
        self.touched: list[int] = []
        # Those whose gradients the backward pass that goes on has accumulated.
        self.accumulated: Collection[int] = ()

    def adopt(self, groups: Sequence[dict[str, Any]], reducer: object) -> bool:
        """Have the hooks of these parameters report to a reducer; return whether any is new."""
        tensors = list({id(p): p for each in groups for p in each["params"]}.values())
        if list(map(id, tensors)) == list(map(id, self.tensors)):
            self._report_to(reducer, only_free=True)
            return False
        self.note_skipped()
        self._renumber_states(tensors)
        self.tensors, self.slots, self.touched = tensors, list(map(slot_of, tensors)), []
        self._report_to(reducer)
        return True

    def _renumber_states(self, tensors: list[torch.Tensor]) -> None:
        """Keep what a compression remembers of the parameters that stay; of a copy's, of all."""
        states = self.gradients.compressor.states
        if states is not None and self.tensors:
            numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
            pairs = ((old, numbers.get(id(tensor))) for old, tensor in enumerate(self.tensors))
            states.renumber({old: new for old, new in pairs if new is not None})

    def _report_to(self, reducer: object, *, only_free: bool = False) -> None:
        for number, slot in enumerate(self.slots):
            if not only_free or slot.reducer() is None:
                slot.reducer, slot.number = weakref.ref(reducer), number

    @property
    def grads(self) -> list[torch.Tensor | None]:
        """The gradients as they are now."""
        return [tensor.grad for tensor in self.tensors]

    @property
    def is_counted(self) -> bool:
        """Whether ranks compare in which step they are."""
        return self.gradients.rounds is not None and not self.gradients.joined

    # What this rank adds to a reduction

    def means(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Return what this rank adds to the reduction of these parameters' gradients."""
        unreduced = {number: self._unreduced(number) for number in numbers}
        sent: dict[int, Any] = self.gradients.compressor.fed_back(self.gradients.mean_of(unreduced))
        return sent

    def zeros(self, number: int) -> torch.Tensor:
        """Return what a missing gradient counts as."""
        return torch.zeros_like(self.tensors[number], requires_grad=False)

    def all_unreduced(self) -> list[Any]:
        """Return what this step's gradients are if no rank can say which are stale."""
        return [self._unreduced(number, stale=True) for number in range(len(self.tensors))]

    def _unreduced(self, number: int, *, stale: bool = False) -> torch.Tensor | None:
        """Return a gradient that has to be reduced, and note that this has begun.

        `stale` says that one which was reduced in a step before is no exception.
        """
        slot, grad = self.slots[number], self.tensors[number].grad
        settled = grad is None or (slot.reduced if stale else slot.is_reduced(grad))
        if slot.sent is None and grad is not None and not settled:
            _check_gradient(grad, number)
            if number in self.accumulated and writes_to(grad) != slot.version:
                raise _changed_inside(number)
            slot.send(slot.made_writable(self.tensors[number]))
        return slot.shown

    def forget_sent(self) -> None:
        """Take the gradients that were being reduced for unreduced ones, if they are."""
        for slot in self.slots:
            slot.forget_sent()
        self.gradients.compressor.forget()

    def is_pending(self) -> bool:
        """Return whether this rank has gradients that are not reduced."""
        pairs = zip(self.slots, self.grads, strict=True)
        return self.gradients.has_sums or any(
            grad is not None and not slot.is_reduced(grad) for slot, grad in pairs
        )

    def any(self, question: Callable[[Slot, torch.Tensor | None], bool]) -> bool:
        """Ask a question about each gradient; tell whether it is true of any."""
        return any(question(slot, grad) for slot, grad in zip(self.slots, self.grads, strict=True))

    # What a reduction gives

    def settle(self, leaves: Mapping[int, Any], *, unless_changed: bool = False) -> None:
        """Take over reduced gradients, None where no rank had one; maybe only what is unchanged."""
        with torch.no_grad():
            for number, reduced in leaves.items():
                tensor, slot = self.tensors[number], self.slots[number]
                if unless_changed and (tensor.grad is not slot.sent or slot.was_written()):
                    continue
                if slot.was_written():
                    self.gradients.fail(_changed_inside(number))
                slot.settle(tensor, _like(tensor, reduced))
        if self.is_counted:
            self.touched += [number for number, reduced in leaves.items() if reduced is not None]

    def settle_all(self, reduced: Sequence[Any]) -> None:
        """Take over the reduced gradients of all parameters."""
        self.settle(dict(enumerate(reduced)))

    def replace(self, given: Sequence[Any]) -> None:
        """Replace all gradients by reduced ones of another rank."""
        for tensor, slot, grad in zip(self.tensors, self.slots, given, strict=True):
            tensor.grad = _like(tensor, grad)
            slot.note_reduced(tensor.grad)

    # Steps

    def are_zeroed(self, numbers: Iterable[int]) -> bool:
        """Return whether the gradients of these parameters are None or zeros by now."""
        return all(self.slots[n].was_zeroed(self.tensors[n].grad) for n in numbers)

    def note_skipped(self) -> None:
        """Go on to the next step if the gradients of this one have been zeroed without it."""
        if self.touched and self.are_zeroed(self.touched):
            self.finish_step(skipped=True)

    def finish_step(self, *, skipped: bool = False) -> None:
        """Go on to the next step."""
        self.forget_reduced()
        self.gradients.finish_step(skipped=skipped)

    def forget_reduced(self) -> None:
        """Take gradients that are assigned from now on for this rank's own."""
        self.touched = []
        for slot, grad in zip(self.slots, self.grads, strict=True):
            slot.forget_reduced(grad)


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


def _like(parameter: torch.Tensor, reduced: Any) -> torch.Tensor | None:
    """Return a reduced gradient as a tensor where the parameter is."""
    if reduced is None:
        return None
    if not isinstance(reduced, torch.Tensor):
        # This rank had no gradient at all, so the result is NumPy's.
        reduced = ac.exchange(reduced, "torch")
    tensor: torch.Tensor = reduced.to(parameter.device)
    return tensor
