"""`Compression`: how an optimizer's gradients are reduced if not as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from array_api_compat import array_namespace

from arraycomm._communicator import Communicator, runner_of, trees_of
from arraycomm._trees.reduce import DEFAULT_BUCKET_BYTES, AllreduceGradients, check_compression


class Compression:
    """How the gradients of a `DistributedOptimizer` are reduced: the base class of one's own.

    Pass an object of a subclass as `compression=`. A subclass overrides `compress` and
    `decompress`, if each gradient is sent in another form, or `reduce`, if it makes collectives of
    its own. `init` is for what is remembered from step to step, such as a residual.

    Gradients are arrays of the program's own framework, on their device. They are the means over
    the steps of `accumulate`. The methods must not write to them.

    What is remembered, the *state*, is kept for each optimizer and parameter, not in this object.
    It is None, or a pytree of arrays. It is replaced only once a reduction has succeeded on all
    ranks. If the shape or dtype of a gradient changes, `init` is called again. A copy of an
    optimizer gets a copy of the state.

    Notes
    -----
    When an optimizer is made, the ranks compare the class and the attributes of their objects, and
    raise `MismatchError` if these differ. So all settings belong in attributes, and stay the same.

    An exception in a method raises on all ranks: the exception itself on its rank, `PeerError` on
    the others. The gradients then stay this rank's own. Results that differ between ranks raise
    `MismatchError`, unless the communicator was made with `check=False`. Each reduction costs three
    small steps of all ranks, and one pass over the results on the host.

    With torch, the methods are called at the end of a backward pass, with all gradients at once. A
    gradient that is missing on some ranks is zeros there; with other frameworks it raises
    `MismatchError`. Inside `join`, and under `jax.jit`, an object of one's own is refused.

    Examples
    --------
    >>> import numpy as np
    >>> import arraycomm as ac
    >>> from arraycomm.testing import run
    >>> class Scaled(ac.Compression):
    ...     def __init__(self, scale):
    ...         self.scale = scale
    ...
    ...     def compress(self, gradient, state):
    ...         return (gradient * self.scale).astype(np.float16), state
    ...
    ...     def decompress(self, reduced, gradient):
    ...         return reduced.astype(gradient.dtype) / self.scale
    >>> class SGD:
    ...     def update(self, params, grads):
    ...         return params - grads
    >>> def train(comm):
    ...     optimizer = ac.DistributedOptimizer(SGD(), comm=comm, compression=Scaled(1024))
    ...     return optimizer.update(np.zeros(1), np.full(1, 2.0**-12 * comm.rank)).item() * 2**12
    >>> run(3, train)
    [-1.0, -1.0, -1.0]
    """

    def init(self, gradient: Any) -> Any:
        """Return what is remembered of a parameter before its first reduction.

        Parameters
        ----------
        gradient : array
            Of the parameter's shape and dtype. Its values do not count.

        Returns
        -------
        pytree of arrays, or None
            None by default.
        """
        return None

    def compress(self, gradient: Any, state: Any) -> tuple[Any, Any]:
        """Return what is sent for one gradient, and the new state.

        Parameters
        ----------
        gradient : array
            This rank's.
        state : pytree of arrays, or None
            Of this parameter.

        Returns
        -------
        sent : array
            Of the same shape and dtype on all ranks. It is reduced as a gradient is: floats of 16
            and 8 bits are added in float32, and rounded once.
        state : pytree of arrays, or None
            The new state.
        """
        return gradient, state

    def decompress(self, reduced: Any, gradient: Any) -> Any:
        """Return a reduced gradient in the form of gradients.

        Parameters
        ----------
        reduced : array
            The reduction of what all ranks sent.
        gradient : array
            This rank's, for its shape and dtype. A result that depends on its values differs
            between ranks.

        Returns
        -------
        array
            Of the gradient's shape and dtype; by default `reduced` in this dtype.
        """
        return array_namespace(reduced).astype(reduced, gradient.dtype)

    def reduce(
        self, gradients: Sequence[Any], states: Sequence[Any], op: str, comm: Communicator
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Reduce a step's gradients over all ranks; by default, what `compress` returns of each.

        Parameters
        ----------
        gradients : sequence of array
            This rank's. All ranks have the same number of them.
        states : sequence of pytree or None
            The state of each.
        op : str
            "mean" or "sum".
        comm : Communicator
            The optimizer's own, for collectives. `allreduce_gradients(list, op, comm=comm)` sends
            several arrays as few messages.

        Returns
        -------
        reduced : sequence of array
            Of the gradients' shapes and dtypes, the same bits on all ranks.
        states : sequence of pytree or None
            The new states.
        """
        pairs = list(map(self.compress, gradients, states))
        reduced = allreduce_together([sent for sent, _ in pairs], op, comm)
        return list(map(self.decompress, reduced, gradients)), [state for _, state in pairs]


def allreduce_together(
    tree: Any, op: str, comm: Communicator, compression: str | None = None
) -> Any:
    """Reduce a tree as `allreduce_gradients` does."""
    return runner_of(comm).call(
        AllreduceGradients, trees_of(comm), tree, op, DEFAULT_BUCKET_BYTES, compression
    )


def check_argument(compression: object) -> None:
    """Raise unless `compression` is what an optimizer takes."""
    if isinstance(compression, Compression):
        return
    if isinstance(compression, type) and issubclass(compression, Compression):
        raise TypeError(
            f"compression must be an object, not a class; got {compression.__qualname__}; "
            f"pass {compression.__qualname__}(...)"
        )
    try:
        check_compression(compression)
    except ValueError as error:
        raise ValueError(f"{error}; an object must be an arraycomm.Compression") from None


def described(compression: object) -> str:
    """Return what the ranks compare: a name, or a class with its settings."""
    if not isinstance(compression, Compression):
        return str(compression)
    kind = type(compression)
    settings = (f"{name}={_without_address(value)}" for name, value in _settings_of(compression))
    return f"{kind.__module__}.{kind.__qualname__}({', '.join(settings)})"


def _settings_of(compression: Compression) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object in the order of their names, also those in slots."""
    slots = [name for kind in type(compression).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in sorted({*getattr(compression, "__dict__", {}), *slots}):
        if hasattr(compression, name):
            yield name, getattr(compression, name)


def _without_address(value: object) -> str:
    """Return the `repr` of a setting, the same in every process."""
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_without_address, value)))}}}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
