"""The reducer of one torch optimizer: it reduces in backward passes, and the rest in steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from arraycomm.adapters.torch._buckets import Buckets
from arraycomm.adapters.torch._checks import check_owners, check_unchanged
from arraycomm.adapters.torch._hooks import BackwardReducer
from arraycomm.adapters.torch._parameters import Parameters
from arraycomm.adapters.torch._rounds import BucketRounds, JoinedSteps


class Reducer:
    """Reduces the gradients of one optimizer's parameters."""

    def __init__(self, gradients: Any, groups: Callable[[], Sequence[dict[str, Any]]]) -> None:
        self._gradients = gradients
        self._parameters, self._buckets = Parameters(gradients), Buckets(gradients)
        self._parameters.groups = groups
        self._rounds = BucketRounds(self._parameters, self._buckets)
        self._joined = JoinedSteps(self._parameters)
        self.note_skipped, self.rest = self._parameters.note_skipped, self._parameters.rest
        self.note_zeroed = self._parameters.note_zeroed
        parts = self._parameters, self._buckets, self._rounds, self._joined
        self.in_backward = BackwardReducer(*parts)

    @property
    def parameters(self) -> list[Any]:
        """The parameters whose gradients are reduced."""
        return self._parameters.tensors

    @property
    def slots(self) -> list[Any]:
        """What stands for each of them as long as it is one."""
        return self._parameters.slots

    @property
    def is_stepping(self) -> bool:
        """Whether a step of the optimizer is under way."""
        return bool(self._parameters.stepping)

    def adopt(self) -> None:
        """Reduce the gradients of all parameters of the optimizer from now on."""
        if self._parameters.adopt(self.in_backward):
            self._buckets.adopt(self._parameters.tensors)
            self._gradients.verification.restart()

    def reduce_for_step(self) -> bool:
        """Reduce what no backward pass has reduced; return whether the step can be taken.

        Collective, but for steps whose gradients are only accumulated.
        """
        gradients, parameters = self._gradients, self._parameters
        self.in_backward.leave()
        parameters.check_left()
        if gradients.rounds is None:
            return self._reduce_at_once()
        check_owners(parameters)
        if gradients.joined:
            return self._joined.step()
        self._joined.check_over()
        if gradients.virtual is None:
            # A step ends the round of virtual ranks, also if there are no gradients.
            parameters.note_skipped(stepping=True)
        if gradients.sums.keeps:
            self._keep()
            return False
        self._rounds.run_with_others()
        applies = gradients.virtual is None or gradients.virtual.is_last
        parameters.finish_step()
        return applies

    def _keep(self) -> None:
        """Add the gradients of a step to those of the steps before."""
        gradients, parameters = self._gradients, self._parameters
        check_unchanged(parameters, f"with accumulate={gradients.accumulate}")
        gradients.sums.keep(parameters.all_unreduced())
        parameters.forget_sent()
        parameters.finish_step()

    def _reduce_at_once(self) -> bool:
        """Reduce all gradients now: other ranks' frameworks cannot do so before the step."""
        parameters = self._parameters
        check_unchanged(parameters, "and other ranks' frameworks have no gradients before that")
        try:
            complete, reduced = self._gradients.add(parameters.all_unreduced())
            if complete:
                parameters.settle_all(reduced)
        finally:
            parameters.forget_sent()
        parameters.forget_reduced()
        return bool(complete)

    def take_over(self, reduced: Sequence[Any]) -> None:
        """Replace the gradients of all parameters by those of ranks with data."""
        for tensor in self._parameters.tensors:
            tensor.grad = None
        self._parameters.settle_all(reduced)
        self._parameters.forget_reduced()

    def begin_step(self) -> None:
        """Keep the parameters until the end of the step."""
        self._parameters.stepping = True

    def end_step(self) -> None:
        """Keep them no longer."""
        self._parameters.stepping = False
        self.rest()

    # Steps with a closure

    def begin_evaluations(self) -> None:
        """Begin a step with a closure."""
        if self._parameters.is_counted:
            self._gradients.rounds.next_evaluation()

    def reduce_evaluation(self) -> None:
        """Reduce what a closure's backward pass has not; see `reduce_for_step`."""
        gradients = self._gradients
        self.in_backward.leave()
        self._parameters.check_left()
        if gradients.rounds is None:
            self._reduce_at_once()
            return
        check_owners(self._parameters)
        if gradients.joined:
            self._joined.step()
            return
        self._parameters.note_skipped(stepping=True)
        self._rounds.run_with_others()
        self._parameters.forget_reduced()
        gradients.rounds.next_evaluation()

    def end_evaluations(self) -> None:
        """End a step with a closure."""
        if self._parameters.is_counted:
            self._parameters.finish_step()
