"""`Compression`: in which form an optimizer's gradients are sent, if not as they are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from array_api_compat import array_namespace, is_array_api_obj

from arraycomm._trees.reduce import check_compression

_RECIPE: Final = "see the recipe 'Error feedback' in docs/recipes.md"


class Compression:
    """The form in which the gradients of a `DistributedOptimizer` are sent: a base class.

    Pass an object of a subclass as `compression=`. Gradients are arrays of the program's own
    framework, on their device, and the means over the steps of `accumulate`. The methods must not
    write to them, nor later to what they have returned.

    Notes
    -----
    When an optimizer is made, the ranks compare the class and the attributes of their objects, and
    raise `MismatchError` if these differ. So all settings belong in attributes, and stay the same.

    An exception in `compress` raises on all ranks: the exception itself on its rank, `PeerError` on
    the others. One in `decompress` raises on its rank, and as `PeerError` in the others' next call.
    Inside `join` an object is refused.

    Buckets and their overlap with a backward pass of torch are as without compression, and under
    `jax.jit` the methods are traced. With torch, a gradient that is missing on some ranks counts
    there as zeros of what is sent; with other frameworks it raises `MismatchError`.

    Nothing is remembered from step to step, and there is one reduction of all gradients. What needs
    more, such as error feedback, is written around `allreduce_gradients`.

    Examples
    --------
    >>> import numpy as np
    >>> import arraycomm as ac
    >>> from arraycomm.testing import run
    >>> class Scaled(ac.Compression):
    ...     def __init__(self, scale):
    ...         self.scale = scale
    ...
    ...     def compress(self, gradient):
    ...         return (gradient * self.scale).astype(np.float16)
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

    def compress(self, gradient: Any) -> Any:
        """Return what is sent for one gradient.

        Parameters
        ----------
        gradient : array
            This rank's.

        Returns
        -------
        array
            Of the same shape and dtype on all ranks. It is reduced as a gradient is: floats of 16
            and 8 bits are added in float32, and rounded once.
        """
        return gradient

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


def sent(compression: Compression, gradients: Sequence[Any], paths: Sequence[str]) -> list[Any]:
    """Return what is sent for gradients, None for None; raise unless all are arrays."""
    name, made = type(compression).__name__, []
    for gradient, path in zip(gradients, paths, strict=True):
        if gradient is not None and not is_array_api_obj(gradient):
            raise TypeError(
                f"DistributedOptimizer: {name} takes gradients that are arrays; {path} is "
                f'{_said(gradient)}; pass an array, or compression="bfloat16"'
            )
        one = None if gradient is None else compression.compress(gradient)
        # None would be taken for a gradient that is missing.
        if gradient is not None and not is_array_api_obj(one):
            raise TypeError(
                f"DistributedOptimizer: {name}.compress must return arrays; got {_said(one)} for "
                f"{path}"
            )
        made.append(one)
    return made


def received(
    compression: Compression, reduced: Sequence[Any], gradients: Sequence[Any], paths: Sequence[str]
) -> list[Any]:
    """Return reduced gradients in the form of these; raise unless they are like them."""
    made = []
    for one, like, path in zip(reduced, gradients, paths, strict=True):
        got = None if one is None else compression.decompress(one, like)
        if one is not None and _form(got) != _form(like):
            raise TypeError(
                f"DistributedOptimizer: {type(compression).__name__}.decompress must return arrays "
                f"like the gradients; got {_said(got)} for {path}, {_said(like)}"
            )
        made.append(got)
    return made


def _form(x: Any) -> object:
    """Return what a result has to have in common with a gradient, or None for what is no array."""
    if not is_array_api_obj(x):
        return None
    return type(x).__module__.partition(".")[0], x.dtype, tuple(x.shape)


def _said(x: Any) -> str:
    framework = type(x).__module__.partition(".")[0]
    name = f"{framework}.{type(x).__qualname__}"
    return f"{name} of {x.dtype} {tuple(x.shape)}" if is_array_api_obj(x) else name


# The argument of an optimizer -------------------------------------------------------------------


def check_argument(compression: object) -> None:
    """Raise unless `compression` is what an optimizer takes."""
    if isinstance(compression, Compression):
        _check_removed(compression)
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


def _check_removed(compression: Compression) -> None:
    """Raise for a class written for an earlier version, whose states or collectives are gone."""
    name = type(compression).__qualname__
    for method, what in (("reduce", "collectives"), ("init", "states")):
        if hasattr(compression, method):
            raise TypeError(
                f"compression: {name}.{method} is not called, since {what} of a Compression were "
                f"removed; {_RECIPE}"
            )
    try:
        inspect.signature(compression.compress).bind(None)
    except TypeError:
        raise TypeError(
            f"compression: {name}.compress must take the gradient alone and return what is sent, "
            f"since states of a Compression were removed; {_RECIPE}"
        ) from None


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
