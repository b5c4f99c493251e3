"""Slots: the gradients of torch parameters between autograd and their reduction over ranks.

Before autograd adds to a gradient that has been reduced already, this is set aside as the *base*.
Autograd then accumulates this rank's part alone, which is reduced and added to the base. If a pass
ends without that, as by an exception, `.grad` is their sum, as torch alone would have left it.
Before anything else happens to the gradient, the two are taken apart again.

Torch swaps the contents of two tensors only if nothing refers to them weakly. So a parameter has
its slot as an attribute, and what a gradient was is told by the memory that it had.

The states of a gradient, of which `State` says what they are, and what leads from one to another.
No slot is told of what the program does to `.grad`, so a state is found out when it is asked for:

    EMPTY                      autograd accumulates (`accumulated`)       LOCAL
    LOCAL                      `send`                                     SENT
    SENT                       `settle`                                   REDUCED
    SENT                       `forget_sent`: the reduction has failed    LOCAL
    SENT                       autograd accumulates (`set_aside`)         LOCAL; a base at `settle`
    REDUCED                    the program writes to it                   CHANGED
    REDUCED, CHANGED           the program assigns another, or None       REPLACED
    REDUCED, CHANGED, REPLACED `forget_reduced`: the next step begins     STALE
    STALE                      `judge_stale`: all ranks have the same     REDUCED
    STALE                      `judge_stale`: they have not               LOCAL
    STALE, LOCAL               the program sets it to None                EMPTY
    all but EMPTY, LOCAL, SENT autograd accumulates (`set_aside`)         LOCAL, with a base
    LOCAL, with a base         `show_whole`, and back by `take_apart`     the whole of the two

A reduction writes only where autograd writes to a gradient that is there already, and to memory
that nobody else has. Autograd makes a new `.grad` of what the backward pass hands it: a part of
another gradient, if parameters were joined or added, or of a tensor that the program passed to
`backward`. Such a gradient is copied first, and so is one that the program has assigned.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, Final, TypeAlias

import torch

from arraycomm._entries import opaque
from arraycomm._trees.fusion import LARGE

_STRIDED: Final = torch.strided
# What torch knows of a tensor and of a storage, asked without a call of a function in Python.
_version_of: Final[Callable[[Any], int]] = attrgetter("_version")
_address_of: Final[Callable[[Any], int]] = attrgetter("_cdata")
_weakly: Final[Callable[[Any], int]] = methodcaller("_weak_ref")
_free: Final[Callable[[int], None]] = attrgetter("_free_weak_ref")(torch.UntypedStorage)
Place: TypeAlias = tuple[int, int | torch.SymInt, tuple[int, ...]]


class _Reserved:
    """The addresses of some storages, which no others get meanwhile; their memory is not kept."""

    __slots__ = ("_references",)

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        self._references = list(map(_weakly, storages))

    def __del__(self, free: Callable[[int], None] = _free) -> None:
        for reference in self._references:
            free(reference)


# Where a dense tensor is, and what reserves the address.
Memory: TypeAlias = tuple[Place, _Reserved]


def _memories(tensors: Sequence[torch.Tensor]) -> list[Memory]:
    """Return where dense tensors are, without keeping them."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    reserved = _Reserved(storages)
    return [
        ((address, tensor.storage_offset(), tensor.stride()), reserved)
        for address, tensor in zip(map(_address_of, storages), tensors, strict=True)
    ]


def _is_at(memory: Memory | None, tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is there."""
    if memory is None or tensor is None or tensor.layout is not _STRIDED:
        return False
    return memory[0] == (
        _address_of(tensor.untyped_storage()),
        tensor.storage_offset(),
        tensor.stride(),
    )


def nobody() -> None:
    """Return no reducer: a reference to one that is gone."""


class State(enum.Enum):
    """What a gradient is; the drawing above has what leads from one to the next."""

    EMPTY = "no gradient"
    LOCAL = "this rank's own part, still to be reduced"
    SENT = "being reduced"
    REDUCED = "as the reduction of this step has left it"
    CHANGED = "reduced in this step, and written to since"
    REPLACED = "another one in place of what was reduced in this step, maybe none"
    # By its memory. Gradients may have been written into it since: torch counts not all ways.
    STALE = "what a step before has reduced"


# Those of a gradient that is this rank's own part.
UNREDUCED: Final = (State.LOCAL, State.SENT)


@dataclass(slots=True, eq=False)
class Slot:
    """The gradient of one parameter, between autograd and its reduction."""

    # A weak reference to the reducer of the optimizer made last for this parameter, and the number
    # of the parameter in it.
    reducer: Callable[[], Any] = nobody
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
    # What the last reduction has left, and the `.grad` to which a reduction may write: itself
    # during a pass, and then where it is.
    result: Memory | None = None
    _writable: Memory | torch.Tensor | None = None
    # `.grad` before autograd accumulated, and how often it had been written to.
    _seen: tuple[torch.Tensor, int] | None = None
    # `.grad` as the sum of a base and of this rank's part, and the two.
    whole: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def state(self, grad: torch.Tensor | None) -> State:
        """Return what the parameter's gradient is now."""
        is_result = _is_at(self.result, grad)
        if not self.reduced:
            if grad is None:
                return State.EMPTY
            if is_result:
                return State.STALE
            return State.SENT if grad is self.sent else State.LOCAL
        if grad is None or self.replaced or not is_result:
            return State.REPLACED
        return State.REDUCED if writes_to(grad) == self.version else State.CHANGED

    def may_be_sent(self, grad: torch.Tensor | None) -> bool:
        """Return whether a gradient is what autograd has just made, in memory of its own.

        That of a large one, over which a reduction may write its result, has to be so still.
        """
        return (
            grad is not None
            and self._writable is grad
            and self.sent is None
            and self.whole is None
            and not (self.reduced or grad.requires_grad or grad.is_inference() or _left_out)
            and _version_of(grad) == self.version
            and grad.layout is _STRIDED
            and (grad.nbytes < LARGE or is_alone(grad))
        )

    def may_be_taken_over(self, grad: torch.Tensor | None) -> bool:
        """Return whether nothing has happened to the gradient that was sent, and is `.grad`."""
        return (
            grad is not None
            and grad is self.sent is self.shown
            and self.base is None
            # Torch writes to several tensors only if none is a conjugate of its memory.
            and not (_left_out or grad.is_inference() or grad.is_conj() or grad.is_neg())
            and _version_of(grad) == self.sent_version
            and is_alone(grad)
        )

    def forget_reduced(self, grad: torch.Tensor | None) -> None:
        """Begin a new step, after one with this gradient."""
        if self.reduced and not _is_at(self.result, grad):
            self.note_reduced(grad)
        self.reduced = self.replaced = False

    def was_zeroed(self, grad: torch.Tensor | None) -> bool:
        """Return whether a gradient has been set to None or zeros since this slot last saw it."""
        if grad is None:
            return True
        seen = self.result is None or _is_at(self.result, grad)
        if seen and writes_to(grad) == self.version:
            return False
        return not grad.any()

    def base_of(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Return what was reduced before this gradient was accumulated, if anything."""
        if self.base is not None and self.was_zeroed(grad):
            self.base = None
        return self.base

    def has_base(self, grad: torch.Tensor) -> bool:
        """Return whether a gradient is one that `set_aside` takes away, or what it has left."""
        apart = self.base is not None or self.whole is not None
        return (apart or self.state(grad) not in UNREDUCED) and not self.was_zeroed(grad)

    def set_aside(self, parameter: torch.Tensor) -> bool:
        """Have autograd use a new `.grad`; return whether the old one is being reduced."""
        self.take_apart(parameter)
        grad = parameter.grad
        late = grad is not None and grad is self.sent
        if grad is None:
            self.begin()
        elif late:
            parameter.grad = None
        elif self.base_of(grad) is None and (state := self.state(grad)) not in UNREDUCED:
            if self.was_zeroed(grad):
                # The program may look for its gradients in this memory.
                self.reduced, self.result = False, None
            else:
                self.replaced = self.replaced or state is State.REPLACED
                self.base, parameter.grad = grad, None
        grad = parameter.grad
        self._seen = None if grad is None else (grad, _version_of(grad))
        return late

    def begin(self) -> None:
        """Note that there is no gradient, and that autograd may make one."""
        self.base = self.whole = self._seen = None
        self.reduced = False

    def show_whole(self, parameter: torch.Tensor, *, at_once: bool) -> None:
        """Let `.grad` be what torch alone would have left: the base, with what was accumulated.

        If that is not done at once, the program may have set it to None meanwhile.
        """
        part, base = parameter.grad, self.base
        if self._seen is not None and base is None and part is self._seen[0]:
            # An exception came before anybody told this slot that autograd has added to it.
            self.accumulated(parameter)
        if base is not None and self.state(base) not in UNREDUCED:
            # Nobody has told this slot that autograd has accumulated; it may not have.
            if part is None:
                parameter.grad, self.base = base if at_once else None, None
                return
            self.accumulated(parameter)
            part = parameter.grad
        base = self.base_of(part)
        if part is None or base is None:
            return
        value = base
        if part.requires_grad or base.is_inference():
            with torch.enable_grad():
                whole = base + part
        else:
            value, before = base.clone(), _version_of(base)
            with torch.no_grad():
                whole = base.add_(part)
            _leave_out(whole, before)
        self.base, self.whole = None, (whole, value, part)
        parameter.grad, self.version = whole, writes_to(whole)

    def take_apart(self, parameter: torch.Tensor) -> None:
        """Undo `show_whole`, unless `.grad` has been changed since."""
        if self.whole is None:
            return
        (whole, value, part), self.whole = self.whole, None
        grad = parameter.grad
        if grad is whole and writes_to(whole) == self.version:
            if not (whole.requires_grad or whole.is_inference()):
                before = _version_of(whole)
                value = whole.copy_(value)
                _leave_out(whole, before)
            self.base, parameter.grad = value, part
            self.version = writes_to(part)
        elif not self.was_zeroed(grad):
            # Nobody can tell any more what of it has been reduced.
            self.reduced = self.replaced = True

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Note that autograd has accumulated this rank's part."""
        grad, seen, self._seen = parameter.grad, self._seen, None
        self.reduced, self.result, self._writable, self.version = False, None, grad, 0
        if grad is None:
            return
        if seen is not None and seen[0] is grad:
            _leave_out(grad, seen[1])
        elif not is_alone(grad) and grad.layout is _STRIDED and not grad.requires_grad:
            parameter.grad = self._writable = grad = grad.clone()
        self.version = writes_to(grad)

    def release_gradient(self) -> None:
        """Keep the place of the gradient alone, after a pass."""
        if isinstance(self._writable, torch.Tensor):
            self._writable = _memory(self._writable)

    def send(self, parameter: torch.Tensor) -> None:
        """Note that the reduction of `.grad` has begun: of a copy if it must not write to that."""
        grad = parameter.grad
        assert grad is not None
        self.release_gradient()
        assert not isinstance(self._writable, torch.Tensor)
        if not _is_at(self._writable, grad):
            parameter.grad = grad = grad.clone()
            self._writable = _memory(grad)
        self.sent, self.sent_version = grad, writes_to(grad)
        # What is written to one of two gradients in the same memory must not be reduced with the
        # other.
        self.shown = grad.clone() if _is_shared(grad) else grad

    def settle(self, parameter: torch.Tensor, reduced: torch.Tensor | None) -> None:
        """Take over a reduced gradient, unless no rank had one."""
        sent, self.sent, self.shown = self.sent, None, None
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
        if grad is None:
            return
        self.result = self._writable = _memory(grad)
        self.reduced, self.version, self.whole = True, writes_to(grad), None

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


class _Mark:
    """An attribute of a parameter: its slot.

    It goes with the parameter, and with the hooks that torch calls: if torch swaps the contents of
    two tensors, it swaps their attributes, too. Then the reducer looks at its parameters.
    """

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def __del__(self) -> None:
        reducer = None if sys.is_finalizing() else self.slot.reducer()
        if reducer is not None:
            reducer.look_again()

    def __reduce__(self) -> tuple[type[Any], tuple[()]]:
        # Saved with the parameter, as what everybody can load.
        return OrderedDict, ()


_MARK: Final = "_arraycomm"
_marked: Final[Callable[[torch.Tensor], Slot]] = attrgetter(f"{_MARK}.slot")


def marked_slots(parameters: Sequence[torch.Tensor]) -> list[Slot | None]:
    """Return the slots to which the hooks of parameters report."""
    try:
        return list(map(_marked, parameters))
    except AttributeError:
        return list(map(marked_slot, parameters))


def marked_slot(parameter: torch.Tensor) -> Slot | None:
    """Return the slot to which the hooks of a parameter report."""
    return getattr(parameter.__dict__.get(_MARK), "slot", None)


def slot_of(parameter: torch.Tensor) -> Slot:
    """Return the slot of a parameter; the first call hooks it to the parameter."""
    slot = marked_slot(parameter)
    if slot is None:
        slot = _swapped(parameter)
        if slot is None:
            slot = Slot()
            _hook(parameter, slot)
        vars(parameter)[_MARK] = _Mark(slot)
    return slot


def _swapped(parameter: Any) -> Slot | None:
    """Return the slot of a parameter whose contents torch has swapped, and hook it again."""
    hooks: dict[int, Any] = parameter._backward_hooks or {}
    arguments = [hook.args for hook in hooks.values() if isinstance(hook, partial)]
    slots = [each[0] for each in arguments if each and isinstance(each[0], Slot)]
    if not slots:
        return None
    # The object has its hooks still, and torch calls them once they are set.
    parameter._backward_hooks = hooks
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks
    return slots[0]


def _hook(parameter: Any, slot: Slot) -> None:
    if not _may_have_gradient(parameter):
        return
    before: Any = partial(_before_accumulation, slot)
    before.__torch_unserializable__ = True  # so that torch does not warn when it saves the tensor
    # Torch allows hooks only while gradients are required. They stay if a parameter is frozen.
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    parameter.register_hook(before)
    parameter.register_post_accumulate_grad_hook(partial(_after_accumulation, slot))
    if frozen:
        parameter.requires_grad_(False)


def _may_have_gradient(parameter: torch.Tensor) -> bool:
    numeric = parameter.is_floating_point() or parameter.is_complex()
    return numeric and parameter.is_leaf and not parameter.is_inference()


@opaque
def _before_accumulation(slot: Slot, _: torch.Tensor) -> None:
    reducer = slot.reducer()
    if reducer is None:
        return
    backward = reducer.backward
    if backward is not None and backward.expects(slot.number):
        slot.begin()
    else:
        reducer.before_accumulation(slot)


@opaque
def _after_accumulation(slot: Slot, parameter: torch.Tensor) -> None:
    reducer = slot.reducer()
    backward = None if reducer is None else reducer.backward
    if backward is not None:
        slot.accumulated(parameter)
        backward.note(slot.number)


def writes_to(grad: torch.Tensor) -> int:
    """Return how often the program has written to a gradient, or to others in the same memory.

    Torch counts the writes to all of these together: those of autograd and of reductions are left
    out.
    """
    if grad.is_inference():
        return 0
    if _left_out and grad.layout is _STRIDED:
        return _version_of(grad) - _left_out.get(_address_of(grad.untyped_storage()), 0)
    return _version_of(grad)


def _leave_out(grad: torch.Tensor, before: int) -> None:
    """Leave writes since `before` out of what `writes_to` returns for others in the same memory."""
    if _is_shared(grad):
        memory = _address_of(grad.untyped_storage())
        _left_out[memory] = _left_out.get(memory, 0) + _version_of(grad) - before


# By the address of what torch knows of some memory. Memory of one gradient alone is not here.
_left_out: Final[dict[int, int]] = {}


def _memory(tensor: torch.Tensor) -> Memory | None:
    return _memories([tensor])[0] if tensor.layout is _STRIDED else None


def is_alone(tensor: torch.Tensor) -> bool:
    """Return whether no other tensor and no other library has the memory of a tensor."""
    if tensor.layout is not _STRIDED:
        return False
    storage = tensor.untyped_storage()
    # One that cannot be resized is NumPy's or another library's, or was.
    one = _uses_of(_address_of(storage)) == _ONE_TENSOR
    return one and (storage.resizable() or storage.is_cuda)


def take_over(slots: Sequence[Slot], reduced: Sequence[torch.Tensor]) -> None:
    """Write reduced gradients over those that were sent, which are still the parameters'.

    Each is one that `Slot.settle` would write there; this does so for all at once.
    """
    sent: list[Any] = [slot.sent for slot in slots]
    torch.autograd.graph.increment_version(sent)
    pairs = [pair for pair in zip(sent, reduced, strict=True) if pair[0] is not pair[1]]
    if pairs:
        torch._foreach_copy_([grad for grad, _ in pairs], [result for _, result in pairs])
    for slot, grad, memory in zip(slots, sent, _memories(sent), strict=True):
        slot.sent = slot.shown = slot.base = slot.whole = None
        slot.result = slot._writable = memory
        slot.reduced, slot.version = True, _version_of(grad)


def changed(slots: Sequence[Slot], grads: Sequence[torch.Tensor | None]) -> list[int]:
    """Return the places of gradients that are not just what the reduction of this step has left."""
    return [
        place
        for place, (slot, grad) in enumerate(zip(slots, grads, strict=True))
        if slot.replaced
        or slot.reduced is (grad is None)
        # As `_is_at` and `writes_to` say it, without a call for each gradient of each step.
        or (
            grad is not None
            and (
                slot.result is None
                or grad.layout is not _STRIDED
                or grad.is_inference()
                or slot.result[0]
                != (_address_of(grad.untyped_storage()), grad.storage_offset(), grad.stride())
                or (writes_to(grad) if _left_out else _version_of(grad)) != slot.version
            )
        )
    ]


def _is_shared(tensor: torch.Tensor) -> bool:
    """Return whether another tensor has the memory of a tensor, if it is dense."""
    return tensor.layout is torch.strided and bool(
        _uses_of(_address_of(tensor.untyped_storage())) != _ONE_TENSOR
    )


# How many objects have some memory. A torch that does not count them has every new gradient copied.
_uses_of: Any = getattr(torch._C, "_storage_Use_Count", lambda memory: -1)
_alone = torch.empty(1)
_ONE_TENSOR: Final = max(_uses_of(_address_of(_alone.untyped_storage())), 0)
