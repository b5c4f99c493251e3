"""Gradients of torch parameters, reduced over all ranks while a backward pass computes them.

Two hooks on each parameter watch the accumulation of its gradient. The parameters are divided into
buckets. The reduction of a bucket starts once all its gradients are there, and those of the buckets
before it have been started, so that all ranks start them in the same order. What is left is started
at the end of the backward pass, which waits for all. So `.grad` is reduced when `backward()` returns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.autograd import Variable

import arraycomm as ac
from arraycomm.adapters._torch_backward import Backward, enclosing_node
from arraycomm.adapters._torch_buckets import Buckets
from arraycomm.adapters._torch_join import JoinedSteps
from arraycomm.adapters._torch_parameters import Parameters
from arraycomm.adapters._torch_rounds import BucketRounds
from arraycomm.adapters._torch_slots import Slot


class BackwardReducer:
    """Reduces the gradients of one optimizer's parameters during backward passes.

    Attributes
    ----------
    syncing : bool
        Whether gradients are reduced, not only accumulated.
    """

    def __init__(
        self, parameters: Parameters, buckets: Buckets, rounds: BucketRounds, joined: JoinedSteps
    ) -> None:
        self._parameters, self._buckets = parameters, buckets
        self._rounds, self._joined = rounds, joined
        self._gradients = parameters.gradients
        self._lock = threading.RLock()
        self._at_end = self._gradients.entry(without_owner(self._end))
        self._backward: Backward | None = None
        self.syncing = True

    @property
    def settings(self) -> tuple[Any, ...]:
        """What two optimizers of one parameter must have in common."""
        settings: tuple[Any, ...] = self._gradients.settings
        return settings

    def before_accumulation(self, slot: Slot) -> None:
        """Called before autograd adds to a gradient, or returns it without accumulating it."""
        with self._lock:
            task, backward = _current_graph_task_id(), self._backward
            if backward is None or task not in backward.tasks:
                backward = self._enter(task)
            if slot.set_aside(self._parameters.tensors[slot.number]):
                backward.late = True
            if slot.base is not None:
                backward.aside.append(slot.number)

    def after_accumulation(self, slot: Slot, parameter: torch.Tensor) -> None:
        """Called after autograd has added to a gradient."""
        with self._lock:
            backward = self._backward
            if backward is None:
                return
            slot.accumulated(parameter.grad)
            backward.note(slot.number, self._buckets.of[slot.number])
            while backward.has_ready_bucket():
                self._rounds.start_next(backward)

    def _enter(self, task: int) -> Backward:
        """Return the backward pass that a pass of autograd belongs to; ask for a call at its end."""
        enclosing = enclosing_node()
        if enclosing is None and self._backward and self._backward.outermost is not None:
            # An exception ended it.
            self._abandon()
        backward = self._backward or self._begin()
        self._set(backward)
        backward.tasks.add(task)
        if enclosing is None:
            backward.outermost = task
            Variable._execution_engine.queue_callback(self._at_end)
        else:
            backward.repeated = True
            self._follow(enclosing, backward)
        return backward

    def _set(self, backward: Backward | None) -> None:
        """Note which backward pass goes on."""
        self._backward = backward
        self._parameters.accumulated = () if backward is None else backward.order

    def _follow(self, node: Any, backward: Backward) -> None:
        """Enter the pass in which a node has run this one, once the node is finished."""

        def finished(*_: Any) -> None:
            handle.remove()
            with self._lock:
                task = _current_graph_task_id()
                if self._backward is backward and task not in backward.tasks:
                    self._enter(task)

        handle = node.register_hook(finished)

    def _begin(self) -> Backward:
        """Begin a backward pass, and a new step if the last one was skipped."""
        gradients, buckets = self._gradients, self._buckets.all
        self._parameters.note_skipped()
        self._joined.forget_zeroed()
        if gradients.rounds is None:
            return Backward(None, True, False, buckets)
        local = not self.syncing or gradients.keeps
        return Backward(gradients.rounds.place, local, gradients.joined, buckets)

    def _end(self) -> None:
        """Called at the end of a backward pass."""
        with self._lock:
            backward = self._backward
            if backward is None:
                return
            for number in backward.aside:
                self._parameters.slots[number].put_back(self._parameters.tensors[number])
            if not backward.local and backward.order:
                self._finish(backward)
                return
            self._set(None)
            if self.syncing and not backward.joined:
                self._parameters.touched = list({*self._parameters.touched, *backward.order})

    def _finish(self, backward: Backward) -> None:
        """Reduce what is left at the end of a backward pass."""
        try:
            if backward.joined:
                self._joined.reduce()
            else:
                self._finish_rounds(backward)
        finally:
            self._set(None)

    def _finish_rounds(self, backward: Backward) -> None:
        try:
            self._rounds.run(backward.place, backward.requests, backward)
            while backward.late:
                backward.late = False
                self._rounds.run(self._gradients.rounds.place, [])
        finally:
            self._parameters.forget_sent()

    def leave(self) -> None:
        """Forget a backward pass that an exception ended; raise inside one that goes on."""
        if self._backward is None:
            return
        if _current_graph_task_id() != -1:
            self._gradients.fail(
                RuntimeError(
                    "DistributedOptimizer: step() was called inside backward(), before all gradients "
                    "are reduced; call it after backward()"
                )
            )
        self._abandon()

    def _abandon(self) -> None:
        """Wait for what an unfinished backward pass has started, and keep its gradients local."""
        backward = self._backward
        self._set(None)
        self._parameters.forget_sent()
        if backward is not None:
            ac.waitall(backward.requests)


def without_owner(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method as a function that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call
