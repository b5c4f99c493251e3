"""Slots: the gradients of torch parameters between autograd and their reduction over ranks.

Before autograd adds to a gradient that has been reduced already, this is set aside as the *base*.
Autograd then accumulates this rank's part alone, which is reduced and added to the base.

A reduction writes only where autograd writes to a gradient that is there already, and to memory
that nobody else has. Autograd makes a new `.grad` of what the backward pass hands it: a part of
another gradient, if parameters were joined or added, or of a tensor that the program passed to
`backward`. Such a gradient is copied first, and so is one that the program has assigned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary


@dataclass(slots=True, eq=False)
class Slot:
    """The gradient of one parameter, between autograd and its reduction."""

    # A weak reference to the reducer of the optimizer made last for this parameter, and the number
    # of the parameter in it.
    reducer: Callable[[], Any] = lambda: None
    number: int = 0
    # What was reduced before. `.grad` is then what this rank has accumulated since.
    base: torch.Tensor | None = None
    # The `.grad` that is being reduced, and what is reduced of it: itself, or a copy. A result may
    # be written over it.
    sent: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    # Whether `.grad` has been reduced in this step, and whether something else had been assigned to
    # it after that, and was added to.
    reduced: bool = False
    replaced: bool = False
    # How often `.grad` had been written to when this slot last saw it, and `sent` when it was sent.
    version: int = 0
    sent_version: int = 0
    # What the last reduction has left, and the `.grad` to which a reduction may write.
    _result: TensorWeakRef | None = None
    _writable: TensorWeakRef | None = None
    # `.grad` before autograd accumulated, and how often it had been written to.
    _seen: tuple[torch.Tensor, int] | None = None

    def _is_result(self, grad: torch.Tensor | None) -> bool:
        """Return whether a gradient is the tensor that the last reduction has left."""
        return grad is not None and self._result is not None and self._result() is grad

    def is_reduced(self, grad: torch.Tensor) -> bool:
        """Return whether a gradient has been reduced, in this step or before."""
        return self.reduced or self._is_result(grad)

    def is_stale(self, grad: torch.Tensor | None) -> bool:
        """Return whether a gradient, by its memory, may be what an earlier step has reduced.

        Gradients may have been written into it since; torch counts not all ways to do so.
        """
        return not self.reduced and self._is_result(grad)

    def judge_stale(self, *, same: bool) -> None:
        """Take a stale gradient as reduced if all ranks' are the same, else as written by hand."""
        self.reduced = same
        if not same:
            self._result = None

    def is_replaced(self, grad: torch.Tensor | None) -> bool:
        """Return whether something else has become `.grad` after it was reduced in this step."""
        return self.replaced or (self.reduced and not self._is_result(grad))

    def is_changed(self, grad: torch.Tensor | None) -> bool:
        """Return whether `.grad` has been written to after it was reduced in this step."""
        return self.reduced and grad is not None and writes_to(grad) != self.version

    def forget_reduced(self, grad: torch.Tensor | None) -> None:
        """Begin a new step, after one with this gradient."""
        if self.reduced and not self._is_result(grad):
            self.note_reduced(grad)
        self.reduced = self.replaced = False

    def was_zeroed(self, grad: torch.Tensor | None) -> bool:
        """Return whether a gradient has been set to None or zeros since this slot last saw it."""
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
        """Have autograd use a new `.grad`; return whether the old one is being reduced."""
        grad = parameter.grad
        if grad is not None and grad is self.sent:
            parameter.grad = None
            return True
        if grad is None:
            self.base, self.reduced = None, False
        elif self.base_of(grad) is None and self.is_reduced(grad):
            if self.was_zeroed(grad):
                # The program may look for its gradients in this memory.
                self.reduced, self._result = False, None
                return False
            self.replaced = self.is_replaced(grad)
            self.base, parameter.grad = grad, None
        return False

    def put_back(self, parameter: torch.Tensor) -> None:
        """Undo `set_aside` if nothing has been accumulated."""
        if parameter.grad is None and self.base is not None:
            parameter.grad, self.base = self.base, None

    def accumulates(self, parameter: torch.Tensor) -> None:
        """Note that autograd is about to accumulate this rank's part."""
        grad = parameter.grad
        self._seen = None if grad is None else (grad, _version_of(grad))

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Note that autograd has accumulated this rank's part."""
        self.reduced, self._result = False, None
        grad, seen, self._seen = parameter.grad, self._seen, None
        self.version = 0
        if grad is None:
            return
        if seen is not None and seen[0] is grad:
            _leave_out(grad, seen[1])
        elif _is_plain(grad) and not is_alone(grad):
            parameter.grad = grad = grad.clone()
        self._writable = TensorWeakRef(grad)
        self.version = writes_to(grad)

    def made_writable(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return `.grad`, or a copy that takes its place if a reduction must not write to it."""
        grad = parameter.grad
        assert grad is not None
        if self._writable is None or self._writable() is not grad:
            parameter.grad = grad = grad.clone()
            self._writable = TensorWeakRef(grad)
        return grad

    def send(self, grad: torch.Tensor) -> None:
        """Note that the reduction of a gradient has begun."""
        self.sent, self.sent_version = grad, writes_to(grad)
        # What is written to one of two gradients in the same memory must not be reduced with the
        # other.
        self.shown = grad.clone() if _is_shared(grad) else grad

    def forget_sent(self) -> None:
        """Take the gradient that was being reduced for an unreduced one, if it is."""
        self.sent = self.shown = None

    def was_written(self) -> bool:
        """Return whether the gradient that is being reduced has been written to meanwhile."""
        return self.sent is not None and writes_to(self.sent) != self.sent_version

    def settle(self, parameter: torch.Tensor, reduced: torch.Tensor | None) -> None:
        """Take over a reduced gradient, unless no rank had one."""
        sent = self.sent
        self.forget_sent()
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
            self._writable = self._result

    def _total(
        self, parameter: torch.Tensor, sent: torch.Tensor | None, reduced: torch.Tensor
    ) -> torch.Tensor:
        """Return the whole reduced gradient, in the memory where the program has seen it."""
        base = self.base_of(sent) if sent is not None else parameter.grad
        if sent is not None and reduced is sent:
            before = _version_of(sent)
            torch.autograd.graph.increment_version(sent)
            _leave_out(sent, before)
        if base is not None and base.is_inference():
            return base + reduced
        target = sent if base is None else base
        if target is None or target is reduced:
            return reduced
        before = _version_of(target)
        target.copy_(reduced) if base is None else target.add_(reduced)
        _leave_out(target, before)
        return target


_slots: Final[Any] = WeakTensorKeyDictionary()


def slot_of(parameter: torch.Tensor) -> Slot:
    """Return the slot of a parameter; the first call hooks it to the parameter."""
    slot: Slot | None = _slots.get(parameter)
    if slot is None:
        slot = _slots[parameter] = Slot()
        if _may_have_gradient(parameter):
            # Torch allows hooks only while gradients are required. They stay if a parameter is
            # frozen.
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
    """Return how often the program has written to a gradient, or to others in the same memory.

    Torch counts the writes to all of these together: those of autograd and of reductions are left
    out.
    """
    if grad.is_inference():
        return 0
    dense = grad.layout is torch.strided
    left_out = _left_out.get(_memory_of(grad), 0) if _left_out and dense else 0
    return _version_of(grad) - left_out


def _leave_out(grad: torch.Tensor, before: int) -> None:
    """Leave writes since `before` out of what `writes_to` returns for others in the same memory."""
    if _is_shared(grad):
        memory = _memory_of(grad)
        _left_out[memory] = _left_out.get(memory, 0) + _version_of(grad) - before


# By the address of what torch knows of some memory. Memory of one gradient alone is not here.
_left_out: Final[dict[int, int]] = {}


def _memory_of(grad: torch.Tensor) -> int:
    return int(grad.untyped_storage()._cdata)


def is_alone(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor and no other library has the memory of a tensor."""
    if tensor.layout is not torch.strided:
        return False
    storage = tensor.untyped_storage()
    # Otherwise NumPy or another library has it, or had.
    return (storage.resizable() or storage.is_cuda) and not _is_shared(tensor)


def _is_shared(tensor: torch.Tensor) -> bool:
    """Return whether another tensor has the memory of a tensor, if it is dense."""
    return tensor.layout is torch.strided and bool(_uses_of(_memory_of(tensor)) != _ONE_TENSOR)


def _is_plain(grad: torch.Tensor) -> bool:
    """Return whether a gradient can be reduced at all; see `_check_gradient`."""
    return grad.layout is torch.strided and not grad.requires_grad


def _version_of(tensor: torch.Tensor) -> int:
    return int(tensor._version)


# How many objects have some memory. A torch that does not count them has every new gradient copied.
_uses_of: Any = getattr(torch._C, "_storage_Use_Count", lambda memory: -1)
_alone = torch.empty(1)
_ONE_TENSOR: Final = max(_uses_of(_memory_of(_alone)), 0)
