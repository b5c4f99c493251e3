"""`join`: ranks that have run out of data take part in the steps of those that have not."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from arraycomm._callsite import describe_raise
from arraycomm._collectives.operation import Call, agreement_only
from arraycomm._errors import ArrayCommError
from arraycomm._protocol.header import Agreement, Signature, Steps, mismatch

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator
    from arraycomm._training.gradients import Gradients

# What a rank that has run out of data can take part in.
JOINABLE: Final = ("allreduce_gradients", "mean_metrics", "join")
SHADOW: Final = Signature("join")
_OPTIMIZER: Final = re.compile(r"optimizer (\d+)")
_DOUBLE: Final = struct.Struct("<d")
_WORD: Final = struct.Struct("<q")


def join(comm: Communicator | None = None) -> Join:
    """Let ranks go through different numbers of batches: a context manager.

    Inside the block each rank goes through its own batches, as many as it has. A rank that comes
    to the end of the block stays there until all have, and takes part with weight 0 in what the
    others still do.

    Parameters
    ----------
    comm : Communicator, optional
        `world()` by default.

    Returns
    -------
    Join
        For `with ... as joined`. Set `joined.weight` before a step where batches are to count
        differently, for example by their number of samples; it is 1 until then.

    Raises
    ------
    RuntimeError
        Inside the block: another collective on `comm`, a block in a block, or a compiled JAX
        program that reduces. Other ranks raise `PeerError`.
    ValueError
        `joined.weight` is negative, infinite or NaN, or gradients are reduced by another op than
        "mean" and "sum".
    PeerError
        Another rank has left its block by an exception. The communicator goes on.

    Notes
    -----
    Entering, each call inside, and leaving are collective. Inside the block may be called:
    `allreduce_gradients`, whose mean is Σ w·g / Σ w and whose sum is that of the ranks with a
    weight (zeros where nobody has one); `mean_metrics`, with its own weights; and steps of
    optimizers that `DistributedOptimizer` made over `comm`, without accumulation, which
    leave parameters alone where Σ w is 0. Products and sums are taken in the gradients' dtype, or in
    float32 for floats of 16 and 8 bits, which are then rounded once.

    A rank that waits applies the same steps to its own torch optimizers, so that parameters and
    state stay the same on all ranks. Parameters that a program holds itself, as with optax and
    objects with `update`, cannot be changed from outside: `joined.synchronize(tree)` after the
    block gives every rank the values of one that went on to the end.

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
    from arraycomm._session import world

    return Join(comm or world())


class Join:
    """A block in which ranks may run out of data one after another; made by `join`.

    Attributes
    ----------
    weight : float
        How much this rank's next gradients count.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.weight: Any = 1
        # The sum of all ranks' weights in the last step.
        self.total = 0.0
        # Steps that this rank has taken itself; those of shadows do not count.
        self._steps = 0
        self._last = 0
        # Errors that the other ranks have heard of.
        self.told: list[BaseException] = []

    def __enter__(self) -> Self:
        self._comm._call("join", _enter_call)
        self._comm._forget_short()
        self._comm._join = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        comm = self._comm
        try:
            if error is None:
                self._shadow()
            elif not isinstance(error, Exception):
                comm._close(error)
            elif not self._is_told(error):
                self._tell(error)
        finally:
            comm._join = None
        if error is None:
            self._last = self._find_last()

    def synchronize(self, tree: Any) -> Any:
        """Give every rank the values of a rank that took part in the last step; see `synchronize`.

        After the block; collective.
        """
        from arraycomm._trees.synchronize import synchronize

        return synchronize(tree, root=self._last, comm=self._comm)

    def stepped(self, weights: Sequence[float]) -> None:
        """Take note of the weights of all ranks in a step of this rank's own."""
        self.total = sum(weights)
        self._steps += 1

    def _shadow(self) -> None:
        """Take part with weight 0 until every rank is here."""
        while (step := self._comm._call("join", _shadow_call)) is not None:
            optimizer, total, gradients = step
            if optimizer is not None and total:
                optimizer.follow(gradients)

    def _find_last(self) -> int:
        data = _WORD.pack(self._steps)
        said = self._comm._call("join", lambda comm: agreement_only("join", "left", data))
        steps = [int(_WORD.unpack(other)[0]) for other in said]
        return steps.index(max(steps))

    def _is_told(self, error: BaseException | None) -> bool:
        while error is not None:
            if isinstance(error, ArrayCommError) or any(error is told for told in self.told):
                return True
            error = error.__cause__ or error.__context__
        return False

    def _tell(self, error: Exception) -> None:
        comm = self._comm
        try:
            with comm._turn():
                comm._engine.run(comm._raising("join", error, describe_raise(error)))
        except Exception as raised:
            if raised is not error:
                raise


def bits_of(weight: float) -> int:
    """Return a weight as a word of a header."""
    return int(_WORD.unpack(_DOUBLE.pack(weight))[0])


def weights_of(agreement: Agreement, size: int) -> list[float]:
    """Return the weights that came with all ranks' headers."""
    if agreement.details is not None:
        # By now the slots hold the last of the details.
        words = [detail["length"] for detail in agreement.details]
    else:
        words = [agreement.word(rank, 14) for rank in range(size)]
    return [float(_DOUBLE.unpack(_WORD.pack(word))[0]) for word in words]


def taking_part(details: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the ranks said that have data."""
    return [detail for detail in details if detail.get("head") != SHADOW.head]


def refused(operation: str) -> NoReturn:
    """Raise for a call that ranks without data could not take part in."""
    raise RuntimeError(
        f"{operation}: inside join only allreduce_gradients, mean_metrics and steps of distributed "
        "optimizers, not compiled by JAX, can be called on this communicator, since ranks without "
        "data take part in nothing else; call it after the block, or on a dup() made before"
    )


def optimizer_of(comm: Communicator, settings: str) -> Gradients | None:
    """Return this rank's optimizer whose gradients those are, or None where it is none's."""
    found = _OPTIMIZER.search(settings)
    return None if found is None else comm._optimizers.get(int(found[1]))


def _enter_call(comm: Communicator) -> Call:
    if comm._join is not None:
        refused("join")
    return agreement_only("join", "enter")


def _shadow_call(comm: Communicator) -> Call:
    from arraycomm._training.metrics import shadow_metrics
    from arraycomm._trees.reduce import shadow_gradients

    def finish(agreement: Agreement) -> Steps:
        if agreement.details is None:
            return None
        live = taking_part(agreement.details)
        if live[0]["head"].startswith("allreduce_gradients"):
            return (yield from shadow_gradients(comm, agreement, live))
        if live[0]["head"].startswith("mean_metrics"):
            return (yield from shadow_metrics(comm, live))
        raise mismatch(agreement.details)

    return Call(SHADOW, finish, length=bits_of(0.0), negotiable=True)
