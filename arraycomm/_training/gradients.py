"""The gradients of one distributed optimizer, reduced over ranks, and what adapters implement."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, Protocol, Self
from weakref import WeakValueDictionary

from arraycomm._arrays.results import to_framework
from arraycomm._calls.operation import Context
from arraycomm._calls.runner import OperationClass
from arraycomm._communicator import Communicator, group_of, runner_of, trees_of
from arraycomm._dtypes import OpName
from arraycomm._entries import entry
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.header import Settings
from arraycomm._training.comparison.verification import Inputs, Look, Shows, Verification
from arraycomm._training.compression import Compression, described, received, sent
from arraycomm._training.numbered import NumberedGradients, Numbering, Where
from arraycomm._training.rounds import Rounds
from arraycomm._training.shards import Shards
from arraycomm._training.sums import Sums
from arraycomm._training.virtual import VirtualRanks
from arraycomm._training.weighted import Block, HandOver, WeightedGradients
from arraycomm._trees.fusion import TreeMemory
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.reduce import AllreduceGradients, prototypes

_NAME: Final = AllreduceGradients.name


class _Registry:
    """The optimizers that were made over one communicator, and the `join` block that it is in."""

    def __init__(self) -> None:
        self.made = 0
        self.optimizers: WeakValueDictionary[int, Gradients] = WeakValueDictionary()
        self.join: Block | None = None


def registry_of(comm: Communicator) -> _Registry:
    """Return the registry of a communicator's optimizers."""
    registry: _Registry = group_of(comm).kept.setdefault(_Registry, _Registry())
    return registry


class TakesSteps(Protocol):
    """What takes an optimizer's steps, for adapters whose steps depend on more than gradients."""

    def inputs(self) -> Inputs:
        """Return what the step that is being taken depends on."""

    def adopt(self, settings: Any) -> None:
        """Set hyperparameters to those of another rank."""

    def follow(self, reduced: Any, settings: Any) -> None:
        """Take a step of ranks with data on a rank without; see `join`."""


class Gradients:
    """How the gradients of an optimizer are reduced."""

    # For the functions of an adapter that its framework calls.
    entry = staticmethod(entry)

    def __init__(
        self,
        comm: Communicator,
        op: OpName,
        bucket_bytes: int,
        accumulate: int,
        compression: str | Compression | None,
        shared: Communicator,
        verification: Verification,
        overlapping: bool = False,
        shards: Shards | None = None,
        virtual: VirtualRanks | None = None,
    ) -> None:
        self.virtual = virtual
        # By which the ranks' gradients are reduced.
        self.op_of_ranks = op if virtual is None else "sum"
        self.comm, self.op, self.accumulate, self.shards = comm, op, accumulate, shards
        self._shared, self.verification = shared, verification
        # What takes the steps, if the adapter has said so.
        self.steps: TakesSteps | None = None
        self.sums = Sums(accumulate)
        # The same number on every rank, since making an optimizer is collective.
        registry = registry_of(shared)
        self.number: int | None = registry.made
        registry.made += 1
        registry.optimizers[self.number] = self
        # The form in which gradients are sent, if an object makes it, and what ranks compare of it.
        self.compression = compression if isinstance(compression, Compression) else None
        self._described = described(compression)
        # The other arguments of `allreduce_gradients`.
        self.options: dict[str, Any] = {
            "bucket_bytes": bucket_bytes,
            "compression": compression if self.compression is None else None,
        }
        # For adapters whose gradients can be reduced as they are computed, if all ranks' can.
        self.rounds = Rounds(comm, self.op_of_ranks, self.options) if overlapping else None
        # The parameters of each bucket, by their numbers, once the ranks have agreed on them.
        self.division: list[list[int]] | None = None
        # How many steps this rank has not taken, although their gradients were reduced.
        self.failed_steps = 0
        # Where the program says it is, if the adapter knows: compared with each reduction.
        self.place: Settings = ()

    @entry
    def add(
        self,
        tree: Any,
        numbering: Numbering | None = None,
        inputs: Callable[[], Inputs] | None = None,
    ) -> tuple[bool, Any]:
        """Add the gradients of a step; return whether they were reduced, and the reduced ones.

        Collective in the last of the accumulated steps; local in the others. An adapter whose steps
        can be skipped without its knowledge numbers them.
        """
        look = partial(self.look, inputs=inputs)
        if self.joined:
            reduced, total = self._call_in_join(JoinedReduction, tree, look)
            return bool(total), reduced
        if self.sums.keeps:
            self.sums.keep(tree)
            return False, None
        if self.virtual is not None:
            applies = self.virtual.is_last
            reduced = self._reduce(tree, numbering, look)
            self.virtual.next_round()
            return applies, reduced
        reduced = self._reduce(tree, numbering, look)
        # Only now: if the call failed, the ranks can make it again.
        self.sums.forget()
        self.sums.finish_step()
        return True, reduced

    def look(
        self,
        reduced: object = None,
        *,
        stepping: bool = True,
        arrays: bool = True,
        inputs: Callable[[], Inputs] | None = None,
    ) -> Look | None:
        """Return what this rank shows of its inputs in a call; see `Verification.look`."""
        known = inputs or (None if self.steps is None else self.steps.inputs)
        return self.verification.look(known, reduced, stepping=stepping, arrays=arrays)

    def _reduce(self, tree: Any, numbering: Numbering | None, look: Shows) -> Any:
        # Inside the call, so that it reports an error in this rank's gradients to the others.
        with nullcontext(Where()) if numbering is None else numbering.update() as where:
            reduced = runner_of(self.comm).call(
                OptimizerStep, trees_of(self.comm), self, tree, where, numbering, look
            )
        if self.compression is None:
            return reduced
        given, got = flatten(tree), flatten(reduced)
        with self.announcing():
            return given.rebuild([*self.received(got.leaves, given.leaves, given.paths)])

    def sent(self, gradients: Sequence[Any], paths: Sequence[str]) -> Sequence[Any]:
        """Return gradients, None for None, in the form in which an object sends them."""
        return gradients if self.compression is None else sent(self.compression, gradients, paths)

    def received(
        self, reduced: Sequence[Any], gradients: Sequence[Any], paths: Sequence[str]
    ) -> Sequence[Any]:
        """Return reduced gradients in the form of these, which are this rank's."""
        if self.compression is None:
            return reduced
        return received(self.compression, reduced, gradients, paths)

    @contextmanager
    def announcing(self) -> Iterator[None]:
        """Make the other ranks' next call raise if the block raises; see `fail`."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    @contextmanager
    def taking_step(self) -> Iterator[None]:
        """Note whether the block raises, in which the optimizer uses the reduced gradients.

        Then this rank has not taken a step that others took, which the next step tells all ranks.
        """
        try:
            yield
        except BaseException:
            self.failed_steps += 1
            raise

    def check_outside_join(self) -> None:
        """Raise, inside `join`, if an object compresses gradients."""
        if self.compression is not None:
            raise ValueError(
                "inside join gradients, which are weighted, cannot be compressed by an object; "
                f"got an optimizer with compression={self._described}; pass a name such as "
                '"bfloat16"'
            )

    # For adapters that reduce during backward passes

    @property
    def settings(self) -> tuple[Any, ...]:
        """What two optimizers of one parameter must have in common."""
        count = None if self.virtual is None else self.virtual.count
        return group_of(self._shared), self.op, self.accumulate, self._described, count

    @property
    def joined(self) -> bool:
        """Whether the communicator is inside `join`."""
        return registry_of(self._shared).join is not None

    @property
    def is_counted(self) -> bool:
        """Whether ranks compare in which step they are."""
        return self.rounds is not None and not self.joined

    def fail(self, error: Exception) -> NoReturn:
        """Make the other ranks' next call raise, in step; raises `error` here."""
        if not self.joined:
            runner_of(self.comm).fail(_NAME, error)
        raise error

    def reduce_in_join(self, tree: Any) -> Any:
        """Reduce the gradients of a backward pass inside `join`, by weight."""
        return self._call_in_join(JoinedReduction, tree, None)[0]

    def hand_over(self, tree: Any, replaced: int | str | None) -> tuple[bool, Any]:
        """Give a step's gradients inside `join` to ranks without data; return whether it counts.

        `replaced` is a digest of gradients that were replaced after they had been reduced. If it is
        `IDLE`, the gradients of a rank that had a backward pass are returned too.
        """
        given, total = self._call_in_join(HandedStep, tree, replaced, self.look)
        if self.rounds is not None:
            self.rounds.note_others(others=False)
        return bool(total), given

    def _call_in_join(self, operation: OperationClass[...], *arguments: Any) -> tuple[Any, float]:
        """Return what an operation inside `join` returns, and the sum of the ranks' weights."""
        runner, memory = runner_of(self._shared), trees_of(self._shared)
        block = registry_of(self._shared).join
        assert block is not None
        result = runner.call(operation, block, memory, self, *arguments)
        return result, block.total

    def finish_step(self, *, skipped: bool = False) -> None:
        """Go on to the next step."""
        if self.rounds is not None:
            self.rounds.finish_step(skipped=skipped, kept=not self.sums.has_reduced)
        self.sums.finish_step()
        if self.virtual is not None:
            self.virtual.next_round()

    def renumber(self, numbers: dict[int, int], count: int) -> None:
        """Give what is remembered of parameters their new numbers; drop the others'."""
        if self.virtual is not None:
            self.virtual.renumber(numbers)
        self.sums.renumber(numbers, count)

    def copy(self, memo: object = None) -> Self:
        """Return the gradients of a copy of the optimizer, which are reduced over the same ranks.

        What is accumulated so far is the copy's as well.
        """
        made = object.__new__(type(self))
        # Copies need not be made on all ranks, so that they have no number that these agree on.
        vars(made).update(vars(self), number=None, steps=None)
        made.verification, made.sums = self.verification.copy(), self.sums.copy()
        made.virtual = None if self.virtual is None else self.virtual.copy()
        made.rounds = copy(self.rounds)
        return made

    __copy__ = __deepcopy__ = copy

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "DistributedOptimizer: a distributed optimizer cannot be pickled or saved whole, since "
            "it stands for ranks of this process; save its state (state_dict() in torch), load "
            "that into a plain optimizer, and pass it to DistributedOptimizer"
        )


class OptimizerStep(NumberedGradients):
    """The reduction of an optimizer's gradients."""

    def __init__(
        self,
        context: Context,
        memory: TreeMemory,
        gradients: Gradients,
        tree: Any,
        where: Where,
        numbering: Numbering | None,
        look: Shows,
    ) -> None:
        flat = flatten(gradients.sums.mean_with(tree))
        counted, options = (where, numbering, look), dict(gradients.options)
        if gradients.compression is not None:
            # What the others have sent says nothing of the gradients that it stands for.
            options["missing"] = "error"
        self._virtual = gradients.virtual
        if self._virtual is not None:
            self._virtual.check_tree(flat)
            options["onto"] = self._virtual.onto(range(len(flat.leaves)))
        sent = flat.rebuild([*gradients.sent(flat.leaves, flat.paths)])
        super().__init__(context, memory, sent, gradients.op_of_ranks, *counted, **options)
        self.leaves.check_reducible(gradients.op)
        made = self.signature
        self.signature = replace(made, settings=(*made.settings, *_place(gradients)))

    def result(self, agreement: Agreement) -> Any:
        made = super().result(agreement)
        if self._virtual is None:
            return made
        self._virtual.note(dict(enumerate(made)))
        means = self._virtual.complete()
        if not self._virtual.is_last:
            return None
        likes = prototypes(self.leaves.views)
        reduced = [
            to_framework(means[number], like) if number in means else None
            for number, like in enumerate(likes)
        ]
        return self.leaves.rebuild(reduced)


class JoinedReduction(WeightedGradients):
    """The reduction of an optimizer's gradients inside `join`.

    With a `look` its step is taken with it, and else later.
    """

    def __init__(
        self,
        context: Context,
        block: Block,
        memory: TreeMemory,
        gradients: Gradients,
        tree: Any,
        look: Shows | None,
    ) -> None:
        number = _number_in_join(gradients)
        step: dict[str, Any] = {"further": (("backward of optimizer", number),)}
        if look is not None:
            further = (*_place(gradients), *_taken(gradients))
            step = {"optimizer": number, "further": further, "look": look}
        super().__init__(context, block, memory, tree, gradients.op, **gradients.options, **step)


class HandedStep(HandOver):
    """A step inside `join` with gradients that are reduced, also of the ranks without data."""

    def __init__(
        self,
        context: Context,
        block: Block,
        memory: TreeMemory,
        gradients: Gradients,
        tree: Any,
        replaced: int | str | None,
        look: Shows,
    ) -> None:
        number = _number_in_join(gradients)
        # All exchange parameters, or none.
        exchanged = gradients.rounds is not None and gradients.rounds.place.others
        others = (("parameters", "others than before"),) if exchanged else ()
        further = (("replaced", replaced), *others, *_taken(gradients))
        options = {**gradients.options, "compression": None, "optimizer": number}
        super().__init__(context, block, memory, tree, "sum", **options, further=further, look=look)


def _place(gradients: Gradients) -> Settings:
    """Return what the ranks compare, so that none is a step behind the others."""
    count = gradients.failed_steps
    failed = (("steps in which the optimizer raised", count),) if count else ()
    virtual = gradients.virtual
    turn = () if virtual is None else (("round of virtual ranks", virtual.round),)
    return *gradients.place, *failed, *turn


def _taken(gradients: Gradients) -> Settings:
    """Return the hyperparameters of a step, for the ranks without data that take it as well."""
    if gradients.steps is None:
        return ()
    return (("hyperparameters", json.dumps(gradients.steps.inputs().taken(), default=str)),)


def _number_in_join(gradients: Gradients) -> int:
    """Return an optimizer's number for ranks without data; raise if they cannot take its steps."""
    gradients.check_outside_join()
    if gradients.virtual is not None:
        raise ValueError(
            "inside join there are no virtual ranks, since a rank without data would play none; "
            f"got an optimizer with virtual_ranks={gradients.virtual.count}"
        )
    if gradients.accumulate > 1:
        raise ValueError(
            "inside join gradients cannot be accumulated, since ranks that have no more steps "
            f"would keep some back; got an optimizer with accumulate={gradients.accumulate}"
        )
    if gradients.shards is not None and gradients.rounds is None:
        raise ValueError(
            "inside join only torch optimizers can be sharded, since ranks without data could not "
            "update their part of the state of others; pass shard=False, or as many batches on "
            "every rank"
        )
    if gradients.number is None:
        raise ValueError(
            "inside join a copy of a distributed optimizer cannot take steps, since ranks without "
            "data would not know which of their copies to apply them to; pass a plain optimizer "
            "to DistributedOptimizer on every rank"
        )
    return gradients.number
