"""Torch gradients inside `join`: reduced by weight, and given to ranks without data."""

from __future__ import annotations

from arraycomm.adapters.torch._checks import digest
from arraycomm.adapters.torch._parameters import Parameters


class JoinedSteps:
    """The steps of one optimizer inside `join`."""

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
            parameters.settle_all(self._gradients.reduce_in_join(parameters.all_unreduced()))
            self._has_reduced = True
        finally:
            parameters.forget_sent()

    def step(self) -> bool:
        """Give a step's gradients to ranks without data; return whether the step can be taken."""
        if not self._has_reduced:
            self.reduce()
        grads = self._parameters.grads
        replaced = digest(grads) if self._parameters.shown_in_step()["replaced"] else None
        complete = self._gradients.hand_over(grads, replaced)
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
