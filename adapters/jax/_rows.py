"""Loops and branches under `jax.vmap`, of which each row takes its own turns.

JAX lets all rows turn until the last has finished, and take all branches, and selects afterwards;
but it selects nothing in loops whose condition makes ordered calls. So loops with calls are written
out here. The other ranks' rows take part in each call, so that all ranks have to select alike: they
compare what the rows have chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax._src import core
from jax._src.lax.control_flow.conditionals import cond_p
from jax._src.lax.control_flow.loops import _while_lowering as lower_any_loop
from jax._src.lax.control_flow.loops import while_p
from jax.interpreters import batching, mlir

import arraycomm as ac
from arraycomm._training.programs import ProgramCalls, calls_of
from arraycomm.adapters.jax._callbacks import are_alike
from arraycomm.adapters.jax._primitive import Call, bind, call_p


@dataclass(frozen=True)
class _SameChoices(Call):
    """Raises on all ranks unless the rows of a batch choose alike on all of them."""

    what: str
    name = "vmap"

    def over(self, comm: ac.Communicator) -> ProgramCalls:
        return calls_of(comm)

    def make(
        self, over: ProgramCalls, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> list[Any]:
        with over.at(place):
            alike = are_alike(arrays, over.comm)
        if not alike:
            raise ac.MismatchError(
                f"vmap: {self.what} with a collective inside must be the same on every rank for "
                "each row, since all ranks have to make the same calls; they differ. Reduce what "
                "it depends on"
            )
        return []


def _compare(choices: Any, what: str, jaxprs: Sequence[Any]) -> None:
    for comm in dict.fromkeys(comm for jaxpr in jaxprs for comm in _comms_of(jaxpr.jaxpr)):
        bind(_SameChoices(what), [choices], comm)


def _comms_of(jaxpr: Any) -> Iterator[ac.Communicator]:
    """Find the communicators over which a traced program makes calls."""
    for equation in jaxpr.eqns:
        if equation.primitive is call_p and equation.params["call"].communicates:
            yield equation.params["comm"]
    for inner in core.subjaxprs(jaxpr):
        yield from _comms_of(inner)


def _lower_loop(ctx: mlir.LoweringRuleContext, *args: Any, **loop: Any) -> Any:
    parts = loop["cond_jaxpr"], loop["body_jaxpr"]
    takes_rows = bool(parts[0].out_avals[0].shape)
    if not takes_rows or not any(part.effects for part in parts):
        return lower_any_loop(ctx, *args, **loop)
    first, last = loop["cond_nconsts"], loop["cond_nconsts"] + loop["body_nconsts"]

    def written_out(*args: Any) -> Any:
        as_function: Any = core.jaxpr_as_fun
        cond, body = map(as_function, parts)

        def goes_on(carry: Sequence[Any]) -> Any:
            (going,) = cond(*args[:first], *carry)
            _compare(going, "the condition of a loop", parts)
            return going

        def turn(state: Any) -> Any:
            going, carry = state
            turned = body(*args[first:last], *carry)
            carry = [_select(going, new, old) for new, old in zip(turned, carry, strict=True)]
            return going & goes_on(carry), carry

        start = list(args[last:])
        return lax.while_loop(lambda state: jnp.any(state[0]), turn, (goes_on(start), start))[1]

    return mlir.lower_fun(written_out)(ctx, *args)


def _select(going: Any, new: Any, old: Any) -> Any:
    rows = lax.broadcast_in_dim(going, jnp.shape(new), range(going.ndim))
    return lax.select(rows, new, old)


def _batch_branches(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, branches: Any, **params: Any
) -> Any:
    if dims[0] is not None and "branches_platforms" not in params:
        _compare(args[0], "the condition of a branch", branches)
    return _batch_any_branches(axis_data, args, dims, branches=branches, **params)


_batch_any_branches = batching.fancy_primitive_batchers[cond_p]
mlir.register_lowering(while_p, _lower_loop)
batching.fancy_primitive_batchers[cond_p] = _batch_branches
