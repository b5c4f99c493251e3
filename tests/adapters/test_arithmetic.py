"""Gradients are added up and averaged by their own namespace, where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from properties.test_training_laws import Keep
from tests.adapters.arrays import MAKERS, elements
from tests.support.on_ranks import each_rank_of

STEPS = 3


def accumulate(comm: ac.Communicator, steps: list[Any]) -> Any:
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=len(steps))
    return [optimizer.update(None, grads) for grads in steps][-1]


@pytest.fixture
def reads(framework: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host reads of the framework's arrays, from now on."""
    read: list[str] = []

    def count(kind: Any, method: str) -> None:
        original = getattr(kind, method)

        def counting(x: Any, *args: Any, **kwargs: Any) -> Any:
            read.append(method)
            return original(x, *args, **kwargs)

        monkeypatch.setattr(kind, method, counting)

    example = MAKERS[framework](np.zeros(1, np.float32))
    methods = {"torch": ("data_ptr", "numpy", "__dlpack__", "__array__", "tolist", "cpu")}
    for method in methods.get(framework, ("__dlpack__", "__array__")):
        count(type(example), method)
    return read


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("framework", ["torch", "array_api_strict", "remote"])
@each_rank_of("size")
def test_the_host_reads_gradients_in_no_step_but_the_last(
    comm: ac.Communicator, framework: str, size: int, reads: list[str]
) -> None:
    steps = [MAKERS[framework](np.full((5, 4), step, np.float32)) for step in range(STEPS)]
    # The first tensors of a process are looked at once more.
    accumulate(comm, steps)
    comm.barrier()
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=STEPS)
    if comm.rank == 0:
        reads.clear()
    comm.barrier()
    for grads in steps[:-1]:
        optimizer.update(None, grads)
    comm.barrier()
    before = len(reads)
    comm.barrier()
    optimizer.update(None, steps[-1])
    comm.barrier()
    assert (before, len(reads)) == (0, size)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@each_rank_of(2)
def test_sums_do_not_share_memory_with_gradients(comm: ac.Communicator, framework: str) -> None:
    gradient = MAKERS[framework](np.ones(3, np.float32))
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=2)
    optimizer.update(None, gradient)
    gradient[...] = 3
    got = optimizer.update(None, gradient)
    assert elements(got).tolist() == [2.0] * 3
    gradient[...] = 9
    assert elements(got).tolist() == [2.0] * 3


@each_rank_of(1)
def test_torch_keeps_no_history(comm: ac.Communicator, torch: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=2)
    with pytest.raises(TypeError, match="allreduce_gradients: tree requires gradients"):
        optimizer.update(None, leaf)
    with torch.no_grad():
        optimizer.update(None, leaf * 1)
        optimizer.update(None, leaf)
    optimizer.update(None, torch.ones(3))
    got = optimizer.update(None, torch.ones(3))
    assert not got.requires_grad
    assert got.grad_fn is None


@each_rank_of(2)
def test_torch_views_of_conjugates_are_added_up(comm: ac.Communicator, torch: Any) -> None:
    got = accumulate(comm, [torch.tensor([1 + 2j]).conj(), torch.tensor([3 - 4j])])
    assert got.tolist() == [2 - 3j]


@pytest.mark.parametrize(
    "value", [1.5, 2 - 3j, np.float32(1.5), np.float64(2), np.complex64(1j), np.array(1.5)]
)
@each_rank_of(2)
def test_numbers_come_back_as_what_they_are(comm: ac.Communicator, value: Any) -> None:
    got = accumulate(comm, [value, value, value])
    assert type(got) is type(value)
    assert got == value


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "array_api_strict"])
@pytest.mark.parametrize("dtype", [np.int32, np.bool_])
@each_rank_of(1)
def test_integers_and_booleans_have_no_mean(comm: ac.Communicator, framework: str, dtype) -> None:
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=2)
    with pytest.raises(TypeError, match=r"allreduce_gradients: tree\['w'\]: op 'mean' is not"):
        optimizer.update(None, {"w": MAKERS[framework](np.ones(3, dtype))})


@each_rank_of(1)
def test_a_torch_tensor_without_memory_of_its_own_is_refused_at_once(
    comm: ac.Communicator, torch: Any
) -> None:
    optimizer = ac.DistributedOptimizer(Keep(), comm=comm, accumulate=2)
    with pytest.raises(TypeError, match=r"allreduce_gradients: tree.* is a tensor of layout"):
        optimizer.update(None, torch.ones(3).to_sparse())
