"""Reductions of large arrays, and of tensors, that were made before: their fast path does what a full call does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from enum import Enum
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm._prepared import fast_paths
from arraycomm._reduce import chunks, selection
from arraycomm._transports.base import Transport
from arraycomm.testing import given
from tests.support import internals
from tests.support.on_ranks import OnRanks, each_rank_of

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


@each_rank_of("few")
def test_a_call_beside_one_of_another_thread_is_refused(comm: ac.Communicator) -> None:
    turn = internals.engine(comm).turn
    for x in map(np.arange, (5, 5, 5, COUNT, COUNT, COUNT)):
        assert turn.acquire(False)
        with pytest.raises(ac.ConcurrentUseError):
            comm.allreduce(x)
        turn.release()
        assert np.array_equal(comm.allreduce(x), comm.size * x)


# What `nbytes` may be in a framework: a method, the bytes of more than the elements, or an error.
NBYTES: dict[str, Callable[[Any], Any]] = {
    "a method": lambda array: lambda: array.nbytes,
    "more": lambda _: 1 << 23,
    "refused": lambda array: array.item("refused"),
}


class _Tensor:
    """Of a framework whose `nbytes` says something else."""

    def __init__(self, array: np.ndarray[Any, Any], nbytes: str) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype
        self._nbytes = nbytes

    @property
    def nbytes(self) -> Any:
        return NBYTES[self._nbytes](self._array)

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@each_rank_of("few")
@pytest.mark.parametrize("count", [5, COUNT])
@pytest.mark.parametrize("nbytes", NBYTES)
def test_what_an_array_says_of_its_bytes_is_not_believed(
    comm: ac.Communicator, nbytes: str, count: int
) -> None:
    for turn in range(5):
        x = np.arange(turn, turn + count)
        out = comm.allreduce(_Tensor(x, nbytes) if comm.rank == 0 else x)
        assert np.array_equal(np.asarray(out), comm.size * x)


@each_rank_of(3)
def test_repeated_calls_are_counted(comm: ac.Communicator, monkeypatch: Any) -> None:
    """What they give is a law."""
    monkeypatch.setattr(fast_paths, "_MOST", 8)
    warmed(comm)
    for calls in range(2, 5):
        comm.allreduce(own(comm.rank))
        stats = comm.stats()["allreduce"]
        assert (stats["calls"], stats["bytes"]) == (calls, calls * COUNT * 8)
    # Also those whose way was given up for the ways of many others.
    for count in range(20):
        for _ in range(3):
            comm.allreduce(np.zeros(count, np.int8))
    assert comm.stats()["allreduce"]["calls"] == 4 + 3 * 20


def test_too_little_memory_on_one_rank_raises_in_step(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
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
        if comm.rank == 2:
            have_little.add(comm.rank)
        with pytest.raises((MemoryError, ac.PeerError), match="planted"):
            comm.allreduce(own(comm.rank))
        have_little.discard(comm.rank)
        np.testing.assert_array_equal(comm.allreduce(own(comm.rank)), total(3))

    on_ranks(3, check)


@each_rank_of("few")
def test_too_little_memory_for_few_elements_is_no_error_of_one_rank(comm: ac.Communicator) -> None:
    """The prepared call hands over, in which the other ranks hear of it if there is none either."""

    def scarce(*_: Any) -> None:
        raise MemoryError("planted")

    for x in (np.arange(4.0), np.arange(8.0)[::2]):
        want, *_ = (comm.allgather(x) for _ in range(3))
        if comm.rank == 0:
            for path in internals.fast_paths(comm)._paths.values():
                vars(path)["_into"] = scarce
        assert np.array_equal(comm.allgather(x), want)
        assert np.array_equal(comm.iallgather(x).wait(), want)
        comm = comm.dup()


@each_rank_of("several")
def test_a_result_is_of_the_framework_that_there_is_by_now(comm: ac.Communicator) -> None:
    """Without 64 bits, which a thread may allow later, JAX's arrays come as NumPy's."""
    jax = pytest.importorskip("jax")
    for bits in (False, False, False, True):
        with jax.enable_x64(bits or comm.rank == 0):
            got = comm.bcast(jax.numpy.ones(3) if comm.rank == 0 else None)
        assert isinstance(got, jax.Array if bits or comm.rank == 0 else np.ndarray)


@each_rank_of("several")
def test_an_op_may_be_of_an_enum_and_a_result_is_on_no_meta_device(comm: ac.Communicator) -> None:
    named, torch = Enum("Named", {"TOTAL": "sum"}, type=str), pytest.importorskip("torch")
    assert comm.allreduce(1.0, named.TOTAL if comm.rank else "sum") == comm.size  # type: ignore[arg-type]
    like = torch.ones(1, device="meta") if comm.rank else None
    with pytest.raises(TypeError if comm.rank else ac.PeerError, match="meta device"):
        comm.bcast(None if comm.rank else np.ones(3), like=like)


# How an array is changed that a call was made with.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "": lambda _: None,
    "shape": lambda x: setattr(x, "shape", (*x.shape, 1)),
    "dtype": lambda x: setattr(x, "dtype", np.int64),
    "shape of a tensor": lambda x: x.unsqueeze_(0),
    "length of a tensor": lambda x: x.resize_(900),
}


started = st.lists(st.sampled_from([*CHANGES]), min_size=1, max_size=2)


@given(
    name=st.sampled_from(("allreduce", "allreduce", "reduce", "bcast")),
    turns=st.lists(st.tuples(started, st.booleans()), min_size=1),
)
def test_what_becomes_of_an_array_is_no_matter_of_later_calls(comm, name, turns) -> None:
    """Arrays are changed once their requests are finished, which are waited for then, or later."""
    torch, part, made = pytest.importorskip("torch"), comm.dup(), 0
    for turn, (changes, later) in enumerate(turns):
        x = np.full(3, comm.rank + turn / 3)
        passed = [torch.tensor(x) if "tensor" in kind else x.copy() for kind in changes]
        want = getattr(comm, name)(x, timeout=60.0)
        requests = [getattr(part, f"i{name}")(each) for each in passed]
        while not ac.testall(requests):
            pass
        for kind, each in zip(changes, passed, strict=True):
            CHANGES[kind](each)
        found = [] if later else [requests.pop(0).wait()]
        found += [getattr(part, name)(like(x)) for like in (np.copy, torch.tensor) * 2]
        for got in [*found, *(request.wait() for request in requests)]:
            assert (got is None) is (want is None)
            if got is not None:
                assert (got.dtype.itemsize, tuple(got.shape)) == (8, want.shape)
                np.testing.assert_array_equal(got, want)
        made += len(changes) + 4
        assert part.stats()[name]["calls"] == made


def test_error_on_the_way_ends_the_communicator(
    on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch
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
        wrong = comm.rank == 2
        if wrong:
            failing.add(comm.rank)
        # Who has its result by then learns of an error in the next call.
        with pytest.raises(RuntimeError if wrong else ac.PeerError, match="planted"):
            _ = [part.allreduce(own(comm.rank)) for _ in range(2)]
        with pytest.raises(ac.CommunicatorClosedError):
            part.barrier()
        failing.discard(comm.rank)
        comm.barrier()

    on_ranks(3, check)


# Small tensors, which are read in a quicker way from the second call on.


def dual(torch: Any, stack: Any) -> Any:
    stack.enter_context(torch.autograd.forward_ad.dual_level())
    return torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("place", ["x", "out"])
@each_rank_of(2, "torch")
def test_dual_tensors_are_refused_also_later(comm: ac.Communicator, place: str, torch) -> None:
    out, wrong = torch.empty(3), comm.rank == 1
    comm.allreduce(torch.ones(3), out=out)
    with ExitStack() as stack:
        refused = dual(torch, stack) if wrong else torch.ones(3)
        passed = {"x": torch.ones(3), "out": out, place: refused}
        with pytest.raises(TypeError if wrong else ac.PeerError, match="dual tensor"):
            comm.allreduce(passed["x"], out=passed["out"])
    assert comm.allreduce(torch.ones(3), out=out) is out
    assert out.tolist() == [2.0] * 3


@each_rank_of(2, "torch")
def test_autograd_notices_that_a_saved_tensor_was_written(comm: ac.Communicator, torch) -> None:
    for count in (3, 3, 20_000, 20_000):
        saved, weight = torch.ones(count), torch.ones(count, requires_grad=True)
        loss = (weight * saved).sum()
        comm.allreduce(torch.ones(count), out=saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@each_rank_of(2, "torch")
def test_tensors_inside_of_a_transform_are_refused_also_later(comm: ac.Communicator, torch) -> None:
    def loss(x: Any) -> Any:
        return comm.allreduce(x).sum()

    inside = {torch.func.grad: torch.ones(3), torch.func.vmap: torch.ones(2, 3)}
    for transform, x in inside.items():
        loss(torch.ones(3))
        with pytest.raises(TypeError, match=r"traced by torch\.func"):
            transform(loss)(x)
        comm.barrier()


# Each of the calls that are prepared, with what another rank may do instead.
ANOTHER: dict[str, Callable[[ac.Communicator, Any], Any]] = {
    "barrier": lambda comm, x: comm.barrier(),
    "bcast": lambda comm, x: comm.bcast(x),
    "bcast of another root": lambda comm, x: comm.bcast(x, 1),
    "reduce": lambda comm, x: comm.reduce(x),
    "reduce of another op": lambda comm, x: comm.reduce(x, "max"),
    "allgather": lambda comm, x: comm.allgather(x),
    "gather": lambda comm, x: comm.gather(x),
    "scatter": lambda comm, x: comm.scatter(x if comm.rank == 0 else None),
    "alltoall": lambda comm, x: comm.alltoall(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "scan": lambda comm, x: comm.scan(x),
    "exscan": lambda comm, x: comm.exscan(x),
    "bcast_object": lambda comm, x: comm.bcast_object("text"),
    "bcast_object of another root": lambda comm, x: comm.bcast_object("text", 1),
    "gather_object": lambda comm, x: comm.gather_object("text"),
    "tree": lambda comm, x: ac.allreduce_tree([x], "sum", comm=comm),
    "tree of others": lambda comm, x: ac.allreduce_tree([x, x], "sum", comm=comm),
    "gradients": lambda comm, x: ac.allreduce_gradients([x], "sum", comm=comm),
    "error": lambda comm, x: comm.allgather(object()),
    "error of an object": lambda comm, x: comm.allgather_object(lambda: None),
}


@pytest.mark.parametrize("name", [name for name in ANOTHER if not name.startswith("error")])
@each_rank_of(3)
def test_a_prepared_call_beside_another_raises_on_all(comm: ac.Communicator, name: str) -> None:
    x, said = np.ones((3, 2)), set()
    # Each of them beside a third of the others.
    first = list(ANOTHER).index(name) % 3
    others = [other for other in list(ANOTHER)[first::3] if other != name]
    for other in others:
        trial = comm.dup()
        for _ in range(3):
            ANOTHER[name](trial, x)
        with pytest.raises((ac.ArrayCommError, TypeError)) as caught:
            ANOTHER[other if comm.rank == 2 else name](trial, x)
        raises = other.startswith("error")
        expected = ac.PeerError if raises else ac.MismatchError
        assert isinstance(caught.value, TypeError if raises and comm.rank == 2 else expected)
        said.add(str(caught.value))
        if raises:
            # All are in step, and go on.
            ANOTHER[name](trial, x)
        trial.free()
    assert len(said) == len(others)


@pytest.mark.parametrize("name", [*ANOTHER, "allreduce", "request"])
@each_rank_of(2)
def test_what_is_prepared_does_not_keep_a_communicator(comm: ac.Communicator, name: str) -> None:
    own = {"allreduce": lambda c, x: c.allreduce(x), "request": lambda c, x: c.iallreduce(x).wait()}
    before = len(internals.related(comm.dup()))
    for x in [np.ones((2, 2)), np.ones((2, 20_000))] * 3:
        made = comm.dup()
        for _ in range(3):
            with suppress(ac.PeerError, TypeError):
                {**ANOTHER, **own}[name](made, x)
        del made
    assert len(internals.related(comm)) <= before + 1
