"""What type checkers see of public calls; `make types` runs mypy and pyright on it, and no test."""

from __future__ import annotations

from typing import Any, assert_type

import jax
import numpy as np
import optax
import torch
from numpy.typing import NDArray

import arraycomm as ac
from arraycomm.testing import run

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
Floats = NDArray[np.float32]


def collectives(comm: ac.Communicator, x: Vector, t: torch.Tensor, j: jax.Array) -> None:
    assert_type(comm.allreduce(x), Vector)
    assert_type(comm.allreduce(t, "mean", out=t), torch.Tensor)
    assert_type(comm.allreduce(j, timeout=1.0), jax.Array)
    assert_type(comm.allreduce(3), int)
    assert_type(comm.allreduce(0.5, "max"), float)
    assert_type(comm.reduce(x), Vector | None)
    assert_type(comm.scan(t), torch.Tensor)
    assert_type(comm.exscan(t), torch.Tensor | None)
    assert_type(comm.alltoall(x), Vector)
    assert_type(comm.bcast(x if comm.rank == 0 else None), Vector)
    assert_type(comm.bcast(None, like=t), torch.Tensor)
    assert_type(comm.maxloc(x), tuple[Vector, Vector])
    assert_type(ac.fsum(x), Floats)
    assert_type(ac.fsum(t, axis=0), torch.Tensor)
    assert_type(ac.fsum(0.5), float)


def shapes(comm: ac.Communicator, x: Vector, t: torch.Tensor) -> None:
    # The number of dimensions changes.
    assert_type(comm.allgather(x), Floats)
    assert_type(comm.allgather(comm.rank), NDArray[Any])
    assert_type(comm.allgather(t), torch.Tensor)
    assert_type(comm.gather(x), Floats | None)
    assert_type(comm.scatter(x if comm.rank == 0 else None), Floats)
    assert_type(comm.scatter(None, like=t), torch.Tensor)
    assert_type(comm.reduce_scatter(x), Floats)
    assert_type(comm.reduce_scatter(t, counts=[1, 2]), torch.Tensor)


def uneven(comm: ac.Communicator, x: Vector, t: torch.Tensor) -> None:
    assert_type(comm.allgatherv(x), Vector)
    assert_type(comm.allgatherv(t, return_counts=True), tuple[torch.Tensor, list[int]])
    assert_type(comm.gatherv(t), torch.Tensor | None)
    assert_type(comm.gatherv(t, return_counts=True), tuple[torch.Tensor, list[int]] | None)
    assert_type(comm.alltoallv(x, [1, 2], return_counts=True), tuple[Vector, list[int]])
    assert_type(comm.scatterv(t, [1, 2]), torch.Tensor)


def messages(comm: ac.Communicator, x: Vector, t: torch.Tensor) -> None:
    assert_type(comm.recv(1), NDArray[Any])
    assert_type(comm.recv(1, like=t), torch.Tensor)
    assert_type(comm.sendrecv(t, 1, 2, out=t), torch.Tensor)
    assert_type(comm.iallreduce(t), ac.Request[torch.Tensor])
    assert_type(comm.iallreduce(t).wait(), torch.Tensor)
    assert_type(comm.irecv(1, out=x).wait(), Vector)
    assert_type(ac.waitall([comm.iallreduce(x), comm.ibcast(x)]), list[Vector])
    assert_type(ac.waitany([comm.iallreduce(x), comm.ibcast(x)]), tuple[int, Vector])
    assert_type(ac.testall([comm.iallreduce(x), comm.ibarrier()]), bool)
    assert_type(comm.ibarrier().wait(), None)
    assert_type(comm.iallgather(x).wait(), Floats)
    assert_type(comm.igather(t).wait(), torch.Tensor | None)
    assert_type(comm.iallgatherv(x).wait(), Vector)
    assert_type(comm.igatherv(t, return_counts=True).wait(), tuple[torch.Tensor, list[int]] | None)
    assert_type(comm.iscatter(None, like=t).wait(), torch.Tensor)
    assert_type(comm.ireduce_scatter(x).wait(), Floats)
    assert_type(comm.ialltoallv(x, [1]).wait(), Vector)
    assert_type(comm.ialltoall(x).wait(), Vector)
    assert_type(comm.iscan(t).wait(), torch.Tensor)


def objects(comm: ac.Communicator) -> None:
    assert_type(comm.bcast_object({"a": 1}), dict[str, int])
    assert_type(comm.allgather_object("a"), list[str])
    assert_type(comm.gather_object("a"), list[str] | None)


def groups(comm: ac.Communicator, color: int | None) -> None:
    assert_type(comm.split(0), ac.Communicator)
    assert_type(comm.split(None), None)
    assert_type(comm.split(color), ac.Communicator | None)
    assert_type(comm.dup(), ac.Communicator)
    assert_type(comm.grid(1).neighbor_alltoall([3, 4]), list[int])
    rows = np.zeros((2, 3))
    comm.grid(1).neighbor_alltoall(rows, out=rows)
    assert_type(comm.grid(1).ineighbor_alltoall([3, 4]), ac.Request[list[int]])
    assert_type(comm.grid(2).sub((True, False)), ac.GridCommunicator)
    assert_type(ac.GridCommunicator.from_mpi(comm.mpi_comm), ac.GridCommunicator)


def trees(comm: ac.Communicator, params: dict[str, Vector], model: torch.nn.Linear) -> None:
    assert_type(ac.synchronize(params), dict[str, Vector])
    assert_type(ac.synchronize(model), torch.nn.Linear)
    assert_type(ac.synchronize(params if comm.rank == 0 else None), dict[str, Vector])
    assert_type(ac.allreduce_tree(params), dict[str, Vector])
    assert_type(ac.allreduce_gradients(params, compression="float16"), dict[str, Vector])
    assert_type(comm.plan(params)(params), dict[str, Vector])
    assert_type(ac.mean_metrics(0.5, 10), float)
    assert_type(ac.mean_metrics({"right": 3}, 10), dict[str, float])


def optimizers(sgd: torch.optim.SGD, adam: optax.GradientTransformation) -> None:
    assert_type(ac.DistributedOptimizer(sgd), torch.optim.SGD)
    assert_type(ac.DistributedOptimizer(adam), optax.GradientTransformation)


def data(x: Floats, dataset: torch.utils.data.TensorDataset) -> None:
    for batch in ac.DistributedDataContainer({"x": x, "y": x}).batches(8):
        assert_type(batch.items, dict[str, Floats])
        assert_type(batch.weights, Floats)
    assert_type(len(ac.DistributedDataContainer(x).batches(8, pad=True)), int)
    assert_type(next(ac.DistributedDataContainer([1, 2]).batches(8)).items, list[int])
    assert_type(ac.DistributedDataContainer([1, 2])[0], int)
    assert_type(next(iter(ac.DistributedDataContainer([1, 2]))), int)
    assert_type(next(iter(ac.DistributedDataContainer(x))), Floats)
    assert_type(ac.DistributedDataContainer([1, 2])[1:], list[int])
    assert_type(ac.DistributedDataContainer({"x": x})[0], dict[str, Floats])
    assert_type(next(ac.DistributedDataContainer(dataset).batches(8)).items, Any)


def others(x: Vector, t: torch.Tensor) -> None:
    assert_type(ac.exchange(x, t), torch.Tensor)
    assert_type(ac.exchange(t, "jax"), Any)
    assert_type(run(3, rank_of), list[int])
    assert_type(run(3, lambda comm: comm.rank), list[int])
    assert_type(run(3, lambda comm, y: y * comm.rank, x), list[Vector])
    assert_type(ac.launch(lambda comm: comm.allreduce(0.5), 3), list[float])


def rank_of(comm: ac.Communicator) -> int:
    return comm.rank
