"""`ErrorFeedback`: gradients sent as 16 bits; what rounding loses is added to the next step's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from array_api_compat import array_namespace, is_jax_array

from arraycomm._arrays.exchange import exchange
from arraycomm._arrays.frameworks.jax import rounded_by_jax
from arraycomm._communicator import Communicator
from arraycomm._training.compressed.compression import Compression, allreduce_together
from arraycomm._trees.reduce import COMPRESSIONS, check_compression

_COMPRESSED: Final = ("float32", "float64")


class ErrorFeedback(Compression):
    """Gradients are sent as 16 bits, and what rounding loses is added to the next step's gradients.

    So no part of a gradient is lost for good, however small it is beside the rest: after any number
    of steps, the sum of what this rank has sent is the sum of its gradients, up to what one
    rounding loses.

    Parameters
    ----------
    dtype : str
        "bfloat16" or "float16".

    Attributes
    ----------
    dtype : str
        As passed.

    Notes
    -----
    Messages, buckets and their overlap with the backward pass are those of `compression=dtype`.
    Each rank keeps what its rounding has lost, the *residual*: an array of the parameter's shape
    and dtype, for each parameter of float32 or float64. Other gradients are sent as they are.

    The reduced gradients are rounded to 16 bits once more, as with `compression=dtype`. This is not
    fed back.

    If a gradient or what is sent is infinite or NaN, its residual becomes zero. If a `GradScaler`
    changes its scale, the residuals of the step before are still of the old one.

    It works under `jax.jit`, and is refused inside `join`, in which gradients are weighted before
    they are rounded.

    Examples
    --------
    A gradient of 1 + 2⁻¹⁰ needs more bits than bfloat16 has. Four steps send 1, 1, 1 and 1 + 2⁻⁷,
    of which 3·2⁻¹⁰ are still to be subtracted.

    >>> import numpy as np
    >>> import arraycomm as ac
    >>> feedback = ac.ErrorFeedback("bfloat16")
    >>> gradient = np.full(1, 1 + 2**-10)
    >>> residual = feedback.init(gradient)
    >>> for _ in range(4):
    ...     sent, residual = feedback.compress(gradient, residual)
    ...     print((sent - 1).item() * 2**10, residual.item() * 2**10)
    0.0 1.0
    0.0 2.0
    0.0 3.0
    0.0 4.0
    >>> sent, residual = feedback.compress(gradient, residual)
    >>> print((sent - 1).item() * 2**10, residual.item() * 2**10)
    8.0 -3.0
    """

    def __init__(self, dtype: str) -> None:
        if dtype is None:
            raise ValueError('ErrorFeedback: dtype must be "bfloat16" or "float16"; got None')
        try:
            check_compression(dtype)
        except ValueError:
            raise ValueError(
                f'ErrorFeedback: dtype must be "bfloat16" or "float16"; got {dtype!r}'
            ) from None
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"ErrorFeedback({self.dtype!r})"

    def init(self, gradient: Any) -> Any:
        """Return a residual of zeros, or None for a gradient that is sent as it is.

        Parameters
        ----------
        gradient : array
            Of the parameter's shape and dtype.
        """
        return array_namespace(gradient).zeros_like(gradient) if _is_compressed(gradient) else None

    def compress(self, gradient: Any, state: Any) -> tuple[Any, Any]:
        """Return the gradient with the residual added, rounded to 16 bits, and the new residual.

        Parameters
        ----------
        gradient : array
            This rank's.
        state : array or None
            The residual.

        Returns
        -------
        sent : array
            Of the gradient's own dtype.
        state : array or None
            What the rounding has lost.
        """
        if state is None or not _is_compressed(gradient):
            # An optax state is made of parameters, whose gradients may be of fewer bits.
            return gradient, state
        xp = array_namespace(gradient)
        with np.errstate(all="ignore"):
            total = xp.asarray(gradient + state)
            sent = _rounded(total, self.dtype)
            lost = total - sent
        return sent, xp.where(xp.isfinite(lost), lost, xp.zeros_like(lost))

    def reduce(
        self, gradients: Sequence[Any], states: Sequence[Any], op: str, comm: Communicator
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Reduce what `compress` returns, sent as 16 bits; see `Compression.reduce`."""
        pairs = list(map(self.compress, gradients, states))
        reduced = allreduce_together([sent for sent, _ in pairs], op, comm, self.dtype)
        return reduced, [state for _, state in pairs]


def _is_compressed(gradient: Any) -> bool:
    return str(gradient.dtype).rpartition(".")[2] in _COMPRESSED


def _rounded(x: Any, name: str) -> Any:
    """Return an array rounded to 16 bits, in its own dtype."""
    if is_jax_array(x):
        return rounded_by_jax(x, name)
    xp = array_namespace(x)
    dtype = None if isinstance(x, np.ndarray) else getattr(xp, name, None)
    if dtype is not None:
        return xp.astype(xp.astype(x, dtype), x.dtype)
    # NumPy has only one of the two by itself, and other namespaces may have none.
    array = np.asarray(exchange(x, "numpy"))
    return exchange(array.astype(COMPRESSIONS[name]).astype(array.dtype), x)
