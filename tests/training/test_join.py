from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.adapters.numpy import SGD
from tests.adapters.remote import Remote
from tests.support.on_ranks import alone, each_rank_of


def test_weights_are_applied_where_gradients_are(on_ranks, several) -> None:
    """The host reads w·g alone."""

    def check(comm: Communicator) -> None:
        with ac.join(comm) as joined:
            joined.weight = 3
            gradient = Remote([comm.rank + 1.0, -2.0])
            ac.allreduce_gradients(gradient, comm=comm)
        seen = [array.tolist() for array in Remote.seen]
        assert [3.0 * (comm.rank + 1), -6.0] in seen
        assert [comm.rank + 1.0, -2.0] not in seen

    Remote.seen.clear()
    on_ranks(several, check)


@pytest.mark.parametrize("value", [1.5, 2j, np.float32(4)])
@each_rank_of(3)
def test_weighted_numbers_come_back_as_what_they_are(comm: Communicator, value) -> None:
    with ac.join(comm) as joined:
        joined.weight = 2
        got = ac.allreduce_gradients([value, value], comm=comm)
        assert [type(x) for x in got] == [type(value)] * 2
        assert got == [value, value]


@each_rank_of(3)
def test_metrics_are_shadowed_too(comm: Communicator) -> None:
    with ac.join(comm):
        for step in range(comm.rank):
            metrics = {"loss": 1.0 + comm.rank, "z": 1j, "n": None, "a": np.arange(6000)}
            got = ac.mean_metrics(metrics, comm.rank + 1, comm=comm)
            live = range(step + 1, comm.size)
            want = sum((r + 1) * (1.0 + r) for r in live) / sum(r + 1 for r in live)
            assert math.isclose(got["loss"], want, rel_tol=1e-15)
            assert got["z"] == 1j
            assert got["n"] is None
            assert np.allclose(got["a"], np.arange(6000), rtol=1e-15, atol=0)


@each_rank_of(3)
def test_a_block_that_is_entered_again_has_its_own_last_step(comm: Communicator) -> None:
    joined = ac.join(comm)
    for batches in (comm.size - comm.rank, comm.rank + 1):
        with joined:
            for _ in range(batches):
                ac.allreduce_gradients(np.ones(1), comm=comm)
    assert joined.synchronize(comm.rank) == comm.size - 1


@pytest.mark.parametrize("shadows", [False, True])
@pytest.mark.parametrize("wrong", ["exception", "other", "nested"])
@each_rank_of(3)
def test_what_is_wrong_in_one_block_raises_in_all(comm: Communicator, wrong, shadows) -> None:
    def block() -> None:
        with ac.join(comm):
            if shadows and comm.rank == 0:
                return
            ac.allreduce_gradients(np.ones(2), comm=comm)
            if comm.rank != 1:
                ac.allreduce_gradients(np.ones(2), comm=comm)
            elif wrong == "exception":
                error = KeyError("no such batch of join")
                raise error from error
            elif wrong == "other":
                comm.allreduce(1.0)
            else:
                ac.join(comm).__enter__()

    mine = comm.rank == 1
    error = KeyError if wrong == "exception" else RuntimeError
    error = error if mine else ac.PeerError
    with pytest.raises(error, match=r"join|allreduce_gradients") as caught:
        block()
    assert mine or caught.value.rank == 1
    assert comm.allreduce(1) == comm.size


@alone
@each_rank_of(3, "torch")
def test_an_error_of_a_step_taken_without_data_raises_in_all(
    comm: Communicator, torch: Any
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = ac.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), comm=comm)
    optimizer.register_step_post_hook(lambda *_: 1 / comm.rank)

    def block() -> None:
        with ac.join(comm):
            for _ in range(3 * comm.rank):
                weight.sum().backward()
                optimizer.step()

    with pytest.raises(ac.PeerError if comm.rank else ZeroDivisionError):
        block()
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_an_error_that_the_block_handles_is_over(comm: Communicator) -> None:
    with ac.join(comm):
        with pytest.raises((RuntimeError, ac.PeerError)):
            comm.barrier() if comm.rank == 0 else ac.allreduce_gradients(np.ones(2), comm=comm)
        assert ac.allreduce_gradients(np.ones(2), comm=comm).tolist() == [1.0, 1.0]


@each_rank_of(3)
def test_trees_that_differ_raise_in_all_blocks(comm: Communicator) -> None:
    def block() -> None:
        with ac.join(comm):
            if comm.rank:
                tree = {"a" if comm.rank == 1 else "b": np.ones(2)}
                ac.allreduce_gradients(tree, comm=comm)

    with pytest.raises(ac.MismatchError, match=r"tree\['a'\]"):
        block()


@each_rank_of(3)
def test_ranks_that_enter_no_block_are_told_apart(comm: Communicator) -> None:
    with pytest.raises(ac.MismatchError, match="join"):
        ac.join(comm).__enter__() if comm.rank else comm.barrier()


@each_rank_of(3)
def test_accumulation_is_refused(comm: Communicator) -> None:
    optimizer = ac.DistributedOptimizer(SGD(), comm=comm, accumulate=2)

    def block() -> None:
        with ac.join(comm):
            if comm.rank:
                optimizer.update(np.zeros(1), np.ones(1))

    with pytest.raises(ValueError if comm.rank else ac.PeerError, match="accumulate"):
        block()


@each_rank_of("few")
def test_a_communicator_made_before_is_free(comm: Communicator) -> None:
    with comm.dup() as other, ac.join(comm):
        assert other.allreduce(1) == comm.size
        assert ac.allreduce_gradients(np.ones(1), comm=comm).tolist() == [1.0]
