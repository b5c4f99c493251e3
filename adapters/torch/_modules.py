"""The module of an optimizer: names of parameters, and buffers that ranks compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from arraycomm._training.comparison.verification import BUFFER

_WRAPPERS: Final = (DataParallel, DistributedDataParallel)
# The tensors that a sparse one consists of.
_COMPRESSED: Final = {
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices")),
}


def check_has_parameters(optimizer: torch.optim.Optimizer, module: Any) -> None:
    """Raise unless a module has parameters of an optimizer."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module; got {type(module).__name__}")
    names = names_of(module)
    if not any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "module must be the one whose parameters the optimizer updates; got a "
            f"{type(module).__name__} that has none of them. Pass the module of which the "
            "optimizer was made, or torch.nn.ModuleList of several"
        )


def names_of(module: torch.nn.Module) -> dict[int, str]:
    """Return the names of a module's parameters, by their identities."""
    return {id(parameter): _clean(name) for name, parameter in module.named_parameters()}


def buffers_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the buffers of a module, but for those whose names it says to ignore, as to DDP."""
    ignored = set(map(_clean, getattr(module, "_ddp_params_and_buffers_to_ignore", ())))
    for name, buffer in module.named_buffers():
        if _clean(name) not in ignored and not torch.nn.parameter.is_lazy(buffer):
            yield from _parts(f"{BUFFER}{_clean(name)}", buffer)


def _parts(name: str, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return a buffer, or the parts of a sparse one."""
    if buffer.layout is torch.sparse_coo:
        whole = buffer.coalesce()
        yield from ((f"{name}, indices", whole.indices()), (f"{name}, values", whole.values()))
    elif buffer.layout in _COMPRESSED:
        parts = (*_COMPRESSED[buffer.layout], "values")
        yield from ((f"{name}, {part}", getattr(buffer, part)()) for part in parts)
    elif not buffer.is_meta:
        yield name, buffer


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of torch's wrappers."""
    inner: Any = module
    while (further := getattr(inner, "_orig_mod", None)) is not None or isinstance(
        inner, _WRAPPERS
    ):
        inner = inner.module if further is None else further
    found: torch.nn.Module = inner
    return found


def _clean(name: str) -> str:
    """Return a name without what `torch.compile` adds."""
    return name.replace("_orig_mod.", "")
