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
from arraycomm._training.numbered import Numbering
from arraycomm._training.programs import GradientCalls
from arraycomm._training.virtual import VirtualRanks
from arraycomm._trees.leaves import Onto, Total
from arraycomm.adapters.jax._primitive import Call, bind
from arraycomm.adapters.jax._tracing import flatten, is_traced
from arraycomm.adapters.jax._updates import Updates, Watched, mark_outside_branches


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


class Round(NamedTuple):
    """What the rounds of one optimizer are made with."""

    calls: GradientCalls
    updates: Numbering
    virtual: VirtualRanks

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


@dataclass(frozen=True)
class _Add(Call):
    """The round of one update in a program; the last arguments are those that are compared."""

    round: Round
    present: tuple[bool, ...]
    watched: Watched
    name = "DistributedOptimizer"

    @property
    def beside(self) -> int:  # type: ignore[override]
        return 1 + len(self.watched.names)

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        split = sum(self.present)
        given = [*arrays[split : 2 * split], *arrays[:split]]
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given]

    def make(
        self, over: object, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        split = sum(self.present)
        given, known = iter(arrays[:split]), iter(arrays[split : 2 * split])
        leaves = [next(given) if there else None for there in self.present]
        sums = [next(known) if there else None for there in self.present]
        dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
        look = self.watched.looking(arrays[2 * split + 1 :])
        count = int(arrays[2 * split])
        made, means = self.round.add(leaves, sums, dtypes, count, look, place, "error")
        results = [total for total in made if total is not None]
        for mean, leaf in zip(means, leaves, strict=True):
            if leaf is not None:
                results.append(np.zeros_like(leaf) if mean is None else mean)
        for out, result in zip(outs[: len(results)], results, strict=True):
            if out is not None:
                out[...] = result
        return results

    def check_differentiable(self) -> None:
        raise TypeError("DistributedOptimizer: with virtual_ranks updates have no derivatives")


@dataclass(frozen=True)
class _AddAside(Call):
    """The round of one update in a program without room for the totals, which stay outside.

    The first result says whether the round is the last of a step; the others are its gradients.
    """

    updates: Updates
    virtual: VirtualRanks
    present: tuple[bool, ...]
    watched: Watched
    name = "DistributedOptimizer"

    @property
    def beside(self) -> int:  # type: ignore[override]
        return len(self.watched.names)

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[: sum(self.present)]]
        return [jax.ShapeDtypeStruct((), np.dtype(bool)), *given]

    def make(
        self, over: object, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        given, virtual, count = iter(arrays), self.virtual, sum(self.present)
        leaves = [next(given) if there else None for there in self.present]
        options: dict[str, Any] = {"look": self.watched.looking(arrays[count:]), "missing": "error"}
        onto = virtual.onto(range(len(leaves)))
        made = self.updates.calls.reduce(leaves, self.updates.made, place, onto=onto, **options)
        virtual.note(dict(enumerate(made)))
        is_last, means = virtual.is_last, virtual.complete()
        virtual.next_round()
        results: list[Any] = [np.array(is_last)]
        for number, leaf in enumerate(leaves):
            if leaf is not None:
                results.append(means[number] if is_last else np.zeros_like(leaf))
        for out, result in zip(outs[: len(results)], results, strict=True):
            if out is not None:
                out[...] = result
        return results


def add_aside(
    updates: Updates, virtual: VirtualRanks, leaves: Sequence[Any], inputs: Any
) -> tuple[Any, list[Any]]:
    """Add a round's gradients in a program to totals outside of it.

    Return whether the optimizer takes its step, as an array, and the gradients that it then gets.
    """
    watched, beside = updates.watched(inputs, traced=True)
    comm, present = updates.calls.comm, tuple(leaf is not None for leaf in leaves)
    mark_outside_branches(updates.made, comm)
    arrays = [jnp.asarray(leaf) for leaf in leaves if leaf is not None]
    arrays += [jax.lax.stop_gradient(array) for array in beside]
    applies, *made = bind(_AddAside(updates, virtual, present, watched), arrays, comm)
    reduced = iter(made)
    return applies, [next(reduced) if there else None for there in present]


class VirtualUpdates:
    """The updates of one transformation in rounds; `inner` is applied in the last."""

    def __init__(self, inner: Any, updates: Updates, virtual: VirtualRanks) -> None:
        self._inner, self._updates, self._virtual = inner, updates, virtual
        self._round = Round(updates.calls, updates.made, virtual)

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
        if traced:
            sums = [
                jnp.zeros(leaf.shape, total_dtype(np.dtype(leaf.dtype)))
                if total is None and leaf is not None
                else total
                for total, leaf in zip(sums, leaves, strict=True)
            ]
            new, means = self._add_in_program(leaves, sums, state.count, watched, beside)
        else:
            jax.effects_barrier()
            dtypes = [
                None if given is None else jax.dtypes.result_type(given)
                for given in (
                    like if leaf is None else leaf for leaf, like in zip(leaves, likes, strict=True)
                )
            ]
            look = watched.looking(beside)
            made = self._round.add(leaves, sums, dtypes, int(state.count), look)
            places = [
                like if total is None else total for total, like in zip(sums, likes, strict=True)
            ]
            new, means = (
                [_like(*pair) for pair in zip(part, places, strict=True)] for part in made
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

    def _add_in_program(
        self, leaves: list[Any], sums: list[Any], count: Any, watched: Watched, beside: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        comm = self._updates.calls.comm
        mark_outside_branches(self._updates.made, comm)
        present = tuple(leaf is not None for leaf in leaves)
        arrays = [jnp.asarray(leaf) for leaf in leaves if leaf is not None]
        arrays += [total for total, there in zip(sums, present, strict=True) if there]
        arrays += [jnp.asarray(count), *(jax.lax.stop_gradient(array) for array in beside)]
        made = bind(_Add(self._round, present, watched), arrays, comm)
        split = len(made) // 2
        new, means = iter(made[:split]), iter(made[split:])
        return (
            [next(new) if there else old for there, old in zip(present, sums, strict=True)],
            [next(means) if there else None for there in present],
        )


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
