"""Slots: the gradients of torch parameters between autograd and their reduction over ranks.

Before autograd adds to a gradient that has been reduced already, this is set aside as the *base*.
Autograd then accumulates this rank's part alone, which is reduced and added to the base.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary


class Slot:
    """The gradient of one parameter, between autograd and its reduction.

    Attributes
    ----------
    reducer : weak reference to BackwardReducer
        That of the optimizer made last for this parameter, which reduces its gradient.
    number : int
        Of the parameter in that reducer.
    base : Tensor or None
        What was reduced before. `.grad` is then what this rank has accumulated since.
    sent : Tensor or None
        The `.grad` that is being reduced.
    reduced : bool
        Whether `.grad` has been reduced in this step.
    replaced : bool
        Whether something else had been assigned to `.grad` after it was reduced, and was added to.
    sent_version : int
        How often that had been written to when it was sent.
    version : int
        How often `.grad` had been written to when this slot last saw it.
    """

    __slots__ = (
        "_result",
        "base",
        "number",
        "reduced",
        "reducer",
        "replaced",
        "sent",
        "sent_version",
        "version",
    )

    def __init__(self) -> None:
        self.reducer: Any = lambda: None
        self.number = 0
        self.base: torch.Tensor | None = None
        self.sent: torch.Tensor | None = None
        self.reduced = self.replaced = False
        self.version = self.sent_version = 0
        self._result: Any = None

    def _is_result(self, grad: torch.Tensor | None) -> bool:
        """Tell whether a gradient is the tensor that the last reduction has left."""
        return grad is not None and self._result is not None and self._result() is grad

    def is_reduced(self, grad: torch.Tensor) -> bool:
        """Tell whether a gradient has been reduced, and maybe changed since."""
        return self.reduced or self._is_result(grad)

    def is_stale(self, grad: torch.Tensor | None) -> bool:
        """Tell whether a gradient may be what was reduced in a step before, if its memory is the same.

        Gradients may have been written into it since; torch counts not all ways to do so.
        """
        return grad is not None and not self.reduced and self._is_result(grad)

    def is_settled(self, grad: torch.Tensor) -> bool:
        """Tell whether a gradient has been reduced, in this step or before."""
        return self.reduced or self.is_stale(grad)

    def judge_stale(self, *, same: bool) -> None:
        """Take a stale gradient as reduced, or, if the ranks' are not the same, as written by hand."""
        self.reduced = same
        if not same:
            self._result = None

    def is_replaced(self, grad: torch.Tensor | None) -> bool:
        """Tell whether something else has been assigned to `.grad` after it was reduced in this step."""
        return self.replaced or (self.reduced and not self._is_result(grad))

    def is_changed(self, grad: torch.Tensor | None) -> bool:
        """Tell whether `.grad` has been written to after it was reduced in this step."""
        return self.reduced and grad is not None and writes_to(grad) != self.version

    def forget_reduced(self, grad: torch.Tensor | None) -> None:
        """Begin a new step, after one with this gradient."""
        if self.reduced and not self._is_result(grad):
            self.note_reduced(grad)
        self.reduced = self.replaced = False

    def was_zeroed(self, grad: torch.Tensor | None) -> bool:
        """Tell whether a gradient has been set to None or zeros since this slot last saw it."""
        if grad is None:
            return True
        seen = self._result is None or self._result() is grad
        if seen and writes_to(grad) == self.version:
            return False
        return not grad.any()

    def base_of(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Return what was reduced before this gradient was accumulated, if anything."""
        if self.base is not None and self.was_zeroed(grad):
            self.base = None
        return self.base

    def set_aside(self, parameter: torch.Tensor) -> bool:
        """Make autograd accumulate into a new `.grad`; tell whether the old one is being reduced."""
        grad = parameter.grad
        if grad is not None and grad is self.sent:
            parameter.grad = None
            return True
        if grad is None:
            self.base, self.reduced = None, False
        elif self.base_of(grad) is None and self.is_reduced(grad):
            self.replaced = self.is_replaced(grad)
            self.base, parameter.grad = grad, None
        return False

    def put_back(self, parameter: torch.Tensor) -> None:
        """Undo `set_aside` if nothing has been accumulated."""
        if parameter.grad is None and self.base is not None:
            parameter.grad, self.base = self.base, None

    def accumulated(self, grad: torch.Tensor | None) -> None:
        """Note that autograd has accumulated this rank's part."""
        self.reduced, self._result = False, None
        self.version = 0 if grad is None else writes_to(grad)

    def send(self, grad: torch.Tensor) -> None:
        """Note that the reduction of a gradient has begun."""
        self.sent, self.sent_version = grad, writes_to(grad)

    def was_written(self) -> bool:
        """Tell whether the gradient that is being reduced has been written to meanwhile."""
        return self.sent is not None and writes_to(self.sent) != self.sent_version

    def settle(self, parameter: torch.Tensor, reduced: torch.Tensor | None) -> None:
        """Take over a reduced gradient, unless no rank had one."""
        sent, self.sent = self.sent, None
        if reduced is None:
            return
        grad = parameter.grad
        late = sent is not None and grad is not sent
        total = self._total(parameter, sent, reduced)
        self.base = None
        if late and grad is not None:
            self.base = total
            return
        if grad is not total:
            parameter.grad = total
        self.note_reduced(total)

    def note_reduced(self, grad: torch.Tensor | None) -> None:
        """Note that `.grad` is reduced now."""
        if grad is not None:
            self.reduced, self.version, self._result = True, writes_to(grad), TensorWeakRef(grad)

    def _total(
        self, parameter: torch.Tensor, sent: torch.Tensor | None, reduced: torch.Tensor
    ) -> torch.Tensor:
        """Return the whole reduced gradient, in the memory where the program has seen it."""
        base = self.base_of(sent) if sent is not None else parameter.grad
        if sent is not None and reduced is sent:
            torch.autograd.graph.increment_version(sent)
        if base is not None:
            return base.add_(reduced)
        return reduced if sent is None or reduced is sent else sent.copy_(reduced)


_slots: Final[Any] = WeakTensorKeyDictionary()


def slot_of(parameter: torch.Tensor) -> Slot:
    """Return the slot of a parameter; the first call hooks it to the parameter."""
    slot: Slot | None = _slots.get(parameter)
    if slot is None:
        slot = _slots[parameter] = Slot()
        if _may_have_gradient(parameter):
            # Torch allows hooks only while gradients are required. They stay if a parameter is frozen.
            frozen = not parameter.requires_grad
            if frozen:
                parameter.requires_grad_(True)
            _hook(parameter, slot)
            if frozen:
                parameter.requires_grad_(False)
    return slot


def _hook(parameter: Any, slot: Slot) -> None:
    # Not part of what torch compiles.
    opaque: Any = torch.compiler.disable
    before: Any = partial(opaque(_before_accumulation), slot)
    before.__torch_unserializable__ = True  # so that torch does not warn when it saves the tensor
    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(partial(opaque(_after_accumulation), slot))


def _may_have_gradient(parameter: torch.Tensor) -> bool:
    numeric = parameter.is_floating_point() or parameter.is_complex()
    return numeric and parameter.is_leaf and not parameter.is_inference()


def _before_accumulation(slot: Slot, _: torch.Tensor) -> None:
    reducer = slot.reducer()
    if reducer is not None:
        reducer.before_accumulation(slot)


def _after_accumulation(slot: Slot, parameter: torch.Tensor) -> None:
    reducer = slot.reducer()
    if reducer is not None:
        reducer.after_accumulation(slot, parameter)


def writes_to(grad: torch.Tensor) -> int:
    """Return how often a tensor has been written to."""
    return grad._version
