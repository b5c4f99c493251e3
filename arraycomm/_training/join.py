"""`join`: ranks that have run out of data take part in the steps of those that have not."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any, NoReturn, Self

from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.requests import ProcessBound
from arraycomm._calls.runner import Guard
from arraycomm._collectives.groups import SmallExchange
from arraycomm._communicator import Communicator, group_of, runner_of, trees_of
from arraycomm._entries import entry
from arraycomm._errors import ArrayCommError, chain_of
from arraycomm._protocol.agreement import JOINING, Agreement, active
from arraycomm._protocol.mismatch import mismatch
from arraycomm._session import world
from arraycomm._training.gradients import registry_of
from arraycomm._training.metrics import JoinedMeanMetrics, shadow_metrics
from arraycomm._training.shards import NAME as EXCHANGE
from arraycomm._training.weighted import Block, WeightedGradients, bits_of, shadow_gradients
from arraycomm._transports.base import Steps
from arraycomm._trees.fusion import TreeMemory
from arraycomm._trees.reduce import ReduceOnto
from arraycomm._trees.synchronize import Synchronize


@entry
def join(comm: Communicator | None = None) -> Join:
    """Let ranks go through different numbers of batches: a context manager.

    Inside the block each rank goes through its own batches, as many as it has. A rank that reaches
    the end of the block waits for the others, and takes part in their steps with weight 0.

    Parameters
    ----------
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    Join
        For `with ... as joined`. Set `joined.weight` before a step if batches are to count
        differently, for example by their number of samples; it is 1 until then.

    Raises
    ------
    RuntimeError
        Inside the block: another collective on `comm`, a block in a block, or a compiled JAX
        program that reduces. Other ranks raise `PeerError`.
    ValueError
        `joined.weight` is negative, NaN, or beyond 1e19 or 1e-19, or gradients are reduced by
        another op than "mean" and "sum".
    PeerError
        Another rank has left its block by an exception. The communicator can still be used.

    Notes
    -----
    Entering, each call inside, and leaving are collective. A program may call inside the block:
    `allreduce_gradients`, whose mean is Σ w·g / Σ w and whose sum is that of the ranks with a
    weight (zeros if no rank has one); `mean_metrics`, with its own weights; and steps of optimizers
    that `DistributedOptimizer` made over `comm`, without accumulation, which leave parameters alone
    if Σ w is 0. Products and sums are taken in the gradients' dtype, or in float32 for floats of 16
    and 8 bits, and rounded once at the end.

    A rank that waits applies the same steps to its own torch optimizers, with the hyperparameters
    of the ranks that have data, so that parameters and state stay the same on all ranks. At the end
    of the block its hyperparameters, and the `GradScaler` with which it took steps, are those of a
    rank that took part in the last step. What a program holds itself cannot be changed from
    outside: parameters of optax and of objects with `update`, and learning-rate schedules.
    `joined.synchronize(tree)` after the block gives every rank the values of a rank that took part
    in the last step; a schedule that is not the same raises in the next step.

    Examples
    --------
    >>> import numpy as np
    >>> import arraycomm as ac
    >>> from arraycomm.testing import run
    >>> def train(comm):
    ...     w = np.zeros(1)
    ...     with ac.join(comm) as joined:
    ...         for batch in range(comm.rank):
    ...             w = w - ac.allreduce_gradients(np.ones(1), comm=comm)
    ...     return float(joined.synchronize(w)[0])
    >>> run(3, train)
    [-2.0, -2.0, -2.0]
    """
    return Join(comm or world())


class Join(Block, Guard, ProcessBound):
    """A block in which ranks may run out of data at different steps; made by `join`.

    Attributes
    ----------
    weight : float
        How much this rank's next gradients count.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm
        self._runner = runner_of(comm)
        self._memory = trees_of(comm)
        self._last = 0
        # Errors that the other ranks know of.
        self._reported: list[BaseException] = []

    @entry
    def __enter__(self) -> Self:
        self._runner.call(EnterJoin)
        # Not those of a block before, which may have been this object too.
        self._steps = 0
        self._runner.set_guard(self)
        registry_of(self._comm).join = self
        return self

    @entry
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._shadow()
            else:
                self._tell(error)
        finally:
            self._runner.set_guard(None)
            registry_of(self._comm).join = None
        if error is None:
            self._take_over()

    @entry
    def synchronize(self, tree: Any) -> Any:
        """Give every rank the values of a rank that took part in the last step; see `synchronize`.

        After the block; collective.
        """
        return self._runner.call(Synchronize, tree, self._last)

    # The runner's guard

    def substitute(self, operation: Any) -> Any:
        """Return the form of an operation that ranks without data can take part in."""
        name = operation.name
        if operation is ReduceOnto:
            refuse(f"{name} with onto")
        if name == WeightedGradients.name:
            return operation if issubclass(operation, WeightedGradients) else self._weighted
        if name == JoinedMeanMetrics.name:
            return JoinedMeanMetrics
        if operation is not Shadow:
            refuse(name)
        return operation

    def note_error(self, error: Exception) -> None:
        """Remember an error that the runner reports to the other ranks."""
        self._reported.append(error)

    def _weighted(self, context: Context, *args: Any) -> WeightedGradients:
        return WeightedGradients(context, self, *args)

    # Inside the block

    def _shadow(self) -> None:
        """Take part with weight 0 until every rank is here."""
        optimizers = registry_of(self._comm).optimizers
        while (step := self._runner.call(Shadow, self._memory)) is not None:
            optimizer = None if step.optimizer is None else optimizers.get(step.optimizer)
            if optimizer is not None and optimizer.rounds is not None and step.others:
                # They have exchanged parameters as this rank has, which is over for all.
                optimizer.rounds.note_others(others=False)
            if optimizer is not None and optimizer.steps is not None and step.total:
                try:
                    optimizer.steps.follow(step.gradients, json.loads(step.settings or "[]"))
                except BaseException as error:
                    self._tell(error)
                    raise

    def _tell(self, error: BaseException) -> None:
        """Make the other ranks' calls raise because of what ends this rank's block."""
        if not isinstance(error, Exception):
            group_of(self._comm).close(error)
        elif not self._is_reported(error):
            self._runner.fail(Shadow.name, error)

    def _take_over(self) -> None:
        """Find a rank that took part in the last step, and go on with its hyperparameters."""
        optimizers = registry_of(self._comm).optimizers
        taking = {number: each.steps for number, each in optimizers.items() if each.steps}
        settings = {number: steps.inputs().taken() for number, steps in taking.items()}
        shown = self._comm.allgather_object((self._steps, settings))
        steps = [steps for steps, _ in shown]
        self._last = steps.index(max(steps))
        for number, taken in shown[self._last][1].items():
            if number in taking:
                taking[number].adopt(taken)

    def _is_reported(self, error: BaseException) -> bool:
        return any(
            isinstance(link, ArrayCommError) or any(link is known for known in self._reported)
            for link in chain_of(error)
        )


class PrivateGuard(Guard):
    """Refuses calls on an optimizer's own communicator while the shared one is inside `join`.

    Ranks without data take part in no call there; they learn of the error when the block ends. They
    take steps of sharded optimizers, however, and what follows each.
    """

    def __init__(self, shared: Communicator) -> None:
        self._registry = registry_of(shared)

    def check(self, name: str) -> None:
        """Raise inside the block, on this rank alone."""
        if self.refuses and name != EXCHANGE:
            refuse(name)

    def place(self) -> int | None:
        """Return 0 outside of the block, where every call is made."""
        return None if self.refuses else 0

    @property
    def refuses(self) -> bool:
        """Whether the shared communicator is inside the block."""
        return self._registry.join is not None


def refuse(operation: str) -> NoReturn:
    """Raise for a call that ranks without data could not take part in."""
    raise RuntimeError(
        f"{operation}: inside join only allreduce_gradients, mean_metrics and steps of distributed "
        "optimizers, not compiled by JAX, can be called on this communicator, since ranks without "
        "data take part in nothing else; call it after the block, or on a dup() made before"
    )


class EnterJoin(SmallExchange):
    """The beginning of a block."""

    name = "join"

    def __init__(self, context: Context) -> None:
        super().__init__(context, "enter")


class Shadow(Operation):
    """The part of a rank without data in the calls of the others."""

    name, code = "join", 36
    negotiable = True

    def __init__(self, context: Context, memory: TreeMemory) -> None:
        super().__init__(context)
        self._memory = memory
        self.signature = JOINING
        self.word = bits_of(0.0)

    def steps(self, agreement: Agreement) -> Steps:
        self._step = None
        if agreement.calls is None:
            return
        live = active(agreement.calls)
        if live[0].head.startswith(WeightedGradients.name):
            self._step = yield from shadow_gradients(self._memory, agreement, live)
        elif live[0].head.startswith(JoinedMeanMetrics.name):
            self._step = yield from shadow_metrics(self._memory, live)
        else:
            raise mismatch(agreement.calls)

    def result(self, agreement: Agreement) -> Any:
        return self._step
