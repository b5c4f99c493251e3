"""Ranks as a grid, messages beyond its border, and where the largest elements are."""

from __future__ import annotations

import math

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import PROC_NULL, Communicator
from tests.support.on_ranks import each_rank_of


@each_rank_of("size")
def test_numbers_of_ranks_are_chosen_and_neighbors_are_named_once(comm: Communicator) -> None:
    n = comm.size
    for dims in (1, np.int64(2), 3, (0, 1), np.array([n, 0]), (1, n, 1)):
        grid = comm.grid(dims, periods=np.True_)
        assert len(grid.dims) == (np.size(dims) if np.ndim(dims) else dims)
        assert math.prod(grid.dims) == n
        grid.free()
    assert comm.grid(2).dims == {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2)}[n]
    around = {(comm.rank + step) % n for step in (-1, 1)} - {comm.rank}
    assert comm.grid((0, 1), (True, False)).neighbors == sorted(around)
    assert comm.grid(1).dup().dims == (n,)


@each_rank_of(3)
def test_wrong_grids_are_errors_on_every_rank(comm: Communicator) -> None:
    grid = comm.grid(1)
    with pytest.raises(ac.PeerError if comm.rank else ValueError, match="sub: keep must be a bool"):
        grid.sub((True,) if comm.rank else (True, True))
    with pytest.raises(ValueError, match=r"rank_at: coords must be 1 integers; got \(0, 0\)"):
        grid.rank_at((0, 0))
    with pytest.raises(ValueError, match=r"shift: axis must be a dimension"):
        grid.shift(1)
    with pytest.raises(ac.MismatchError, match=r"grid\(dims=.*periods="):
        comm.grid((0, 1) if comm.rank else (1, 0))


@each_rank_of("few")
def test_nothing_goes_to_no_rank(comm: Communicator) -> None:
    x, out, status = np.arange(3), np.full(3, 7), ac.Status()
    comm.send(x, PROC_NULL)
    comm.isend(x, PROC_NULL, 5).wait()
    comm.send_object(object, PROC_NULL)
    assert comm.recv(PROC_NULL, status=status) is None
    assert comm.recv(PROC_NULL, ac.ANY_TAG, out=out) is out
    assert comm.irecv(PROC_NULL, out=out).wait() is out
    assert comm.recv_object(PROC_NULL) is None
    assert (out == 7).all()
    assert comm.probe(PROC_NULL) == comm.iprobe(PROC_NULL) == status == ac.Status()
    with pytest.raises(TypeError, match="send: x must be an array"):
        comm.send("text", PROC_NULL)


@each_rank_of("few", "torch", "jax")
def test_places_are_of_the_framework_of_the_array(comm: Communicator, torch, jax) -> None:
    for x in (torch.tensor([1.0, -comm.rank]), jax.numpy.array([1.0, -comm.rank])):
        values, ranks = comm.maxloc(x)
        assert type(values) is type(ranks) is type(x)
        assert ranks.tolist() == [0, 0]
        assert values.tolist() == [1.0, 0.0]
    with pytest.raises(TypeError, match="minloc: op 'min' is not defined for complex128"):
        comm.minloc(1j)


@each_rank_of("several", "torch")
def test_neighbors_exchange_in_place_and_like_the_blocks(comm: Communicator, torch) -> None:
    grid = comm.grid(1, True)
    before, after = grid.shift(0)
    x, out = torch.full((2, 20_000), float(comm.rank)), np.empty(20_000, np.float32)
    got = grid.neighbor_alltoall([x[0], np.full(20_000, comm.rank)], out=[None, out])
    assert type(got[0]) is torch.Tensor
    assert (got[0] == before).all()
    assert got[1] is out
    assert (out == after).all()
    assert grid.stats()["neighbor_alltoall"]["copies"] == 0
    # What goes is what was there before anything came.
    both = np.stack([np.full(20_000, rank + comm.rank) for rank in (0, 100)])
    grid.neighbor_alltoall(both, out=both[::-1])
    assert (both[1] == 100 + before).all()
    assert (both[0] == after).all()
    grid.free()


@each_rank_of(3)
def test_a_wrong_exchange_is_an_error_on_every_rank(comm: Communicator) -> None:
    grid = comm.grid(1, True)
    u, last = np.zeros((4, 4)), comm.rank == comm.size - 1
    for _ in range(3):
        grid.neighbor_alltoall([1, 2])
    for wrong, text in (
        ({"blocks": [1]}, "blocks must be 2 arrays, two for each dimension; got 1"),
        ({"blocks": [1, 2], "out": [u]}, "out must be 2 arrays, two for each dimension; got 1"),
        ({"blocks": [1, "a"]}, "x must be an array"),
        ({"blocks": iter([1, "a"])}, "x must be an array"),
        ({"blocks": [1, 2], "out": [u[0], u[:, 0]]}, "out share elements"),
    ):
        raised = (TypeError, ValueError) if last else ac.PeerError
        with pytest.raises(raised, match=f"neighbor_alltoall: .*{text}"):
            grid.neighbor_alltoall(**wrong if last else {"blocks": [1, 2]})
    if last:
        with pytest.raises(ValueError, match=r"neighbor_alltoall: out must have the shape"):
            grid.neighbor_alltoall([u, u], out=[np.zeros(3), None])
    else:
        grid.neighbor_alltoall([u, u])
    with pytest.raises(ac.MismatchError, match="neighbor_alltoall"):
        grid.barrier() if last else grid.neighbor_alltoall([u, u])


@each_rank_of(3)
def test_a_neighbor_that_does_not_come_is_named(comm: Communicator) -> None:
    grid = comm.dup(check=False).grid(1, True)
    if comm.rank == 1:
        with pytest.raises(ac.CommTimeoutError, match=r"timeout 0\.2 s"):
            grid.neighbor_alltoall([1, 2], timeout=0.2)
    comm.barrier()
