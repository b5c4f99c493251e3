"""Gradients reduced by weight, together with ranks that have no more data; see `join`."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import Array, BufferView, allocate
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._calls.attempts import take_together
from arraycomm._calls.operation import Context, Operation
from arraycomm._checks import check_at_least
from arraycomm._dtypes import DType, check_op
from arraycomm._folds import divide, total_dtype
from arraycomm._protocol.agreement import Agreement, active
from arraycomm._protocol.details import CallDetail
from arraycomm._protocol.header import LeafSpec, Settings, Signature
from arraycomm._training.arithmetic import multiplied, operand_of, widened
from arraycomm._training.comparison.verification import Shows, compare, nothing_shown
from arraycomm._transports.base import Steps
from arraycomm._trees.fusion import Fusion, TreeMemory
from arraycomm._trees.leaves import NONE, Leaves, agreed_leaves, check_leaf, spec_of
from arraycomm._trees.pytrees import flatten
from arraycomm._trees.reduce import (
    DEFAULT_BUCKET_BYTES,
    check_compression,
    compressed,
    prototypes,
    settings_of,
)


class ShadowStep(NamedTuple):
    """A step of other ranks, as a rank without data sees it."""

    # The number of the optimizer that is to take it with these gradients, if any.
    optimizer: int | None
    # The sum of the weights.
    total: float
    gradients: Any
    # The hyperparameters with which ranks with data take it, as JSON.
    settings: str | None = None
    # Whether the optimizer's parameters are others than in the step before.
    others: bool = False


class Block:
    """The `join` block that a weighted reduction is called in."""

    def __init__(self) -> None:
        # How much this rank's next gradients count, and all ranks' together in the last step.
        self.weight: Any = 1
        self.total = 0.0
        # Steps that this rank has taken itself; those of shadows do not count.
        self._steps = 0

    def stepped(self, weights: Sequence[float]) -> None:
        """Note the weights of all ranks in a step of this rank's own."""
        self.total = sum(weights)
        self._steps += 1


# Weights, and how headers carry them


def check_weight(weight: Any, name: str = "weight", most: float = 2.0**200) -> float:
    """Return a weight as a float; raise unless it is a number, finite and not negative.

    Products and sums of weights beyond `most`, or below its reciprocal, would not be exact enough.
    """
    try:
        if isinstance(weight, str | bytes) or np.ndim(weight):
            raise TypeError(f"a {type(weight).__name__} is no number")
        number = float(weight)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be a number, such as how many samples this rank has; got {weight!r}"
        ) from error
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"{name} must be finite and not negative; got {number}; "
            "a rank that has nothing passes 0"
        )
    if number and not 1 / most <= number <= most:
        raise ValueError(
            f"{name} must be 0, or from {1 / most:.0e} to {most:.0e}; got {number}; multiply those "
            "of all ranks by one number"
        )
    return number


def bits_of(weight: float) -> int:
    """Return a weight as a word of a header."""
    return int(struct.unpack("<q", struct.pack("<d", weight))[0])


def weights_of(agreement: Agreement) -> list[float]:
    """Return the weights that came with all ranks' headers."""
    return [struct.unpack("<d", struct.pack("<q", word))[0] for word in agreement.free_words()]


# The reduction


class WeightedGradients(Operation):
    """`allreduce_gradients` inside `join`."""

    name = "allreduce_gradients"
    negotiable = True

    def __init__(
        self,
        context: Context,
        block: Block,
        memory: TreeMemory,
        tree: Any,
        op: str,
        bucket_bytes: int,
        compression: str | None,
        missing: str = "zeros",
        optimizer: int | None = None,
        further: Settings = (),
        look: Shows = nothing_shown,
    ) -> None:
        super().__init__(context)
        check_op(op)
        check_compression(compression)
        # Products are of float32, in which gradients of 16 bits are added up too.
        local = check_weight(block.weight, "join: weight", 2.0**64)
        if op not in ("mean", "sum"):
            raise ValueError(f'inside join op must be "mean" or "sum"; got {op!r}')
        self._memory, self._block, self._op, self._compression = memory, block, op, compression
        self._factor = self.factor_of(local)
        self._leaves = Leaves(flatten(tree), partial(_weighted_view, factor=self._factor))
        self._leaves.check_reducible(op)
        settings = (
            *settings_of(check_at_least(bucket_bytes, 1, "bucket_bytes"), compression),
            *self._leaves.flat.settings(alone=self.group.size == 1),
            ("joined", 1),
            ("optimizer", optimizer),
            *further,
        )
        described = self._leaves.described()
        self.signature = Signature(self.name, op, leaves=described, settings=settings)
        self.word, self._look = bits_of(local), look(described)
        self.further_words = () if self._look is None else self._look.words

    def factor_of(self, weight: float) -> float:
        """Return what this rank's gradients are multiplied by."""
        return weight if self._op == "mean" else float(weight > 0)

    def steps(self, agreement: Agreement) -> Steps:
        yield from compare(self.group, agreement, self._look)
        agreed = list(self._leaves.described())
        if agreement.calls is not None:
            agreed = agreed_leaves(active(agreement.calls))
        weights = weights_of(agreement)
        self._block.stepped(weights)
        views = self._leaves.views
        sources = views if self._factor else [None] * len(views)
        self._reduced = yield from _reduce_weighted(
            self._memory, agreed, sources, weights, self._op, self._compression
        )

    def result(self, agreement: Agreement) -> Any:
        likes = prototypes(self._leaves.views)
        pairs = zip(self._reduced, likes, strict=True)
        return self._leaves.rebuild(
            [None if array is None else to_framework(array, like) for array, like in pairs]
        )


# In place of the digest of a rank that had no backward pass in a step, and so nothing to clip.
IDLE: Final = "no backward pass"
_IDLE: Final = ("replaced", IDLE)


class HandOver(WeightedGradients):
    """The gradients of a step, given to ranks that have no data, or had no backward pass in it.

    The result are the gradients that this rank has to take, None if it has its own.
    """

    def factor_of(self, weight: float) -> float:
        return 1.0

    def steps(self, agreement: Agreement) -> Steps:
        yield from compare(self.group, agreement, self._look)
        weights, calls = weights_of(agreement), agreement.calls
        self._block.stepped(weights)
        self._reduced = None
        if calls is None:
            return
        live, giving = _giving(active(calls))
        agreed, views = agreed_leaves(live), self._leaves.views
        # The others add zeros.
        sources = views if calls.index(giving) == self.group.rank else [None] * len(views)
        reducing = _reduce_weighted(self._memory, agreed, sources, weights, "sum", None)
        self._reduced = yield from reducing

    def result(self, agreement: Agreement) -> Any:
        takes = self._reduced is not None and _IDLE in self.signature.settings
        return super().result(agreement) if takes else None


def _giving(live: Sequence[CallDetail]) -> tuple[list[CallDetail], CallDetail]:
    """Return the calls as if no rank were idle, and that of the rank whose gradients all take."""
    giving = next((call for call in live if _IDLE not in call.settings), live[0])
    shown = "replaced", dict(giving.settings).get("replaced")
    settings = [[shown if each == _IDLE else each for each in call.settings] for call in live]
    pairs = zip(live, map(tuple, settings), strict=True)
    return [replace(call, settings=each) for call, each in pairs], giving


def shadow_gradients(memory: TreeMemory, agreement: Agreement, live: Sequence[CallDetail]) -> Steps:
    """Take part in other ranks' reduction without gradients of one's own; return a `ShadowStep`."""
    yield from compare(memory.group, agreement, None)
    live, _ = _giving(live)
    agreed, settings = agreed_leaves(live), dict(live[0].settings)
    op = "mean" if "mean" in live[0].head else "sum"
    weights = weights_of(agreement)
    nothing = [None] * len(agreed)
    compression: Any = settings["compression"]
    reduced = yield from _reduce_weighted(memory, agreed, nothing, weights, op, compression)
    optimizer: Any = settings["optimizer"]
    taken: Any = settings.get("hyperparameters")
    return ShadowStep(optimizer, sum(weights), reduced, taken, "parameters" in settings)


def _reduce_weighted(
    memory: TreeMemory,
    agreed: Sequence[LeafSpec],
    sources: Sequence[BufferView | None],
    weights: Sequence[float],
    op: str,
    compression: str | None,
) -> Steps:
    """Return each leaf's weighted mean, or sum, as a NumPy array; None if no rank has the leaf."""
    present = [index for index, leaf in enumerate(agreed) if leaf.kind != NONE]
    specs = [spec_of(agreed[index]) for index in present]
    sent = tuple((compressed(total_dtype(dtype), compression), shape) for dtype, shape in specs)
    fusion = Fusion(sent, DEFAULT_BUCKET_BYTES)
    group = memory.group
    packed = yield from take_together(group, "allreduce_gradients", fusion.nbytes, fusion.acquire)
    yield from fusion.reduce(memory, packed, [sources[index] for index in present], "sum")
    total = sum(weights) if op == "mean" else 0
    reduced: list[Any] = [None] * len(agreed)
    for number, slot in enumerate(packed.leaves()):
        dtype = specs[number][0]
        wide = slot.astype(total_dtype(dtype), copy=False)
        reduced[present[number]] = divided(wide, total or None, dtype)
    return reduced


class _WeightedView(BufferView):
    """A gradient times its weight; its dtype, which the ranks compare, is the gradient's own."""

    __slots__ = ("_dtype",)

    def __init__(self, array: Array, like: BufferView, dtype: DType) -> None:
        super().__init__(array, like.framework, like.source, True, True, like.device)
        self._dtype = dtype

    @property
    def dtype(self) -> DType:
        return self._dtype


def _weighted_view(x: Any, path: str, *, factor: float) -> BufferView:
    """Return a view of w·g, which is computed where g is; of g itself if that is the same."""
    if factor in {0, 1}:
        return view(x, path)
    gradient = operand_of(x, path)
    check_leaf(gradient.dtype, "mean", path)
    product = multiplied(widened(gradient), gradient, factor)
    if gradient.like is None:
        like = view(product, path)
        return _WeightedView(like.array, like, gradient.dtype)
    return _WeightedView(np.asarray(product), gradient.like, gradient.dtype)


def divided(sums: Array, total: float | None, dtype: DType) -> Array:
    """Return sums, divided by a total if there is one, in memory of their own."""
    result = allocate(sums.shape, dtype)
    with np.errstate(all="ignore"):
        if total is not None:
            divide(sums, total)
        result[...] = sums
    return result
