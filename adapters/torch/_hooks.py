"""Gradients of torch parameters, reduced over all ranks while a backward pass computes them.

Two hooks on each parameter watch the accumulation of its gradient. The parameters are divided into
buckets. The reduction of a bucket starts before the next gradient is accumulated, once all its own
are there and the buckets before it have been started: all ranks start them in the same order. A
rank without a core for that starts them all at the end of the pass, in this order too. What is left
is started at the end of the backward pass, which waits for all. So `.grad` is reduced when
`backward()` returns. If it raises, it waits as well, so that nothing is written to `.grad`
afterwards: the gradients whose reduction had started are reduced. The others are what torch alone
would have left: what was there, and what this rank has accumulated.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch._C import _current_autograd_node, _current_graph_task_id
from torch.autograd import Variable

import arraycomm as ac
from arraycomm._communicator import group_of
from arraycomm._entries import opaque
from arraycomm._errors import forgiving, raise_interrupt
from arraycomm._launch.places import cores
from arraycomm.adapters.torch._backward import Backward, enclosing_node
from arraycomm.adapters.torch._parameters import Parameters, kept_gradient
from arraycomm.adapters.torch._rounds import Reducer
from arraycomm.adapters.torch._slots import UNREDUCED, Slot

# Why a backward pass has left gradients unreduced, and what to do.
_RAISED: Final = "backward() had raised; call optimizer.zero_grad() then"
_COMPILED: Final = (
    "compiled autograd does not tell that a backward pass is over; set "
    "torch._dynamo.config.compiled_autograd = False"
)


class BackwardReducer:
    """Reduces the gradients of one optimizer's parameters during backward passes."""

    def __init__(self, parameters: Parameters, reducer: Reducer, look: Callable[[], None]) -> None:
        self._parameters, self._reducer = parameters, reducer
        # Looks at the optimizer's parameters, which the program may have exchanged.
        self.look = look
        self.gradients = parameters.gradients
        self._lock = threading.RLock()
        self._at_end = self.gradients.entry(without_owner(self._end))
        self._at_error = without_owner(self._raised)
        # The pass that goes on.
        self.backward: Backward | None = None
        # What went wrong in the reductions of a pass that an exception had ended.
        self._error: Exception | None = None
        # Whether gradients are reduced, not only accumulated.
        self.syncing = True

    def before_accumulation(self, slot: Slot) -> None:
        """Called before autograd adds to a gradient, or returns it without accumulating it."""
        with self._lock:
            task, backward = _current_graph_task_id(), self.backward
            if backward is None or task not in backward.tasks:
                backward = self._enter(task, slot)
            if backward is None:
                return
            # Not before: hooks of the program on the last parameter were still to see its gradient.
            while backward.overlaps and backward.has_ready_bucket():
                self._reducer.start_next(backward)
            parameter = self._parameters.tensors[slot.number]
            grad = parameter.grad
            if grad is None:
                slot.begin()
                return
            if backward.compiled and slot.has_base(grad):
                self.gradients.fail(_compiled_twice(slot.number))
            if backward.compiled:
                self._note_adding(backward, slot, parameter)
            else:
                # As late as can be: `torch.autograd.grad` adds nothing, and hooks may raise before.
                backward.awaited.add(slot.number)
                adds = partial(self._adds, backward, slot)
                backward.handles.append(_current_autograd_node().register_prehook(adds))

    @opaque
    def _adds(self, backward: Backward, slot: Slot, _: Any) -> None:
        """Called right before autograd adds to a gradient.

        A node that runs in one pass inside another, or that only the outer one runs, has a hook of
        each.
        """
        with self._lock:
            if self.backward is backward and slot.number in backward.awaited:
                backward.awaited.remove(slot.number)
                self._note_adding(backward, slot, self._parameters.tensors[slot.number])

    def _note_adding(self, backward: Backward, slot: Slot, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            backward.adding.append(slot.number)
        if slot.set_aside(parameter):
            backward.late = True
        virtual, base = self.gradients.virtual, slot.base
        if virtual is not None and not virtual.is_complete and base is not None and base.any():
            self.gradients.fail(kept_gradient(slot.number))

    def _enter(self, task: int, slot: Slot | None = None) -> Backward | None:
        """Return the backward pass of a pass of autograd; have autograd call back at its end.

        Nothing begins with a parameter that the program has taken out of the optimizer.
        """
        enclosing = enclosing_node()
        if enclosing is None and self.backward and self.backward.outermost is not None:
            # An exception ended it, and autograd still keeps it.
            self.abandon()
        if self.backward is None:
            self.look()
            if slot is not None and slot.reducer() is not self:
                self._parameters.rest()
                return None
        self._raise_error()
        backward = self.backward or self._begin()
        self._set(backward)
        backward.tasks.add(task)
        if enclosing is None:
            backward.outermost = task
            at_error = partial(self._at_error, backward)
            Variable._execution_engine.queue_callback(_PassEnd(self._at_end, at_error))
        else:
            backward.repeated = True
            self._follow(enclosing, backward)
        return backward

    def _set(self, backward: Backward | None) -> None:
        """Note which backward pass goes on."""
        self.backward = backward
        self._parameters.accumulated = None if backward is None else backward.order

    def _follow(self, node: Any, backward: Backward) -> None:
        """Enter the pass in which a node has run this one, once the node is finished."""

        def finished(*_: Any) -> None:
            handle.remove()
            with self._lock:
                task = _current_graph_task_id()
                if self.backward is backward and task not in backward.tasks:
                    self._enter(task)

        handle = node.register_hook(finished)

    def _begin(self) -> Backward:
        """Begin a backward pass, and a new step if the last one was skipped."""
        gradients = self.gradients
        waiting = [len(bucket.numbers) for bucket in self._reducer.buckets.all]
        known = self._parameters.tensors, self._reducer.buckets.of, waiting
        self._parameters.note_skipped()
        self._reducer.joined.forget_zeroed()
        compiled, rounds = _current_autograd_node() is None, gradients.rounds
        backward = Backward(rounds and rounds.place, *known, lock=self._lock, compiled=compiled)
        if rounds is not None:
            backward.local = not self.syncing or gradients.sums.keeps
            backward.joined = gradients.joined
            backward.overlaps = not compiled and saves_time(
                gradients.comm, self._parameters.tensors
            )
        return backward

    def _end(self) -> None:
        """Called at the end of a backward pass."""
        with self._lock:
            backward = self.backward
            if backward is None:
                return
            if not backward.local and backward.order:
                self._finish(backward)
                return
            self._close(backward)
            if self.syncing and not backward.joined:
                self._parameters.touched = list({*self._parameters.touched, *backward.order})

    def _finish(self, backward: Backward) -> None:
        """Reduce what is left at the end of a backward pass."""
        try:
            if backward.joined:
                self._reducer.joined.reduce()
            else:
                place = backward.place._replace(pending=backward.late)
                if self._reducer.run(place, backward.requests, backward):
                    self._reducer.run(self.gradients.rounds.place, [])
        finally:
            self._parameters.forget_sent()
            self._close(backward)

    def _close(self, backward: Backward, *, at_once: bool = True) -> None:
        """End a pass, in whatever way it has ended; see `Slot.show_whole`."""
        self._set(None)
        for handle in backward.handles:
            handle.remove()
        for number in backward.adding:
            parameter = self._parameters.tensors[number]
            self._parameters.slots[number].show_whole(parameter, at_once=at_once)
        for number in backward.order:
            self._parameters.slots[number].release_gradient()
        self._parameters.rest()

    def look_again(self) -> None:
        """Look at the parameters after one has gone, or torch has swapped its contents.

        Now, since a backward pass calls hooks of known ones alone.
        """
        if self.backward is None and not self._parameters.stepping:
            with forgiving:
                self.look()
            self._parameters.rest()

    def leave(self) -> None:
        """Raise inside a backward pass, and after one whose reductions have failed."""
        if self.backward is not None and _current_graph_task_id() != -1:
            self.gradients.fail(
                RuntimeError(
                    "DistributedOptimizer: step() was called inside backward(), before all "
                    "gradients are reduced; call it after backward()"
                )
            )
        self.abandon()
        for other in self._parameters.others() if _current_graph_task_id() == -1 else ():
            other.abandon()
        self._raise_error()

    def _raised(self, backward: Backward) -> None:
        """Called if an exception ends a backward pass; autograd on devices may keep it longer."""
        with self._lock:
            if self.backward is backward:
                self.abandon(at_once=True)

    def before_zeroing(self) -> None:
        """End a pass that an exception has ended, and autograd keeps, before its gradients go."""
        if _current_graph_task_id() == -1:
            self.abandon(at_once=True)

    def abandon(self, *, at_once: bool = False) -> None:
        """Take over what an unfinished backward pass started; its other gradients stay local."""
        backward = self.backward
        if backward is None:
            return
        self._set(None)
        try:
            reductions = ac.waitall(backward.requests)
            # Those of virtual ranks can be made again, with all gradients of the round.
            for reduced in reductions if self.gradients.virtual is None else ():
                self._reducer.take(reduced, unless_changed=not backward.late)
        except Exception as error:
            raise_interrupt(error)
            self._error = error
        finally:
            self._parameters.forget_sent()
            if not (backward.local or backward.joined):
                why, grads = _COMPILED if backward.compiled else _RAISED, self._parameters.grads
                for number in backward.order:
                    if self._parameters.slots[number].state(grads[number]) in UNREDUCED:
                        self._parameters.left[number] = why
            self._close(backward, at_once=at_once)

    def _raise_error(self) -> None:
        """Raise what went wrong while an exception ended a pass."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _compiled_twice(number: int) -> RuntimeError:
    return RuntimeError(
        f"DistributedOptimizer: the gradient of parameter {number} has been reduced, and a "
        "backward pass that torch compiles would add to it; call optimizer.zero_grad() before, or "
        "set torch._dynamo.config.compiled_autograd = False"
    )


def saves_time(comm: ac.Communicator, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a pass and its reductions take less time together than one after the other.

    On one node, reductions are copies and sums. If no core is left for them, they hold up the
    passes of all ranks by more than they take.
    """
    transport = group_of(comm).transport
    beside = comm.backend == "threads" or transport.local_size < transport.size
    if beside or True in [parameter.is_cuda for parameter in parameters]:
        return True
    available = cores()
    # With cores of its own, or with those that all ranks of the node share.
    ranks = 1 if available < _machine_cores() else transport.local_size
    return available > ranks * torch.get_num_threads()


# The system takes as long to count them as a small reduction does.
@lru_cache
def _machine_cores() -> int:
    return os.cpu_count() or 1


class _PassEnd:
    """Called at the end of a backward pass; autograd drops it uncalled if an exception ends it."""

    def __init__(self, at_end: Callable[[], None], at_error: Callable[[], None]) -> None:
        self._at_end, self._at_error = at_end, at_error
        self._called = False

    @opaque
    def __call__(self) -> None:
        self._called = True
        self._at_end()

    @opaque
    def __del__(self) -> None:
        if not self._called:
            self._at_error()


def without_owner(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method as a function that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call
