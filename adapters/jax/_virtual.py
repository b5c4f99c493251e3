"""Virtual ranks of optax: updates in rounds, whose totals are in the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._folds import total_dtype
from arraycomm._training.virtual import VirtualRanks
from arraycomm._trees.leaves import Onto, Total
from arraycomm.adapters.jax._tracing import flatten, is_traced
from arraycomm.adapters.jax._updates import UpdateCall, Updates, present_of


class VirtualState(NamedTuple):
    """State of an optimizer whose ranks play virtual ranks.

    Attributes
    ----------
    count : array of int32, shape ()
        Virtual ranks whose gradients are in `sums`; 0 between the optimizer's steps.
    sums : pytree
        Totals of gradients, each of its parameter's shape, the same on every rank. None for one
        that no virtual rank has had in the step, if updates are made eagerly.
    inner : pytree
        The optimizer's own state.
    """

    count: Any
    sums: Any
    inner: Any


@dataclass(frozen=True)
class _Add(UpdateCall):
    """The round of one update whose totals are in the state: it needs these, and the count."""

    virtual: VirtualRanks

    @property
    def beside(self) -> int:  # type: ignore[override]
        return 1 + super().beside

    def add(
        self,
        leaves: Sequence[Any],
        sums: Sequence[Any],
        dtypes: Sequence[Any],
        count: int,
        look: Any,
        place: int = 0,
        missing: str = "zeros",
    ) -> tuple[list[Any], list[Any]]:
        """Add a round's gradients; return the sums, and after the last round the gradients."""
        virtual, size = self.virtual, self.calls.comm.size
        if count % size or not 0 <= count < virtual.count:
            raise ValueError(
                f"DistributedOptimizer: the state has the gradients of {count} of {virtual.count} "
                f"virtual ranks, as after no round of {size} ranks; save it where completes_step "
                "of the data container is True"
            )
        before = [
            None
            if total is None or not count
            else Total(np.asarray(view(total).array), np.dtype(dtype))
            for total, dtype in zip(sums, dtypes, strict=True)
        ]
        onto = Onto(before if count else None, counts=virtual.plays(count // size))
        look = {"missing": missing, "look": look, "onto": onto}
        totals = onto.completed(self.calls.reduce(list(leaves), self.updates, place, **look))
        is_last = count + size >= virtual.count
        return (
            [None if total is None else total.array for total in totals],
            [virtual.finished(total) if total and is_last else None for total in totals],
        )

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        split = sum(self.present)
        given = [*arrays[split : 2 * split], *arrays[:split]]
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]

    def make(
        self, over: object, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        split = sum(self.present)
        leaves, sums = self.spread(arrays), self.spread(arrays[split:])
        dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
        count, look = int(arrays[2 * split]), self.look(arrays)
        made, means = self.add(leaves, sums, dtypes, count, look, place, "error")
        results = [total for total in made if total is not None]
        for mean, leaf in zip(means, leaves, strict=True):
            if leaf is not None:
                results.append(np.zeros_like(leaf) if mean is None else mean)
        return results

    def in_program(
        self, leaves: list[Any], sums: list[Any], count: Any, beside: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Add a round's gradients in the program that is traced, as `add` does."""
        totals = [total for total, there in zip(sums, self.present, strict=True) if there]
        made = self.run(leaves, beside, [*totals, jnp.asarray(count)])
        new, means = (self.spread(part) for part in (made[: len(totals)], made[len(totals) :]))
        kept = [old if total is None else total for total, old in zip(new, sums, strict=True)]
        return kept, means

    def check_differentiable(self) -> None:
        raise TypeError("DistributedOptimizer: with virtual_ranks updates have no derivatives")


@dataclass(frozen=True)
class _AddAside(UpdateCall):
    """The round of one update in a program without room for the totals, which stay outside.

    The first result says whether the round is the last of a step; the others are its gradients.
    """

    virtual: VirtualRanks

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[: sum(self.present)]]
        return [jax.ShapeDtypeStruct((), np.dtype(bool)), *given]

    def make(
        self, over: object, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        leaves, look, virtual = self.spread(arrays), self.look(arrays), self.virtual
        onto = virtual.onto(range(len(leaves)))
        made = self.calls.reduce(leaves, self.updates, place, "error", look, onto)
        virtual.note(dict(enumerate(made)))
        is_last, means = virtual.is_last, virtual.complete()
        virtual.next_round()
        results: list[Any] = [np.array(is_last)]
        for number, leaf in enumerate(leaves):
            if leaf is not None:
                results.append(means[number] if is_last else np.zeros_like(leaf))
        return results


def add_aside(
    updates: Updates, virtual: VirtualRanks, leaves: Sequence[Any], inputs: Any
) -> tuple[Any, list[Any]]:
    """Add a round's gradients in a program to totals outside of it.

    Return whether the optimizer takes its step, as an array, and the gradients that it then gets.
    """
    watched, beside = updates.watched(inputs, traced=True)
    call = _AddAside(updates.calls, updates.made, present_of(leaves), watched, virtual)
    applies, *made = call.run(leaves, beside)
    return applies, call.spread(made)


class VirtualUpdates:
    """The updates of one transformation in rounds; `inner` is applied in the last."""

    def __init__(self, inner: Any, updates: Updates, virtual: VirtualRanks) -> None:
        self._inner, self._updates, self._virtual = inner, updates, virtual

    def init(self, params: Any) -> VirtualState:
        """Return the state before the first round."""

        def zeros(leaf: Any) -> Any:
            return jnp.zeros(jnp.shape(leaf), total_dtype(np.dtype(jax.dtypes.result_type(leaf))))

        sums = jax.tree.map(zeros, params)
        return VirtualState(jnp.zeros((), jnp.int32), sums, self._inner.init(params))

    def update(
        self, updates: Any, state: VirtualState, params: Any = None, **extra: Any
    ) -> tuple[Any, VirtualState]:
        """Add a round's gradients; update with all after the last, and by zeros before."""
        _check_extra(extra, self._virtual.count)
        leaves, structure = flatten(updates)
        sums, of_sums = flatten(state.sums)
        likes = sums if params is None else flatten(params)[0]
        size = self._updates.calls.comm.size
        inputs = {"params": params, "state": {"virtual": state.count, "inner": state.inner}}
        traced = is_traced((leaves, state))
        watched, beside = self._updates.watched(inputs, traced=traced)
        calls, made = self._updates.calls, self._updates.made
        call = _Add(calls, made, present_of(leaves), watched, self._virtual)
        if traced:
            sums = [
                jnp.zeros(leaf.shape, total_dtype(np.dtype(leaf.dtype)))
                if total is None and leaf is not None
                else total
                for total, leaf in zip(sums, leaves, strict=True)
            ]
            new, means = call.in_program(leaves, sums, state.count, beside)
        else:
            jax.effects_barrier()
            dtypes = [
                None if given is None else jax.dtypes.result_type(given)
                for given in (
                    like if leaf is None else leaf for leaf, like in zip(leaves, likes, strict=True)
                )
            ]
            totals = call.add(leaves, sums, dtypes, int(state.count), call.look(beside))
            places = [
                like if total is None else total for total, like in zip(sums, likes, strict=True)
            ]
            new, means = (
                [_like(*pair) for pair in zip(part, places, strict=True)] for part in totals
            )

        def apply() -> tuple[Any, VirtualState]:
            gradient = jax.tree.unflatten(structure, means)
            changes, inner = self._inner.update(gradient, state.inner, params, **extra)
            nothing = [None if total is None else jnp.zeros_like(total) for total in sums]
            cleared = jax.tree.unflatten(of_sums, nothing)
            return changes, VirtualState(jnp.zeros_like(state.count), cleared, inner)

        def wait() -> tuple[Any, VirtualState]:
            if traced:
                # A program has one type of updates, which need not be that of parameters.
                changes = jax.tree.map(jnp.zeros_like, jax.eval_shape(apply)[0])
            else:
                nothing = [None if leaf is None else jnp.zeros_like(leaf) for leaf in likes]
                changes = jax.tree.unflatten(structure, nothing)
            totals = jax.tree.unflatten(of_sums, new)
            return changes, VirtualState(state.count + size, totals, state.inner)

        is_last = state.count + size >= self._virtual.count
        if not traced:
            return apply() if is_last else wait()
        _check_state(apply, wait)
        chosen: tuple[Any, VirtualState] = jax.lax.cond(is_last, apply, wait)
        return chosen


def _like(made: Any, total: Any) -> Any:
    """Return an array of the host where a total is, if there is one."""
    if made is None or total is None:
        return None if made is None else jnp.asarray(made)
    return to_framework(made, view(total))


def _check_state(*branches: Callable[[], tuple[Any, VirtualState]]) -> None:
    """Raise unless the branches of a program give states of one structure."""
    if len({jax.tree.structure(jax.eval_shape(branch)[1]) for branch in branches}) > 1:
        raise TypeError(
            "DistributedOptimizer: with virtual_ranks an update under jax.jit keeps the structure "
            "of the optimizer's state, and gradients that are None changed it; pass zeros for them"
        )


def _check_extra(extra: dict[str, Any], count: int) -> None:
    """Raise for arguments that depend on the batch of one round."""
    if extra:
        raise ValueError(
            f"DistributedOptimizer: with virtual_ranks={count} update takes gradients only, since "
            f"nothing else is added up over rounds; got {', '.join(extra)}"
        )
