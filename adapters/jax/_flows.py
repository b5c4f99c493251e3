"""On which leaves of the parameters the results of a traced update depend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval

from arraycomm.adapters.jax._sharded_state import Division, select
from arraycomm.adapters.jax._tracing import holds_tracers

_NONE: frozenset[int] = frozenset()


def compute(traced: Any, outputs: Sequence[bool], inputs: Sequence[Any]) -> list[Any]:
    """Return some outputs of a traced program; nothing else is computed."""
    jaxpr, consts, used = partial_eval.dce_jaxpr_consts(traced.jaxpr, list(outputs))
    found: list[Any] = jax.core.eval_jaxpr(
        jaxpr, select(traced.consts, consts), *select(inputs, used)
    )
    return found


def text(traced: Any, outputs: Sequence[bool], inputs: Sequence[bool]) -> Any:
    """Return, to compare, how some outputs of a traced program depend on some of its inputs."""
    jaxpr, consts, used = partial_eval.dce_jaxpr_consts(traced.jaxpr, list(outputs), list(inputs))
    return str(jaxpr), list(map(_value_of, select(traced.consts, consts))), sum(used)


def _value_of(const: Any) -> Any:
    """Return what tells constants of traced programs apart."""
    # Random keys have a dtype of JAX's own.
    is_opaque = not isinstance(jax.typeof(const).dtype, np.dtype)
    return id(const) if is_opaque or holds_tracers(const) else np.asarray(const).tobytes()


def leaves_of_state(traced: Any, division: Division, params: Any) -> tuple[int | None, ...]:
    """Return to which parameter each leaf of the state belongs, if to any; raise if to several.

    It belongs to those on whose gradients, or values, its next value depends.
    """
    count = len(division.owners)
    leaves = [frozenset([number]) for number in range(count)]
    values = leaves if params is not None else []
    state = [_NONE if leaf is None else leaves[leaf] for leaf in division.state_leaves]
    while True:
        found = _flows(traced.jaxpr, [*leaves, *state, *values])
        after = list(map(frozenset.union, state, found[count:]))
        if after == state:
            break
        state = after
    for each in (*map(frozenset.union, leaves, found[:count]), *state):
        if len(each) > 1:
            marked = jax.tree.unflatten(division.params, range(count))
            paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(marked)]
            first, second, *_ = sorted(each)
            raise refusal(f"its update of {paths[second]} depends on {paths[first]}")
    return tuple(next(iter(each), None) for each in state)


def refusal(why: str) -> TypeError:
    """Return what is raised for a transformation that cannot be sharded."""
    return TypeError(
        f"DistributedOptimizer: this transformation cannot be sharded: {why}, but every leaf must "
        "be updated from its own gradient and state; put what looks at all gradients before it, "
        "after a reduction: optax.chain(all_reduce(), optax.clip_by_global_norm(1.0), "
        "DistributedOptimizer(adam, shard=True)), or pass shard=False"
    )


def _flows(jaxpr: Any, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return on which leaves each output of a program depends, given that of its first inputs."""
    known = dict(zip(jaxpr.invars, inputs, strict=False))

    def leaves(atom: Any) -> frozenset[int]:
        return _NONE if hasattr(atom, "val") else known.get(atom, _NONE)

    for equation in jaxpr.eqns:
        flows = _flows_through(equation, list(map(leaves, equation.invars)))
        known.update(zip(equation.outvars, flows, strict=True))
    return list(map(leaves, jaxpr.outvars))


def _flows_through(equation: Any, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    inner = equation.params.get("jaxpr")
    if equation.primitive.name in {"jit", "pjit", "closed_call"} and inner is not None:
        return _flows(inner.jaxpr, inputs)
    rule = partial_eval.dce_rules.get(equation.primitive)
    count = len(equation.outvars)
    if rule is None or count == 1:
        return [_NONE.union(*inputs)] * count
    flows = []
    for number in range(count):
        used, _ = rule([other == number for other in range(count)], equation)
        flows.append(_NONE.union(*select(inputs, used)))
    return flows
