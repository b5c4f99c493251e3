"""The primitive of JAX that makes calls: staged, compiled, differentiated and batched.

Its effect is ordered. So JAX passes a token from call to call, through loops and branches and from
one program to the next, and each call of a compiled program waits for the one before it, whatever
XLA schedules.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import effects
from jax._src.core import abstract_token
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir

import arraycomm as ac
from arraycomm.adapters.jax._callbacks import PYTHON, Callback
from arraycomm.adapters.jax._errors import unwrap
from arraycomm.adapters.jax._tokens import keep
from arraycomm.adapters.jax._tracing import refuse_repetition


class Call(abc.ABC):
    """One rank's part in a call. Equal ones do the same."""

    # Of the function that the user calls.
    name: ClassVar[str]
    # Where the batch axis of `jax.vmap` goes in the arguments, and where the results have it.
    batched_axis: ClassVar[int] = 0
    result_axis: ClassVar[int] = 0
    # Whether each result may be written over its argument.
    in_place: ClassVar[bool] = False
    # Whether other ranks take part, so that it has a place in the program.
    communicates: ClassVar[bool] = True
    # How many of the arguments, the last ones, are read beside those that have results.
    beside: int = 0

    def alone(self) -> Call:
        """Return the call without the arguments beside the others: that of tangents."""
        return self

    def results(self, arrays: Sequence[Any], size: int) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the results, from those of the arguments."""
        return []

    def over(self, comm: ac.Communicator) -> Any:
        """Return over what the call is made; may be collective when `comm` is first used."""
        return comm

    @abc.abstractmethod
    def make(
        self, over: Any, place: int, arrays: Sequence[Any], outs: Sequence[Any]
    ) -> Sequence[Any]:
        """Make the call at a place of a program, 0 for none; return the results.

        One that is an array of `outs` is where a program wants it; others are copied there.
        """

    def is_identity(self, comm: ac.Communicator) -> bool:
        """Return whether this rank's results are its arguments, and no other rank takes part."""
        return False

    def pull_back(self, cotangents: Sequence[Any], comm: ac.Communicator) -> Sequence[Any]:
        """Apply the transpose, which takes gradients of the results to those of the arguments."""
        raise NotImplementedError

    def check_differentiable(self) -> None:
        """Raise if it has no derivatives."""


class _InProgramOrder(effects.Effect):
    """The effect of a call."""

    def __repr__(self) -> str:
        return "a collective of arraycomm"


_effect: Final = _InProgramOrder()
for _kinds in (
    effects.ordered_effects,
    # So that it is refused by name.
    effects.shardable_ordered_effects,
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _kinds.add_type(_InProgramOrder)
_token: Final = keep(_effect)
unwrap(_token.clear)

call_p: Final = Primitive("arraycomm")
call_p.multiple_results = True


def bind(call: Call, arrays: Sequence[Any], comm: ac.Communicator) -> list[Any]:
    """Make a call, or stage it."""
    made: list[Any] = call_p.bind(*arrays, call=call, comm=comm)
    return made


def _make_eagerly(*arrays: Any, call: Call, comm: ac.Communicator) -> list[Any]:
    """Make a call once the programs that were dispatched before it have made theirs."""
    refuse_repetition(call.name)
    jax.effects_barrier()
    return list(call.make(call.over(comm), 0, arrays, [None] * len(arrays)))


def _stage(
    *arrays: Any, call: Call, comm: ac.Communicator
) -> tuple[list[ShapedArray], set[effects.Effect]]:
    _refuse_shards(call.name)
    made = call.results(arrays, comm.size)
    return [ShapedArray(x.shape, x.dtype, weak_type=x.weak_type) for x in made], {_effect}


def _refuse_shards(name: str) -> None:
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise TypeError(
            f"{name}: a collective of arraycomm cannot be called inside jax.shard_map, since it is "
            "over processes, each with one part; call it outside, or use jax.lax.psum there"
        )


call_p.def_impl(_make_eagerly)
call_p.def_effectful_abstract_eval(_stage)


# Compiled -----------------------------------------------------------------------------------------


def _lower(
    ctx: mlir.LoweringRuleContext, *arrays: Any, call: Call, comm: ac.Communicator
) -> Sequence[Any]:
    module = ctx.module_context
    check_compiled(call.name, comm, module.platforms)
    _check_lowering(call.name, module)
    place = 1 + sum(
        isinstance(other, Callback) and other.takes_place(comm) for other in module.host_callbacks
    )
    # Added also if it is not called: ranks count the calls of their programs alike.
    make = partial(call.make, call.over(comm), place)
    callback = Callback(_token, comm if call.communicates else None, make, len(ctx.avals_in))
    module.add_host_callback(callback)
    module.add_keepalive(callback)
    if call.is_identity(comm):
        ctx.set_tokens_out(ctx.tokens_in)
        return arrays
    lowered = jax.ffi.build_ffi_lowering_function(
        PYTHON,
        has_side_effect=True,
        operand_output_aliases=_aliases(arrays[: len(ctx.avals_out)]) if call.in_place else {},
    )
    made = lowered(
        ctx.replace(
            # Not in the same order: where the results of a call are all that a loop carries, XLA
            # takes what stands at the same place of both for something that no turn changes.
            avals_in=[abstract_token, *ctx.avals_in],
            avals_out=[*ctx.avals_out, abstract_token],
        ),
        ctx.tokens_in.get(_effect),
        *arrays,
        index=np.uint64(len(module.host_callbacks) - 1),
    )
    *results, token = made.results
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({_effect: token})))
    return results


def _aliases(arrays: Sequence[Any]) -> dict[int, int]:
    """Return which result takes the place of which argument; the first argument is a token."""
    return {1 + number: number for number, x in enumerate(arrays) if not _stays_the_callers(x)}


def _stays_the_callers(x: Any) -> bool:
    """Return whether a value is an argument that was not donated: XLA would copy it first."""
    if not isinstance(x, ir.BlockArgument):
        return False
    function: Any = x.owner.owner
    if "arg_attrs" not in function.attributes or function.attributes["sym_name"].value != "main":
        return False
    about = function.attributes["arg_attrs"][x.arg_number]
    return not any(name in about for name in ("jax.buffer_donor", "tf.aliasing_output"))


def check_compiled(name: str, comm: ac.Communicator, platforms: Sequence[str]) -> None:
    """Raise if a compiled program cannot make calls over this communicator, or on this platform."""
    if comm.backend == "threads":
        raise ac.BackendUnavailableError(
            f"{name}: jitted JAX collectives need a process a rank; run the program under mpiexec"
        )
    if tuple(platforms) != ("cpu",):
        raise ac.BackendUnavailableError(
            f"{name}: jitted JAX collectives work on the CPU backend; got {', '.join(platforms)}. "
            "Call it outside jax.jit, or set JAX_PLATFORMS=cpu"
        )


def _check_lowering(name: str, module: mlir.ModuleContext) -> None:
    if module.lowering_parameters.for_export:
        raise TypeError(
            f"{name}: a program with a collective of arraycomm cannot be exported, since it "
            "belongs to the ranks of this job; export what stands between the calls"
        )
    placed: Any = module.axis_context
    devices = placed.mesh.size if hasattr(placed, "mesh") else placed.num_devices
    if devices > 1:
        raise TypeError(
            f"{name}: a program with a collective of arraycomm runs on one device of each rank; "
            f"this one is for {devices}. Put the arrays on one device, or call it outside of the "
            "program for one part after the other"
        )


# Not cached, since each call has its own place in the program.
mlir.register_lowering(call_p, _lower, cacheable=False)


# Differentiated and batched -----------------------------------------------------------------------


def _push_forward(
    primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, comm: ac.Communicator
) -> tuple[list[Any], list[Any]]:
    results = bind(call, primals, comm)
    tangents = tangents[: len(tangents) - call.beside]
    if all(isinstance(tangent, ad.Zero) for tangent in tangents):
        zero = ad.Zero.from_primal_value  # type: ignore[attr-defined]
        return results, [zero(y) for y in results]
    call.check_differentiable()
    made = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return results, bind(call.alone(), made, comm)


def _pull_back(cotangents: Sequence[Any], *_: Any, call: Call, comm: ac.Communicator) -> list[Any]:
    # The transpose of what is not linear is asked for by jax.linear_transpose alone.
    call.check_differentiable()
    return list(call.pull_back([ad.instantiate_zeros(given) for given in cotangents], comm))


def _batch(
    arrays: Sequence[Any], axes: Sequence[Any], *, call: Call, comm: ac.Communicator
) -> tuple[list[Any], list[Any]]:
    moved = [
        array if axis is None else jnp.moveaxis(array, axis, call.batched_axis)
        for array, axis in zip(arrays, axes, strict=True)
    ]
    results = bind(call, moved, comm)
    # Some have no results.
    batched = [
        None if axis is None else call.result_axis for axis, _ in zip(axes, results, strict=False)
    ]
    return results, batched


ad.primitive_jvps[call_p] = _push_forward
ad.primitive_transposes[call_p] = _pull_back
batching.primitive_batchers[call_p] = _batch
