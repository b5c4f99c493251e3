"""`DistributedOptimizer`: the adapter that fits the optimizer."""

from __future__ import annotations

from typing import Any

from arraycomm._adapters import adapter_of
from arraycomm._communicator import Communicator
from arraycomm._groups import dup
from arraycomm._runtime import world
from arraycomm._trees import DEFAULT_BUCKET_BYTES


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    *,
    comm: Communicator | None = None,
    op: str = "mean",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
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

    Returns
    -------
    optimizer
        Of the same kind. With torch, a closure's gradients and loss are reduced at each of its
        evaluations; learning-rate schedulers and state dicts work as before.

    Raises
    ------
    ValueError
        The optimizer is distributed already, or an argument has no such value.
    TypeError
        `optimizer` is none of these.

    Notes
    -----
    Collective: every rank makes its optimizer, which may be of another framework, and then every
    step. The optimizer works on a duplicate of `comm`, so that its order does not depend on other
    calls. A parameter without a gradient on some ranks counts as zeros there.
    """
    group = comm or world()

    def check() -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f'DistributedOptimizer: op must be "mean" or "sum"; got {op!r}')
        if bucket_bytes < 1:
            raise ValueError(
                f"DistributedOptimizer: bucket_bytes must be positive; got {bucket_bytes}"
            )
        adapter_of(optimizer).check(optimizer)

    private = dup(group, {}, check)
    return adapter_of(optimizer).distribute(optimizer, private, op, bucket_bytes)
