"""What is wrong on one rank is an error on every rank, soon, with a message that tells."""

from __future__ import annotations

import importlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._prepared.fast_paths import FastPaths
from arraycomm.testing import run
from tests.support import internals
from tests.support.on_ranks import LAUNCH, each_rank_of

pytestmark = pytest.mark.both_control_channels


@each_rank_of(3, "torch")
def test_tensor_that_requires_grad_is_refused_by_every_movement(comm: Communicator, torch) -> None:
    # Importing it takes seconds, and texts are the same on every transport.
    adapter = importlib.import_module("arraycomm.adapters.torch") if LAUNCH is None else None
    x = torch.ones(comm.size, requires_grad=True)
    for name, counts in {
        **dict.fromkeys(("allreduce", "reduce", "reduce_scatter", "scan", "exscan", "bcast"), ()),
        **dict.fromkeys(("allgather", "allgatherv", "gather", "gatherv", "alltoall"), ()),
        "alltoallv": ([1] * comm.size,),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name}: x requires gradients.*detach") as raised:
            getattr(comm, name)(x, *counts)
        named = f"arraycomm.adapters.torch.{name}"
        if adapter is not None:
            assert str(raised.value).endswith(named) == hasattr(adapter, name)
    with pytest.raises(ac.PeerError if comm.rank else TypeError):
        comm.scatter(x)
    with torch.no_grad():
        assert (comm.allreduce(x) == comm.size).all()


Call = Callable[[Communicator], Any]


def _small(comm: Communicator) -> Any:
    return comm.allreduce(np.ones(3, np.float32))


_receive = lambda out: lambda c: c.bcast(None if c.rank else np.ones(3), 0, out=out)  # noqa: E731


def _scatter(root: int, out: Any = None) -> Call:
    def call(c: Communicator) -> Any:
        sender = root % c.size
        return c.scatter(np.ones((c.size, 3)) if c.rank == sender else None, sender, out=out)

    return call


def _scatterv(c: Communicator) -> Any:
    return c.scatterv(None if c.rank else _rows(c), [1] * c.size)


def _rows(c: Communicator, length: int = 2) -> Any:
    return np.ones((c.size, length))


# What laws do not draw.
DIFFERENT: dict[str, tuple[Call, Call, str]] = {
    "bcast out shape": (_receive(None), _receive(np.ones(4)), r"\(4,\)"),
    "bcast out dtype": (_receive(None), _receive(np.ones(3, "f4")), "float32"),
    "allgatherv rows": (
        lambda c: c.allgatherv(np.ones((c.rank, 2))),
        lambda c: c.allgatherv(np.ones((c.rank, 3))),
        r"\(any, 3\)",
    ),
    "allgatherv of other dates": (
        lambda c: c.allgatherv(np.zeros(2, "M8[s]")),
        lambda c: c.allgatherv(np.zeros(2, "M8[D]")),
        r"datetime64\[D\]",
    ),
    "gather root": (
        lambda c: c.gather(1.0),
        lambda c: c.gather(1.0, c.rank),
        r"gather\(root=[1-3]",
    ),
    "scatter root": (_scatter(0), _scatter(-1), r"root=[1-3]"),
    "scatter out shape": (_scatter(0), _scatter(0, out=np.ones(4)), r"\(4,\)"),
    "scatterv out rows": (_scatterv, lambda c: c.scatterv(out=np.ones((1, 3))), r"\(any, 3\)"),
    "scatterv out dtype": (_scatterv, lambda c: c.scatterv(out=np.ones((1, 2), "f2")), "float16"),
    "alltoall shape": (
        lambda c: c.alltoall(_rows(c)),
        lambda c: c.alltoall(_rows(c, 20_000)),
        r"20000\)",
    ),
    "alltoallv rows": (
        lambda c: c.alltoallv(_rows(c), [1] * c.size),
        lambda c: c.alltoallv(_rows(c, 20_000), [1] * c.size),
        r"\(any, 20000\)",
    ),
    "reduce_scatter counts": (
        lambda c: c.reduce_scatter(np.ones(c.size), counts=[1] * c.size),
        lambda c: c.reduce_scatter(np.ones(c.size), counts=[c.size, *[0] * (c.size - 1)]),
        r"reduce_scatter\(sum, counts=\[1, 1, 1\]\)",
    ),
    "many dimensions": (
        lambda c: c.scan(np.ones((1,) * 10 + (2, 3))),
        lambda c: c.scan(np.ones((1,) * 10 + (3, 2))),
        r"1, 3, 2\)",
    ),
}


@pytest.mark.half_of_the_cases
@pytest.mark.parametrize("case", DIFFERENT)
@each_rank_of(3)
def test_ranks_that_differ_raise_mismatch_everywhere(comm: Communicator, case) -> None:
    usual, other, message = DIFFERENT[case]
    healthy = comm.dup()
    for called_before in (False, True):
        broken = comm.dup()
        if called_before:
            _small(broken)
        started = time.monotonic()
        with pytest.raises(ac.MismatchError, match=message) as caught:
            (other if comm.rank == comm.size - 1 else usual)(broken)
        assert time.monotonic() - started < 10
        assert f"rank {comm.size - 1}: " in str(caught.value)
        assert "test_errors.py:" in str(caught.value)
        with pytest.raises(ac.CommunicatorClosedError, match="MismatchError") as closed:
            broken.barrier()
        assert closed.value.__cause__ is caught.value
        assert healthy.allreduce(1) == comm.size


TREES: dict[str, tuple[Any, Any, str]] = {
    "shape": ({"a": np.ones(2), "b": np.ones(3)}, {"a": np.ones(2), "b": np.ones(4)}, r"\['b'\]"),
    "dtype": ([np.ones(2)], [np.ones(2, np.float32)], r"tree\[0\] is float64 .* float32"),
    "key": ({"a": 1.0}, {"b": 1.0}, r"tree\['a'\] on rank 0, tree\['b'\] on rank 1"),
    "length": ([1.0], [1.0, 2.0], r"tree\[1\] is on rank 1 only|First difference: tree\[1\]"),
    "none": ([1.0, None], [1.0, 2.0], r"tree\[1\] is None on rank 0, float64 \(\) on rank 1"),
    "tuple": (
        {"a": [1.0]},
        {"a": (1.0,)},
        r"tree\['a'\] is of type list on rank 0, tuple on rank 1",
    ),
    "ordered": (
        [{"a": 1.0}],
        [OrderedDict(a=1.0)],
        r"tree\[0\] is of type dict on rank 0, OrderedDict on rank 1",
    ),
    "empty": ([1.0], [1.0, {}], r"tree\[1\], of type dict, is on rank 1 only"),
}


@pytest.mark.half_of_the_cases
@pytest.mark.parametrize("case", TREES)
@each_rank_of(3)
def test_trees_that_differ_raise_with_the_first_path(comm: Communicator, case) -> None:
    usual, other, message = TREES[case]
    for reduce_or_send in (ac.allreduce_tree, ac.synchronize):
        broken = comm.dup()
        mine = other if comm.rank == 1 else usual
        with pytest.raises(ac.MismatchError, match="tree"):
            reduce_or_send(mine, comm=broken)
    broken = comm.dup()
    with pytest.raises(ac.MismatchError, match=message):
        ac.allreduce_tree(mine, comm=broken)


@each_rank_of(3)
def test_gradients_that_differ_in_more_than_none_raise(comm: Communicator) -> None:
    tree = [None, np.ones(2)] if comm.rank == 0 else [np.ones(3), np.ones(1 + comm.rank)]
    with pytest.raises(ac.MismatchError, match=r"First difference: tree\[1\]"):
        ac.allreduce_gradients(tree, comm=comm)


@each_rank_of(3)
def test_two_threads_at_once_are_refused(comm: Communicator) -> None:
    other = comm.dup()
    if comm.rank:
        other.barrier()
        comm.allreduce(1)
        return
    with ThreadPoolExecutor() as pool:
        first = pool.submit(comm.allreduce, 1)
        while not internals.engine(comm).turn.locked():
            time.sleep(0.001)
        with pytest.raises(ac.ConcurrentUseError, match=r"dup\(\)"):
            comm.barrier()
        other.barrier()
        assert first.result() == comm.size


@each_rank_of(3)
def test_call_from_a_function_that_a_call_runs_is_refused(comm: Communicator) -> None:
    again = ac.op(lambda a, b: comm.allreduce(a + b))
    refused = (ac.ConcurrentUseError, ac.PeerError)
    with pytest.raises(refused, match="or a function that a call runs"):
        comm.allreduce(np.ones(3), again)
    assert comm.allreduce(1) == comm.size


@each_rank_of("few")
def test_freed_communicator_says_so(comm: Communicator) -> None:
    with comm.dup() as inner:
        assert inner.allreduce(1) == comm.size
    for call in (inner.barrier, lambda: inner.allreduce(1), lambda: inner.ibarrier().wait()):
        with pytest.raises(ac.CommunicatorClosedError, match="it was freed"):
            call()
    inner.free()


@each_rank_of(3)
def test_bucket_sizes_that_differ_raise(comm: Communicator) -> None:
    tree = [np.ones(1, "f4"), np.ones(1, "i4"), np.ones(1, "f4")]
    with pytest.raises(ac.MismatchError, match=r"bucket_bytes=1.* on rank 0, bucket_bytes=9"):
        ac.allreduce_tree(tree, "sum", bucket_bytes=9 if comm.rank else 1, comm=comm)


@each_rank_of(3)
def test_array_whose_dtype_raises_is_told_to_all(comm: Communicator) -> None:
    class Uninitialized:
        @property
        def dtype(self) -> object:
            raise RuntimeError("not yet")

    with pytest.raises(TypeError if comm.rank == 0 else ac.PeerError):
        comm.allreduce(Uninitialized() if comm.rank == 0 else np.ones(2))
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_what_is_wrong_with_options_and_lines_is_told_to_all(comm: Communicator) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise ZeroDivisionError

    for kind, call in (
        (TypeError, lambda: comm.dup(foo=1)),
        (TypeError, lambda: comm.dup(timeout="abc")),
        (ValueError, lambda: comm.dup(timeout=-1)),
        (ZeroDivisionError, lambda: ac.println(Unprintable(), comm=comm)),
        (TypeError, lambda: ac.DistributedOptimizer(object(), comm=comm)),
        (ValueError, lambda: ac.allreduce_tree({}, "foo", comm=comm)),
    ):
        with pytest.raises(kind if comm.rank == 0 else ac.PeerError):
            call() if comm.rank == 0 else comm.barrier()
    assert comm.allreduce(1) == comm.size


@each_rank_of(3)
def test_without_the_check_a_wrong_argument_ends_the_communicator_everywhere(
    comm: Communicator,
) -> None:
    for count in (3, 5_000, 200_000):
        unchecked = comm.dup(check=False, timeout=10.0)
        assert (unchecked.allreduce(np.ones(count)) == comm.size).all()
        with pytest.raises(ValueError if comm.rank == 0 else ac.PeerError):
            unchecked.allreduce(np.ones(count), "sum" if comm.rank else "nope")
        with pytest.raises(ac.CommunicatorClosedError):
            unchecked.barrier()


@each_rank_of(3)
def test_interrupt_while_arguments_are_looked_at_ends_the_communicator(comm: Communicator) -> None:
    class Interrupting:
        def __dlpack__(self, **_: object) -> object:
            raise KeyboardInterrupt

    other = comm.dup()
    if comm.rank == 0:
        with pytest.raises(KeyboardInterrupt):
            other.allreduce(Interrupting())
        with pytest.raises(ac.CommunicatorClosedError):
            other.allreduce(1)
    comm.barrier()


@each_rank_of(3)
def test_without_the_check_there_is_one_exchange_fewer(comm: Communicator, monkeypatch) -> None:
    """Large arrays move at once; small ones travel with the exchange, which stays."""
    # Exchanges of the native part are not counted here.
    monkeypatch.setattr(FastPaths, "may_keep", False)
    exchanges = {}
    x = np.full(100_000, comm.rank + 1.0)
    for checked in (True, False):
        other = comm.dup(check=checked)
        # What the first large array opens takes exchanges of its own, and what it goes through may.
        other.allreduce(x)
        control = internals.control(other)
        control.post = mock.Mock(wraps=control.post)
        for count in (3, len(x)):
            control.post.reset_mock()
            total = other.allreduce(x[:count])
            assert total.shape == (count,)
            assert (total == sum(range(comm.size + 1))).all()
            exchanges[checked, count == 3] = control.post.call_count
    assert exchanges[True, True] == exchanges[False, True] == 1
    assert exchanges[True, False] == exchanges[False, False] + 1


class _Gate:
    """What a program waits for, until it is opened."""

    is_open = False

    def done(self) -> bool:
        return self.is_open


def test_call_behind_others_is_named_by_its_line_whichever_thread_begins_it() -> None:
    def check(comm: Communicator) -> str:
        engine, gate = internals.engine(comm), _Gate()

        def outstanding() -> Iterator[_Gate]:
            yield gate

        def finish_elsewhere(task: Any) -> Any:
            gate.is_open = True
            return internals.finish_in_another_thread(comm, task)

        engine.submit(outstanding())
        with (
            mock.patch.object(engine, "finish", finish_elsewhere),
            pytest.raises(ac.MismatchError) as raised,
        ):
            comm.allreduce(np.ones(3 + comm.rank))
        return str(raised.value)

    for said in run(2, check):
        assert said.count("at test_errors.py:") == 2
        assert "thread" not in said
