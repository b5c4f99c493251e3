"""`DistributedOptimizer`: the adapter that fits the optimizer."""

from __future__ import annotations

from typing import Any

from arraycomm._collectives.groups import dup
from arraycomm._communicator import Communicator
from arraycomm._session import world
from arraycomm._training.adapters import adapter_of
from arraycomm._training.gradients import Gradients
from arraycomm._trees.reduce import DEFAULT_BUCKET_BYTES, check_compression


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    *,
    comm: Communicator | None = None,
    op: str = "mean",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    accumulate: int = 1,
    compression: str | None = None,
) -> Any:
    """Make an optimizer reduce the gradients over all ranks before each of its steps.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer, optax.GradientTransformation, or object
        A torch optimizer is changed in place and returned. An optax transformation gives a new
        one, which works eagerly and under `jax.jit`. Any other object with a method
        `update(params, grads)` is wrapped.
    comm : Communicator, optional
        `world()` by default.
    op : str
        "mean" or "sum" of the ranks' gradients.
    bucket_bytes : int
        Gradients are fused into messages of about this many bytes.
    accumulate : int
        Gradients are averaged over this many steps on each rank before they are reduced. Parameters
        and the optimizer's state change in every step of that number only; the loop stays as it is,
        with gradients that are those of one step. Those of float16 and bfloat16 are added up in
        float32.
    compression : str, optional
        "bfloat16" or "float16": float32 and float64 gradients travel rounded to these 16 bits, are
        accumulated in float32, and come back in their own dtype. Beyond 65504 float16 is infinite.

    Returns
    -------
    optimizer
        Of the same kind. With torch, a closure's gradients and loss are reduced at each of its
        evaluations; learning-rate schedulers and state dicts work as before.

    Raises
    ------
    ValueError
        The optimizer is distributed already, or an argument has no such value. In a step: a closure
        was passed though gradients are accumulated.
    MismatchError
        The arguments differ between ranks.
    TypeError
        `optimizer` is none of these.

    Notes
    -----
    Collective: every rank makes its optimizer, which may be of another framework, and then every
    step. The optimizer works on a duplicate of `comm`, so that its order does not depend on other
    calls. A parameter without a gradient on some ranks counts as zeros there. Gradients that are
    accumulated but not yet reduced are no part of a torch optimizer's state dict; with optax they
    are part of the state.
    """
    group = comm or world()

    def check() -> str:
        if op not in ("mean", "sum"):
            raise ValueError(f'DistributedOptimizer: op must be "mean" or "sum"; got {op!r}')
        if bucket_bytes < 1:
            raise ValueError(
                f"DistributedOptimizer: bucket_bytes must be positive; got {bucket_bytes}"
            )
        if type(accumulate) is not int or accumulate < 1:
            raise ValueError(
                "DistributedOptimizer: accumulate must be a number of steps, 1 or more; got "
                f"{accumulate!r}"
            )
        check_compression(compression, "DistributedOptimizer")
        adapter_of(optimizer).check(optimizer)
        return f", DistributedOptimizer {op} {bucket_bytes} {accumulate} {compression}"

    private = dup(group, {}, check)
    private._joins_with = group
    gradients = Gradients(private, op, bucket_bytes, accumulate, compression)
    return adapter_of(optimizer).distribute(optimizer, gradients)
