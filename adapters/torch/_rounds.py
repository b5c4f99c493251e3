"""Rounds: the buckets of a torch optimizer reduced, in a backward pass or in a step.

See `arraycomm._training.rounds` for what the ranks compare in each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import arraycomm as ac
from arraycomm._training.rounds import Part
from arraycomm._training.weighted import IDLE
from arraycomm.adapters.torch._backward import Backward
from arraycomm.adapters.torch._buckets import Buckets
from arraycomm.adapters.torch._checks import (
    check_left,
    check_owners,
    check_unchanged,
    compare,
    digest,
    judge_stale,
)
from arraycomm.adapters.torch._parameters import Parameters, like, paths


class Reducer:
    """Reduces the gradients of one optimizer: for backward passes, and what is left in steps."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters, self._gradients = parameters, parameters.gradients
        self.buckets = Buckets(self._gradients)
        self.joined = JoinedSteps(parameters)

    def adopt(self) -> None:
        """Divide the optimizer's parameters, which have changed, into buckets."""
        self.buckets.adopt(self._parameters.tensors)
        self._gradients.verification.restart()

    # For backward passes

    def start_next(self, backward: Backward) -> None:
        """Start to reduce the next bucket of a backward pass."""
        bucket = self.buckets.all[len(backward.requests)]
        backward.requests.append(self._start(bucket, backward.place))

    def run(self, place: Any, requests: list[Any], backward: Backward | None = None) -> bool:
        """Reduce all buckets, of which `requests` are under way.

        Return whether any rank has gradients that came after their reduction had begun.
        """
        buckets = self.buckets.all
        if requests:
            requests += [self._start(bucket, place) for bucket in buckets[len(requests) :]]
            every = ac.waitall(requests)
        else:
            # One after the other needs no thread, which would take the core of a rank that folds.
            every = [self._reduce(bucket, place) for bucket in buckets]
        for reduced in every:
            self.take(reduced)
        self._finish(place, backward)
        # The last bucket is never started before the end of the pass.
        return any(other.pending and not other.stepping for other in every[-1].places)

    def take(self, reduced: Any, *, unless_changed: bool = False) -> None:
        """Take over what one reduction has made, or note the totals for the end of the round."""
        gradients, leaves = self._gradients, reduced.leaves
        if gradients.virtual is not None:
            gradients.virtual.note(leaves)
            return
        if gradients.compression is not None:
            tensors = [self._parameters.tensors[number].detach() for number in leaves]
            reduced = [*map(like, tensors, leaves.values())]
            with gradients.announcing():
                received = gradients.received(reduced, tensors, paths(leaves))
            leaves = dict(zip(leaves, received, strict=True))
        self._parameters.settle(leaves, unless_changed=unless_changed)

    def _complete(self) -> None:
        """End a round of virtual ranks: its gradients are the mean, or none before the last."""
        virtual = self._gradients.virtual
        if virtual is not None and not virtual.is_complete:
            self._parameters.settle_virtual(virtual.complete())

    def _finish(self, place: Any, backward: Backward | None) -> None:
        self._complete()
        self._gradients.rounds.finish_round(place)
        self._gradients.sums.forget()
        came = [] if backward is None else list(backward.order)
        self.buckets.agree(came, repeated=backward is not None and backward.repeated)

    def _start(self, bucket: Any, place: Any) -> Any:
        return self._gradients.rounds.start(self._part(bucket, place))

    def _reduce(self, bucket: Any, place: Any) -> Any:
        return self._gradients.rounds.reduce(self._part(bucket, place))

    def _part(self, bucket: Any, place: Any) -> Part:
        """Return this rank's part in the reduction of a bucket at this place."""
        gradients, virtual = self._gradients, self._gradients.virtual
        means = partial(self._parameters.means, bucket.numbers)
        make = (lambda: bucket.nothing) if place.has_nothing else means
        if virtual is not None:
            return Part(bucket, make, place, gradients.look, onto=virtual.onto(bucket.numbers))
        # Then `.grad` itself is reduced.
        overwrite = gradients.accumulate == 1 and gradients.compression is None
        return Part(bucket, make, place, gradients.look, overwrite)

    # In steps

    def reduce_for_step(self) -> bool:
        """Reduce what no backward pass has reduced; return whether the step can be taken.

        Collective, but for steps whose gradients are only accumulated.
        """
        gradients, parameters = self._gradients, self._parameters
        check_left(parameters)
        if gradients.rounds is None:
            return self._reduce_at_once()
        check_owners(parameters)
        if gradients.joined:
            return self.joined.step()
        self.joined.check_over()
        if gradients.virtual is None:
            # A step ends the round of virtual ranks, also if there are no gradients.
            parameters.note_skipped(stepping=True)
        applies = not gradients.sums.keeps
        if applies:
            self._run_with_others()
            applies = gradients.virtual is None or gradients.virtual.is_last
        else:
            check_unchanged(parameters, f"with accumulate={gradients.accumulate}")
            gradients.sums.keep(parameters.all_unreduced())
            parameters.forget_sent()
        parameters.finish_step()
        return applies

    def reduce_evaluation(self) -> None:
        """Reduce what a closure's backward pass has not; see `reduce_for_step`."""
        gradients = self._gradients
        check_left(self._parameters)
        if gradients.rounds is None:
            self._reduce_at_once()
            return
        check_owners(self._parameters)
        if gradients.joined:
            self.joined.step()
            return
        self._parameters.note_skipped(stepping=True)
        self._run_with_others()
        self._parameters.forget_reduced()
        gradients.rounds.next_evaluation()

    def _reduce_at_once(self) -> bool:
        """Reduce all gradients now: other ranks' frameworks cannot do so before the step."""
        parameters = self._parameters
        check_unchanged(parameters, "and other ranks' frameworks have no gradients before that")
        try:
            complete, reduced = self._gradients.add(parameters.all_unreduced())
            if complete:
                parameters.settle(dict(enumerate(reduced)))
        finally:
            parameters.forget_sent()
        parameters.forget_reduced()
        return bool(complete)

    def _run_with_others(self) -> None:
        """Take part in the others' backward passes until all ranks are in their step."""
        try:
            while not self._run_in_step():
                pass
            self._complete()
            self._gradients.sums.forget()
        finally:
            self._parameters.forget_sent()

    def _run_in_step(self) -> bool:
        """Take part in one round, and return whether all ranks are in their step."""
        shown = self._parameters.shown_in_step()
        place = self._gradients.rounds.place._replace(stepping=True, **shown)
        first = self._reduce(self.buckets.all[0], place)
        self.take(first)
        together = all(other.stepping for other in first.places)
        if not together or any(other.pending for other in first.places):
            requests = [self._start(bucket, place) for bucket in self.buckets.all[1:]]
            for reduced in ac.waitall(requests):
                self.take(reduced)
        if not together:
            self._finish(place, None)
            return False
        worked = [rank for rank, other in enumerate(first.places) if other.worked]
        differ = bool(worked) and len(worked) < len(first.places)
        if self._gradients.virtual is not None:
            root = self._gradients.virtual.check_shown(worked)
            if root is not None and (differ or _need_comparison(first.places)):
                self._hand_over(root)
        elif differ:
            self._hand_over(worked[0])
        elif _need_comparison(first.places):
            compare(self._parameters)
        if any(other.stale for other in first.places):
            return judge_stale(self._parameters)
        return True

    def _hand_over(self, root: int) -> None:
        """Give a rank's gradients to all: it may have clipped them, others had none to clip."""
        grads, comm = self._parameters.grads, self._gradients.comm
        if comm.rank == root:
            mine = grads
        else:
            # What changes nothing that it is added to.
            mine = [None if grad is None else -torch.zeros_like(grad) for grad in grads]
        self._parameters.replace(ac.allreduce_gradients(mine, "sum", comm=comm))


def _need_comparison(places: Sequence[Any]) -> bool:
    """Return whether gradients may differ between ranks since they have been reduced."""
    return any(p.replaced for p in places) or len({p.changed for p in places}) > 1


class JoinedSteps:
    """The steps of one optimizer inside `join`: by weight, and given to ranks without data."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters, self._gradients = parameters, parameters.gradients
        # Whether gradients have been reduced for this step.
        self._has_reduced = False

    def forget_zeroed(self) -> None:
        """Begin a new step if all gradients of the last one have been zeroed without it."""
        parameters = self._parameters
        if self._has_reduced and parameters.are_zeroed(range(len(parameters.tensors))):
            self._has_reduced = False

    def reduce(self) -> None:
        """Reduce all gradients by weight."""
        parameters = self._parameters
        try:
            reduced = self._gradients.reduce_in_join(parameters.all_unreduced())
            parameters.settle(dict(enumerate(reduced)))
            self._has_reduced = True
        finally:
            parameters.forget_sent()

    def step(self) -> bool:
        """Give a step's gradients to ranks without data; return whether the step can be taken."""
        replaced: int | str | None = None
        if not self._has_reduced:
            self.reduce()
            replaced = IDLE
        elif self._parameters.shown_in_step()["replaced"]:
            replaced = digest(self._parameters.grads)
        complete, given = self._gradients.hand_over(self._parameters.grads, replaced)
        if given is not None:
            self._parameters.replace(given)
        self._has_reduced = False
        self._parameters.forget_reduced()
        return bool(complete)

    def check_over(self) -> None:
        """Raise if a `join` block has ended between a backward pass and its step."""
        if self._has_reduced:
            self._has_reduced = False
            self._gradients.fail(
                RuntimeError(
                    "DistributedOptimizer: step() was called after a join block with gradients of "
                    "a backward() inside, which ranks without data do not have; call both inside, "
                    "or both after the block"
                )
            )
