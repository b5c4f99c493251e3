"""Reductions of large arrays, and of tensors, that were made before: their fast path does what a full call does."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._collectives import fast_path, shared_arrays
from arraycomm._reduce import chunks, selection
from arraycomm._transports.base import Transport
from tests.support import internals
from tests.support.on_ranks import OnRanks

# More elements than travel with a header.
COUNT = 70_000


def own(rank: int, turn: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(COUNT, dtype=np.float64) * (rank + 1) + turn


def total(size: int, turn: int = 0) -> np.ndarray[Any, Any]:
    return sum((own(rank, turn) for rank in range(1, size)), start=own(0, turn))


def warmed(comm: ac.Communicator) -> None:
    """Make the call that the next ones are like."""
    comm.allreduce(own(comm.rank))
    assert internals.has_fast_paths(comm, 1)


def test_repeated_calls_reduce_what_they_are_given(on_ranks: OnRanks, size: int) -> None:
    def check(comm: ac.Communicator) -> None:
        warmed(comm)
        before = comm.stats()["allreduce"]
        results = []
        for turn in range(3):
            x = own(comm.rank, turn)
            results.append(comm.allreduce(x))
            np.testing.assert_array_equal(x, own(comm.rank, turn))
        for turn, result in enumerate(results):
            np.testing.assert_array_equal(result, total(size, turn))
            assert result.flags.writeable
            assert result.flags.owndata or result.base is not None
        after = comm.stats()["allreduce"]
        assert after["calls"] - before["calls"] == 3
        assert after["bytes"] - before["bytes"] == 3 * COUNT * 8

    on_ranks(size, check)


def whole(x: Any, memory: Any) -> tuple[Any, Any]:
    return x, memory[:COUNT]


def in_place(x: Any, memory: Any) -> tuple[Any, Any]:
    memory[:COUNT] = x
    return memory[:COUNT], memory[:COUNT]


def overlapping(x: Any, memory: Any) -> tuple[Any, Any]:
    memory[:COUNT] = x
    return memory[:COUNT], memory[7 : COUNT + 7]


def every_other(x: Any, memory: Any) -> tuple[Any, Any]:
    return x, memory[: 2 * COUNT : 2]


def strided(x: Any, memory: Any) -> tuple[Any, Any]:
    spread = np.zeros(2 * COUNT)
    spread[::2] = x
    return spread[::2], memory[:COUNT]


def unaligned(x: Any, memory: Any) -> tuple[Any, Any]:
    moved = np.zeros(8 * COUNT + 1, np.uint8)[1:].view(np.float64)
    moved[...] = x
    return moved, memory[:COUNT]


def read_only(x: Any, memory: Any) -> tuple[Any, Any]:
    x.flags.writeable = False
    return x, memory[:COUNT]


PLACES = [whole, in_place, overlapping, every_other, strided, unaligned, read_only]


@pytest.mark.parametrize("place", PLACES)
def test_memory_of_each_kind_gives_the_same(
    on_ranks: OnRanks,
    several: int,
    place: Callable[..., tuple[Any, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank alone, or all, have arrays of a kind for which there may be no fast path."""
    # Results of one chunk are written before the next one is read.
    monkeypatch.setattr(selection, "CHUNK_BYTES", 64 << 10)

    def check(comm: ac.Communicator) -> None:
        warmed(comm)
        memory = np.zeros(2 * COUNT + 8)
        for turn, unusual in enumerate((0, comm.size - 1, comm.size)):
            memory[...] = -1
            where = place if comm.rank == unusual or unusual == comm.size else whole
            x, out = where(own(comm.rank, turn), memory)
            assert comm.allreduce(x, out=out) is out
            np.testing.assert_array_equal(out, total(comm.size, turn))
            untouched = np.count_nonzero(memory == -1)
            assert untouched >= COUNT + 1

    on_ranks(several, check)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda comm, x: comm.allreduce(x[1:]), r"\(69999,\)"),
        (lambda comm, x: comm.allreduce(x, "max"), r"allreduce\(max\)"),
        (lambda comm, x: comm.allreduce(x.astype(np.float32)), "float32"),
        (lambda comm, x: comm.barrier(), "barrier"),
        (lambda comm, x: comm.allreduce(x[:3]), r"\(3,\)"),
    ],
)
def test_another_call_on_one_rank_raises_on_all(
    on_ranks: OnRanks, several: int, other: Any, said: str
) -> None:
    def check(comm: ac.Communicator) -> None:
        warmed(comm)
        call = other if comm.rank == 1 else type(comm).allreduce
        with pytest.raises(ac.MismatchError, match=said):
            call(comm, own(comm.rank))

    on_ranks(several, check)


def test_what_is_wrong_with_one_rank_raises_in_step(on_ranks: OnRanks, several: int) -> None:
    def check(comm: ac.Communicator) -> None:
        warmed(comm)
        x, small = own(comm.rank), np.zeros(3)
        wrong = comm.rank == several - 1
        with pytest.raises(ValueError if wrong else ac.PeerError, match="shape"):
            comm.allreduce(x, out=small if wrong else None)
        np.testing.assert_array_equal(comm.allreduce(x), total(several))

    on_ranks(several, check)


def test_too_little_memory_on_one_rank_raises_in_step(
    on_ranks: OnRanks, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, have_little = chunks.reserve, set[int]()

    def scarce(transport: Any, nbytes: int) -> None:
        if transport.rank in have_little:
            raise MemoryError("planted")
        reserve(transport, nbytes)

    for module in ("_collectives.reductions", "_reduce.chunks"):
        monkeypatch.setattr(f"arraycomm.{module}.reserve", scarce)

    def check(comm: ac.Communicator) -> None:
        warmed(comm)
        if comm.rank == several - 1:
            have_little.add(comm.rank)
        with pytest.raises((MemoryError, ac.PeerError), match="planted"):
            comm.allreduce(own(comm.rank))
        have_little.discard(comm.rank)
        np.testing.assert_array_equal(comm.allreduce(own(comm.rank)), total(several))

    on_ranks(several, check)


def _twice(comm: ac.Communicator, x: Any) -> None:
    """Reduce again: who has its result by then learns of an error in the next call."""
    comm.allreduce(x)
    comm.allreduce(x)


def test_error_on_the_way_ends_the_communicator(
    on_ranks: OnRanks, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold, failing = Transport.fold, set[int]()

    def planted(transport: Transport, *arguments: Any) -> None:
        if transport.rank in failing:
            raise RuntimeError("planted")
        fold(transport, *arguments)

    monkeypatch.setattr(Transport, "fold", planted)
    # Without the native part there is no other fold.
    monkeypatch.setattr(selection, "is_preferred", lambda *_: False)

    def check(comm: ac.Communicator) -> None:
        part = comm.dup()
        warmed(part)
        wrong = comm.rank == several - 1
        if wrong:
            failing.add(comm.rank)
        raised = pytest.raises(RuntimeError if wrong else ac.PeerError, match="planted")
        with raised:
            _twice(part, own(comm.rank))
        with pytest.raises(ac.CommunicatorClosedError):
            part.barrier()
        failing.discard(comm.rank)
        comm.barrier()

    on_ranks(several, check)


def test_arrays_that_ranks_share_are_reduced_where_they_are(
    on_ranks: OnRanks, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reduced = list[int]()
    reduce = shared_arrays.allreduce

    def counted(link: Any, *rest: Any) -> Any:
        reduced.append(link.rank)
        return reduce(link, *rest)

    monkeypatch.setattr(shared_arrays, "allreduce", counted)

    def check(comm: ac.Communicator) -> None:
        warmed(comm)
        x, out = (comm.empty(COUNT, np.float64) for _ in range(2))
        for turn in range(2):
            x[...] = own(comm.rank, turn)
            np.testing.assert_array_equal(comm.allreduce(x, out=out), total(several, turn))
            np.testing.assert_array_equal(comm.allreduce(own(comm.rank)), total(several))
        if internals.transport(comm).shares_arrays:
            assert reduced.count(comm.rank) == 2

    on_ranks(several, check)


def test_calls_without_headers_have_none(on_ranks: OnRanks, several: int) -> None:
    def check(comm: ac.Communicator) -> None:
        unchecked = comm.dup(check=False)
        for turn in range(3):
            np.testing.assert_array_equal(
                unchecked.allreduce(own(comm.rank, turn)), total(several, turn)
            )
        assert internals.has_fast_paths(unchecked, 0)

    on_ranks(several, check)


def test_arrays_that_have_to_be_copied_are_not_looked_at_each_time(
    on_ranks: OnRanks, several: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, view = list[int](), fast_path.view

    def counted(x: Any) -> Any:
        looked.append(x.nbytes)
        return view(x)

    monkeypatch.setattr(fast_path, "view", counted)

    def check(comm: ac.Communicator) -> int:
        swapped = own(comm.rank).astype(">f8")
        for _ in range(3):
            np.testing.assert_array_equal(comm.allreduce(swapped), total(several))
        return len(looked)

    # Once on each rank, of which those of threads count together.
    assert max(on_ranks(several, check)) <= several


def test_requests_that_are_outstanding_come_first(on_ranks: OnRanks, several: int) -> None:
    def check(comm: ac.Communicator) -> None:
        warmed(comm)
        late = comm.rank == several - 1
        if late:
            time.sleep(0.05)
        request = comm.iallreduce(own(comm.rank, 1))
        if late:
            np.testing.assert_array_equal(request.wait(), total(several, 1))
        np.testing.assert_array_equal(comm.allreduce(own(comm.rank)), total(several))
        np.testing.assert_array_equal(request.wait(), total(several, 1))

    on_ranks(several, check)


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
def test_tensors_get_tensors(on_ranks: OnRanks, several: int) -> None:
    import torch

    def check(comm: ac.Communicator) -> None:
        for turn in range(3):
            x = torch.from_numpy(own(comm.rank, turn))
            got = comm.allreduce(x)
            assert isinstance(got, torch.Tensor)
            np.testing.assert_array_equal(got.numpy(), total(several, turn))
            out = torch.empty(COUNT, dtype=torch.float64)
            assert comm.allreduce(x, out=out) is out
            np.testing.assert_array_equal(out.numpy(), total(several, turn))

    on_ranks(several, check)


# Small tensors, which are read in a quicker way from the second call on.


def dual(torch: Any, stack: Any) -> Any:
    stack.enter_context(torch.autograd.forward_ad.dual_level())
    return torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))


def without_storage(torch: Any, stack: Any) -> Any:
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    return x


def with_history(torch: Any, stack: Any) -> Any:
    return torch.ones(3, requires_grad=True)


REFUSED = {
    with_history: (TypeError, "requires gradients"),
    dual: (TypeError, "dual tensor"),
    without_storage: (BufferError, "no memory behind"),
}


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("given", [*REFUSED])
@pytest.mark.parametrize("place", ["x", "out"])
def test_tensors_that_are_refused_are_refused_also_later(
    on_ranks: OnRanks, place: str, given: Any
) -> None:
    import torch

    kind, said = REFUSED[given]

    def check(comm: ac.Communicator) -> None:
        out = torch.empty(3)
        comm.allreduce(torch.ones(3), out=out)
        wrong = comm.rank == 1
        with ExitStack() as stack:
            refused = given(torch, stack) if wrong else torch.ones(3)
            passed = {"x": torch.ones(3), "out": out, place: refused}
            with pytest.raises(kind if wrong else ac.PeerError, match=said):
                comm.allreduce(passed["x"], out=passed["out"])
        assert comm.allreduce(torch.ones(3), out=out) is out
        assert out.tolist() == [2.0] * 3

    on_ranks(2, check)


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_small_tensors_get_tensors(on_ranks: OnRanks, several: int, dtype: str) -> None:
    import torch

    kind = getattr(torch, dtype)

    def check(comm: ac.Communicator) -> None:
        for turn in range(3):
            x = torch.full((2, 2), turn > 0, dtype=kind)
            memory = torch.full((4, 4), 9).to(kind)
            for out in (None, torch.empty(2, 2, dtype=kind), memory[::2, ::2], memory[:2].t()[:2]):
                got = comm.allreduce(x, "max", out=out)
                assert out is None or got is out
                assert got.dtype == kind
                assert got.tolist() == x.tolist()
            if turn:
                with pytest.raises((TypeError, ac.PeerError), match="out must have dtype"):
                    comm.allreduce(x, "max", out=torch.empty(2, 2, dtype=torch.float64))
                with pytest.raises((ValueError, ac.PeerError), match="out must have the shape"):
                    comm.allreduce(x, "max", out=torch.empty(4, dtype=kind))
                with pytest.raises((BufferError, ac.PeerError), match="elements of out share"):
                    comm.allreduce(x, "max", out=torch.empty(1, dtype=kind).expand(2, 2))

    on_ranks(several, check)


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
def test_autograd_notices_that_a_saved_tensor_was_written(on_ranks: OnRanks) -> None:
    import torch

    def check(comm: ac.Communicator) -> None:
        for _ in range(2):
            saved, weight = torch.ones(3), torch.ones(3, requires_grad=True)
            loss = (weight * saved).sum()
            comm.allreduce(torch.ones(3), out=saved)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

    on_ranks(2, check)


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
def test_tensors_inside_of_a_transform_are_refused_also_later(on_ranks: OnRanks) -> None:
    import torch

    def check(comm: ac.Communicator) -> None:
        def loss(x: Any) -> Any:
            return comm.allreduce(x).sum()

        inside = {torch.func.grad: torch.ones(3), torch.func.vmap: torch.ones(2, 3)}
        for transform, x in inside.items():
            loss(torch.ones(3))
            with pytest.raises(TypeError, match=r"traced by torch\.func"):
                transform(loss)(x)
            comm.barrier()

    on_ranks(2, check)
