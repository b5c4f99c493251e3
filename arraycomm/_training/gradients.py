"""The gradients of one distributed optimizer: added up over steps, then reduced over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol, Self
from weakref import WeakKeyDictionary, WeakValueDictionary

from arraycomm._collectives.operation import Context
from arraycomm._communicator import Communicator, group_of, runner_of, trees_of
from arraycomm._entries import entry
from arraycomm._errors import naming
from arraycomm._protocol.group import Group
from arraycomm._training.arithmetic import Operand, added, divided, operand_of, restored, widened
from arraycomm._training.weighted import Block, WeightedGradients
from arraycomm._trees.fusion import TreeMemory
from arraycomm._trees.leaves import check_leaf
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.reduce import AllreduceGradients

_NAME: Final = AllreduceGradients.name


class Joinable(Protocol):
    """A `join` block, as an optimizer sees it."""

    @property
    def block(self) -> Block:
        """The block's part that weighted reductions use."""

    @property
    def total(self) -> float:
        """The sum of all ranks' weights in the last step."""


class _Registry:
    """The optimizers that were made over one communicator, and the `join` block that it is in."""

    def __init__(self) -> None:
        self.made = 0
        self.optimizers: WeakValueDictionary[int, Gradients] = WeakValueDictionary()
        self.join: Joinable | None = None


_registries: WeakKeyDictionary[Group, _Registry] = WeakKeyDictionary()


def registry_of(comm: Communicator) -> _Registry:
    """Return the registry of a communicator's optimizers."""
    return _registries.setdefault(group_of(comm), _Registry())


class Gradients:
    """How the gradients of an optimizer are reduced, and their sums over the steps so far.

    Attributes
    ----------
    comm : Communicator
        The optimizer's own.
    op : str
        "mean" or "sum" over ranks.
    accumulate : int
        Steps whose mean is reduced.
    options : dict
        The other arguments of `allreduce_gradients`.
    """

    # For the functions of an adapter that its framework calls.
    entry = staticmethod(entry)

    def __init__(
        self,
        comm: Communicator,
        op: str,
        bucket_bytes: int,
        accumulate: int,
        compression: str | None,
        shared: Communicator,
    ) -> None:
        self.comm, self.op, self.accumulate = comm, op, accumulate
        self._shared = shared
        # The same number on every rank, since making an optimizer is collective.
        registry = registry_of(shared)
        self.number: int | None = registry.made
        registry.made += 1
        registry.optimizers[self.number] = self
        self.options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "compression": compression}
        # Applies a step's gradients on a rank without data, if the adapter can; see `join`.
        self.follow: Callable[[Any], None] = lambda gradients: None
        self._steps = 0
        self._sums: list[Sum | None] = []

    @entry
    def add(self, tree: Any) -> tuple[bool, Any]:
        """Add the gradients of a step; return whether they were reduced, and the reduced ones.

        Collective in the last of the accumulated steps; local in the others.
        """
        join = registry_of(self._shared).join
        if join is not None:
            memory = trees_of(self._shared)
            reduced = runner_of(self._shared).call(JoinedStep, join.block, memory, self, tree)
            return bool(join.total), reduced
        if self._steps + 1 < self.accumulate:
            with naming(_NAME):
                self._sums = self._added(tree)
            self._steps += 1
            return False, None
        # Inside the call, so that it reports an error in this rank's gradients to the others.
        reduced = runner_of(self.comm).call(OptimizerStep, trees_of(self.comm), self, tree)
        # Only now: if the call failed, the ranks can make it again.
        self._steps, self._sums = 0, []
        return True, reduced

    def copy(self) -> Self:
        """Return the gradients of a copy of the optimizer, which are reduced over the same ranks.

        What is accumulated so far is the copy's as well.
        """
        made = object.__new__(type(self))
        # Copies need not be made on all ranks, so that they have no number that these agree on.
        vars(made).update(vars(self), number=None, follow=lambda gradients: None)
        made._sums = list(self._sums)
        return made

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "DistributedOptimizer: a distributed optimizer cannot be pickled or saved whole, since it "
            "stands for ranks of this process; save its state (state_dict() in torch), load that "
            "into a plain optimizer, and pass it to DistributedOptimizer"
        )

    @entry
    def reduce_loss(self, loss: Any) -> Any:
        """Reduce a loss as the gradients are."""
        return self.comm.allreduce(loss, self.op)

    def mean_of_steps(self, tree: Any) -> Any:
        """Return the mean of the steps' gradients, this last one among them."""
        if self.accumulate == 1:
            return tree
        sums = self._added(tree)
        return flatten(tree).rebuild(
            [None if total is None else total.mean(self.accumulate) for total in sums]
        )

    def _added(self, tree: Any) -> list[Sum | None]:
        """Return this rank's sums with another step's gradients; the old sums stay as they are."""
        flat = flatten(tree)
        sums = self._sums or [None] * len(flat.leaves)
        if len(sums) != len(flat.leaves):
            raise ValueError(
                "gradients that are accumulated must have the same structure in every "
                f"step; got {len(flat.leaves)} leaves after {len(sums)}"
            )
        return [
            total if leaf is None else _plus(total, leaf, path)
            for total, leaf, path in zip(sums, flat.leaves, flat.paths, strict=True)
        ]


class OptimizerStep(AllreduceGradients):
    """The reduction of an optimizer's gradients."""

    def __init__(
        self, context: Context, memory: TreeMemory, gradients: Gradients, tree: Any
    ) -> None:
        means = gradients.mean_of_steps(tree)
        super().__init__(context, memory, means, gradients.op, **gradients.options)


class JoinedStep(WeightedGradients):
    """The reduction of an optimizer's gradients inside `join`."""

    def __init__(
        self, context: Context, block: Block, memory: TreeMemory, gradients: Gradients, tree: Any
    ) -> None:
        if gradients.accumulate > 1:
            raise ValueError(
                "inside join gradients cannot be accumulated, since ranks that have no more steps "
                f"would keep some back; got an optimizer with accumulate={gradients.accumulate}"
            )
        options, number = gradients.options, gradients.number
        if number is None:
            raise ValueError(
                "inside join a copy of a distributed optimizer cannot take steps, since ranks without "
                "data would not know which of their copies to apply them to; pass a plain optimizer "
                "to DistributedOptimizer on every rank"
            )
        super().__init__(context, block, memory, tree, gradients.op, **options, optimizer=number)


class Sum:
    """The sum of one leaf's gradients, in the precision in which gradients are reduced."""

    def __init__(self, array: Any, last: Operand) -> None:
        self.array = array
        # Without the gradients themselves, so that their memory can be freed.
        self.last = last._replace(array=None)

    def mean(self, steps: int) -> Any:
        """Return the mean over so many steps, as an array like the gradients."""
        return restored(divided(self.array, self.last, steps), self.last)


def _plus(total: Sum | None, leaf: Any, path: str) -> Sum:
    gradient = operand_of(leaf, path)
    check_leaf(gradient.dtype, "mean", path)
    if total is None:
        # A copy, since the caller may use the same memory in the next step.
        return Sum(widened(gradient), gradient)
    got, before = tuple(gradient.array.shape), tuple(total.array.shape)
    if (got, gradient.dtype) != (before, total.last.dtype):
        raise ValueError(
            f"{path} must have the same shape and dtype in every step that is accumulated; "
            f"got {gradient.dtype} {got} after {total.last.dtype} {before}"
        )
    return Sum(added(total.array, gradient), gradient)
