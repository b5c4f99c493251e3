"""On which parameters the results of a traced update depend.

A bit of an int stands for an input of a program, or for a leaf of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval

from arraycomm.adapters.jax._sharded_state import Division, select
from arraycomm.adapters.jax._tracing import holds_tracers


def needed(traced: Any, outputs: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Return what computes some outputs of a traced program, and which inputs it takes."""
    jaxpr, used_consts, used = partial_eval.dce_jaxpr_consts(traced.jaxpr, list(outputs))
    return partial(jax.core.eval_jaxpr, jaxpr, select(traced.consts, used_consts)), used


def text(traced: Any, outputs: Sequence[bool], inputs: Sequence[bool]) -> Any:
    """Return, to compare, how some outputs of a traced program depend on some of its inputs."""
    jaxpr, consts, used = partial_eval.dce_jaxpr_consts(traced.jaxpr, list(outputs), list(inputs))
    return str(jaxpr), list(map(_value_of, select(traced.consts, consts))), sum(used)


def _value_of(const: Any) -> Any:
    """Return what tells constants of traced programs apart."""
    # Random keys have a dtype of JAX's own.
    is_opaque = not isinstance(jax.typeof(const).dtype, np.dtype)
    return id(const) if is_opaque or holds_tracers(const) else np.asarray(const).tobytes()


def leaves_of_state(traced: Any, division: Division) -> tuple[int | None, ...]:
    """Return to which parameter each leaf of the state belongs, if to any; raise if to several.

    It belongs to those on whose gradients, or values, its next value depends.
    """
    count, states = len(division.owners), len(division.state_types)
    flows = _flows(traced.jaxpr)
    words = [1 << number for number in range(count)]
    belongs = dict(enumerate(words)) | dict(enumerate(words, count + states))
    for number, leaf in enumerate(division.state_leaves):
        if leaf is not None:
            belongs[count + number] = words[leaf]
    found: dict[int, int] = {}
    while found != (found := _next_values(flows[count:], belongs | found, count)):
        pass
    belongs |= found
    for number in range(count):
        _check_single(_parameters_of(flows[number], belongs) | 1 << number, division)
    for word in found.values():
        _check_single(word, division)
    return tuple(word.bit_length() - 1 if word else None for word in found.values())


def _next_values(flows: Sequence[int], belongs: dict[int, int], first: int) -> dict[int, int]:
    """Return the parameters on which each leaf of the state, or its next value, depends."""
    return {
        first + number: _parameters_of(flow, belongs) | belongs.get(first + number, 0)
        for number, flow in enumerate(flows)
    }


def _parameters_of(inputs: int, belongs: dict[int, int]) -> int:
    """Return the parameters, as bits, to which some of a program's inputs belong."""
    return reduce(or_, (belongs.get(number, 0) for number in _bits(inputs)), 0)


def _bits(word: int) -> Iterator[int]:
    while word:
        lowest = word & -word
        yield lowest.bit_length() - 1
        word ^= lowest


def _check_single(parameters: int, division: Division) -> None:
    if parameters & (parameters - 1):
        marked = jax.tree.unflatten(division.params, range(len(division.owners)))
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(marked)]
        first, second, *_ = _bits(parameters)
        raise refusal(f"its update of {paths[second]} depends on {paths[first]}")


def refusal(why: str) -> TypeError:
    """Return what is raised for a transformation that cannot be sharded."""
    return TypeError(
        f"DistributedOptimizer: this transformation cannot be sharded: {why}, but every leaf must "
        "be updated from its own gradient and state; put what looks at all gradients before it, "
        "after a reduction: optax.chain(all_reduce(), optax.clip_by_global_norm(1.0), "
        "DistributedOptimizer(adam, shard=True)), or pass shard=False"
    )


def _flows(jaxpr: Any, inputs: Sequence[int] | None = None) -> list[int]:
    """Return on which inputs each output of a program depends, as bits."""
    words = [1 << n for n in range(len(jaxpr.invars))] if inputs is None else inputs
    known = dict(zip(jaxpr.invars, words, strict=True))

    def word(atom: Any) -> int:
        return 0 if hasattr(atom, "val") else known.get(atom, 0)

    for equation in jaxpr.eqns:
        flows = _flows_through(equation, [word(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, flows, strict=True))
    return [word(atom) for atom in jaxpr.outvars]


def _flows_through(equation: Any, words: Sequence[int]) -> list[int]:
    inner = equation.params.get("jaxpr")
    if equation.primitive.name in {"jit", "pjit", "closed_call"} and inner is not None:
        return _flows(inner.jaxpr, words)
    rule = partial_eval.dce_rules.get(equation.primitive)
    count = len(equation.outvars)
    if rule is None or count == 1:
        return [reduce(or_, words, 0)] * count
    flows = []
    for number in range(count):
        used, _ = rule([other == number for other in range(count)], equation)
        flows.append(reduce(or_, (w for w, is_used in zip(words, used, strict=True) if is_used), 0))
    return flows
