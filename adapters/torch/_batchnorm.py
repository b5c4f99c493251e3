"""Batch norm over the batches of all ranks together."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

import arraycomm as ac
from arraycomm._entries import entry
from arraycomm._training.gradients import registry_of
from arraycomm.adapters.torch._agreement import CallState, agree, raise_on_all
from arraycomm.adapters.torch._collectives import gathering, outside_graphs, record


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance are those of all ranks' batches together.

    In training, output and gradients are those of one process with the whole batch, whatever part
    of it each rank has; a rank may have none. In evaluation, a module with running statistics is
    the same as `torch.nn.BatchNorm2d`, and does not communicate.

    Parameters
    ----------
    num_features : int
        The number of channels, C.
    eps, momentum, affine, track_running_stats, device, dtype
        As for `torch.nn.BatchNorm2d`, with the same parameters, buffers and state dict.
    comm : Communicator, optional
        `world()` of the time of the call by default. A copy of the module has the same one.

    Notes
    -----
    The input is a tensor of shape (N, C) or (N, C, *S), of floats; N and S may differ between
    ranks, and N may be 0. Floats of 16 bits are averaged in float32. In training every rank makes
    the call, and raises `ValueError` if there are fewer than two elements of a channel on all ranks
    together.

    Each call gathers the mean and the variance of each channel, 2·C numbers of every rank, and its
    backward pass reduces as many; before both, the ranks agree in one small step. All of it can be
    differentiated again. The gradients of `weight` and `bias` are those of this rank's elements: a
    distributed optimizer reduces them, as those of other parameters.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        comm: ac.Communicator | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.comm = comm

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - named as by torch
        """Return the normalized input, of its shape, dtype and memory format."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        mean, variance = self._statistics(input)
        shape = (1, -1, *(1,) * (input.ndim - 2))
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        normalized = (input.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        if self.bias is not None:
            normalized = normalized + self.bias.view(shape)
        return normalized.to(input.dtype)

    @outside_graphs
    @entry
    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and variance of each channel, and update the running ones."""
        comm = self.comm or ac.world()
        self._check_input(x, comm)
        if any(each.virtual is not None for each in registry_of(comm).optimizers.values()):
            raise_on_all(
                comm,
                TypeError(
                    "SyncBatchNorm: with virtual_ranks mean and variance would be those of the "
                    "ranks of one round, and depend on their number; use a norm of each example, "
                    "such as torch.nn.GroupNorm"
                ),
            )
        mean, variance, count = statistics(x, comm)
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._track(mean.detach(), variance.detach() * (count / (count - 1)))
        return mean, variance

    def _check_input(self, x: Any, comm: ac.Communicator) -> None:
        if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
            kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise_on_all(
                comm, TypeError(f"SyncBatchNorm: input must be a tensor of floats; got {kind}")
            )
        if x.ndim < 2 or x.shape[1] != self.num_features:
            rule = f"SyncBatchNorm: input must have the shape (N, {self.num_features}, ...)"
            raise_on_all(comm, ValueError(f"{rule}; got {tuple(x.shape)}"))

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        momentum = self.momentum or 0.0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        self.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        self.running_var.mul_(1 - momentum).add_(variance, alpha=momentum)

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.ndim < 2:
            raise ValueError(f"SyncBatchNorm: input must have 2 dimensions or more; got {x.ndim}")

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        memo[id(self.comm)] = self.comm
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.comm is not None:
            raise TypeError(
                "SyncBatchNorm: a module with a communicator of its own cannot be pickled; save "
                "its state_dict(), or make it without comm, so that it uses world()"
            )
        return vars(self)


def statistics(x: torch.Tensor, comm: ac.Communicator) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return mean and variance of each channel over all ranks, and its number of elements there.

    The parts are put together as in Chan, Golub, LeVeque: Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances, 1979.
    """
    try:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own = _own_statistics(wide)
    except Exception as error:
        # A layout that torch has no statistics for, or no memory.
        raise_on_all(comm, error)
    states = agree(comm, "SyncBatchNorm", CallState.of(own, elements=_elements(x)))
    counts = [state.elements for state in states]
    count = sum(counts)
    if count < 2:
        raise ValueError(
            "SyncBatchNorm: training needs 2 elements of each channel or more on all ranks "
            f"together; got {count}, and the shape {tuple(x.shape)} here"
        )
    means, variances = record(gathering(), own, comm, states).unbind(1)
    parts = torch.tensor(counts, dtype=wide.dtype, device=x.device)[:, None] / count
    mean = (parts * means).sum(0)
    variance = (parts * (variances + (means - mean).square())).sum(0)
    return mean, variance, count


def _elements(x: torch.Tensor) -> int:
    """Return the number of elements of each channel."""
    return math.prod((x.shape[0], *x.shape[2:]))


def _own_statistics(x: torch.Tensor) -> torch.Tensor:
    """Return mean and variance of each channel on this rank, as two rows."""
    axes = [0, *range(2, x.ndim)]
    if not _elements(x):
        return x.sum(axes).expand(2, -1)
    variance, mean = torch.var_mean(x, axes, correction=0)
    return torch.stack([mean, variance])


def convert_sync_batchnorm(
    module: torch.nn.Module, *, comm: ac.Communicator | None = None
) -> torch.nn.Module:
    """Make each `BatchNorm1d`, `2d` and `3d` of a module a `SyncBatchNorm`.

    Parameters
    ----------
    module : torch.nn.Module
        Changed in place: its batch norms get another class, and keep all else.
    comm : Communicator, optional
        That of the batch norms: `world()` of the time of their calls by default.

    Returns
    -------
    torch.nn.Module
        The module itself. Parameters, buffers, settings and hooks stay, so an optimizer made before
        still works. Nothing is communicated.

    Raises
    ------
    TypeError
        `module` is not a torch module. Or it has a batch norm that computes something else than
        torch's own: of a class derived from one, parametrized, or with a method replaced. Then
        nothing is changed.
    ValueError
        It has a lazy batch norm, whose number of channels is not known before its first call.

    Examples
    --------
    >>> layers = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)
    >>> model = convert_sync_batchnorm(torch.nn.Sequential(*layers))
    """
    _check_module(module)
    found = [(path, each) for path, each in module.named_modules() if _is_batchnorm(each)]
    for path, each in found:
        _check_plain(path or "module", each)
    for _, each in found:
        # In place, so that whoever holds or hooks it goes on with it.
        each.__class__ = SyncBatchNorm
        vars(each)["comm"] = comm
    return module


def _check_module(module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        kind = type(module).__name__
        raise TypeError(f"convert_sync_batchnorm: module must be a torch.nn.Module; got {kind}")
    for path, found in module.named_modules():
        if isinstance(found, _LAZY):
            raise ValueError(
                f"convert_sync_batchnorm: {path or 'module'} is a {type(found).__name__}, whose "
                "number of channels is not known yet; call the module once first"
            )


_PLAIN = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_LAZY = (torch.nn.LazyBatchNorm1d, torch.nn.LazyBatchNorm2d, torch.nn.LazyBatchNorm3d)
# What a class may have that computes as its base does.
_HARMLESS = {"__init__", "__doc__", "__module__", "__annotations__", "__annotate_func__"}
_HARMLESS |= {"__annotations_cache__", "__firstlineno__", "__static_attributes__", "__slotnames__"}


def _is_batchnorm(module: torch.nn.Module) -> bool:
    """Return whether a module is a batch norm of this rank alone: torch's own, or derived of one.

    Torch's further ones are synchronized by torch.distributed, or are quantized and do not train.
    """
    is_torchs = type(module).__module__.startswith("torch.") and not isinstance(module, _PLAIN)
    return isinstance(module, _BatchNorm) and not (is_torchs or isinstance(module, SyncBatchNorm))


def _check_plain(path: str, module: torch.nn.Module) -> None:
    """Raise unless a batch norm computes what torch's own does."""
    kind = type(module)
    if is_parametrized(module):
        raise TypeError(
            f"convert_sync_batchnorm: {path} is a {kind.__name__}, whose parametrizations would be "
            "lost; convert the model first, and then call torch.nn.utils.parametrize"
        )
    added = {key for each in kind.__mro__[: _place_of_plain(kind)] for key in vars(each)}
    if not issubclass(kind, _PLAIN) or added - _HARMLESS:
        raise TypeError(
            f"convert_sync_batchnorm: {path} is a {kind.__module__}.{kind.__qualname__}, which is "
            "more than a batch norm of torch, and would be lost. If its forward calls "
            "super().forward, derive it from arraycomm.adapters.torch.SyncBatchNorm; else put a "
            "torch.nn.BatchNorm2d and a module with the rest in its place, or convert the other "
            "parts of the model one by one"
        )
    replaced = [name for name, value in vars(module).items() if _is_method(kind, name, value)]
    if replaced:
        raise TypeError(
            f"convert_sync_batchnorm: {path} has a method of its own, {replaced[0]}, which would "
            f"go on as before; delete the attribute {replaced[0]} of {path} first"
        )


def _place_of_plain(kind: type) -> int:
    """Return how many classes come before torch's own."""
    return next((n for n, each in enumerate(kind.__mro__) if each in _PLAIN), 0)


def _is_method(kind: type, name: str, value: object) -> bool:
    """Return whether an attribute of an object takes the place of a method of its class."""
    return callable(value) and callable(getattr(kind, name, None))
