"""Sums of sparse tensors, such as gradients of embeddings: each rank brings its own elements."""

from __future__ import annotations

from typing import Any

import torch

import arraycomm as ac


def sum_sparse(comm: ac.Communicator, tensor: torch.Tensor, op: str, limit: dict[str, Any]) -> None:
    """Sum a sparse tensor over all ranks, in place. Sends every rank's elements to every rank."""
    if op != "sum":
        raise TypeError(f"all_reduce: sparse tensors have only sums; got {op!r}")
    with torch.no_grad():
        own = tensor.detach().coalesce()
        where = comm.allgatherv(own.indices().T.contiguous(), **limit)
        values = comm.allgatherv(own.values(), **limit)
        tensor.copy_(torch.sparse_coo_tensor(where.T, values, tensor.shape).coalesce())
