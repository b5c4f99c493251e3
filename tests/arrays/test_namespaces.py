"""Arrays of a namespace that is not known: their results are its own, or are refused beforehand."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.testing import run


class Mine:
    """An own class of arrays, whose namespace makes no more than `limit` elements."""

    def __init__(self, data: Any, namespace: Any) -> None:
        self.data, self._namespace, self.dtype = data, namespace, data.dtype

    def __dlpack__(self, **options: Any) -> Any:
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.data.__dlpack_device__()

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        if isinstance(self._namespace, Exception):
            raise self._namespace
        return self._namespace


def _namespace(limit: int = 100, dtypes: str = "fdil", keeps: bool = True) -> Any:
    def from_dlpack(x: Any) -> Mine:
        array = np.from_dlpack(x)
        if array.size > limit:
            raise OverflowError(f"this framework keeps {limit} elements at most")
        if array.dtype.char not in dtypes:
            raise TypeError("no such dtype")
        return Mine(array if keeps else array.astype(np.float32), made)

    made = SimpleNamespace(from_dlpack=from_dlpack)
    return made


CANNOT: dict[str, Any] = {
    "nothing": (SimpleNamespace, "has no attribute 'from_dlpack'"),
    "raises": (lambda: RuntimeError("no namespace"), "no namespace"),
    "no namespace": (lambda: 1, "has no attribute 'from_dlpack'"),
    "too long": (lambda: _namespace(limit=2), "keeps 2 elements at most"),
    "other dtype": (lambda: _namespace(dtypes="f"), "no such dtype"),
    "changes dtype": (lambda: _namespace(keeps=False), "it makes float32"),
}


def _bcast_like(comm: Communicator, x: Any) -> Any:
    if comm.rank:
        return comm.bcast(x, 1)
    return comm.bcast(None, 1, like=x)


CALLS: dict[str, Any] = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "bcast": lambda comm, x: comm.bcast(x, 0),
    "bcast to it": lambda comm, x: comm.bcast(x, 1),
    "bcast like it": _bcast_like,
    "allgather": lambda comm, x: comm.allgather(x),
    "alltoall": lambda comm, x: comm.alltoall(x),
    "scan": lambda comm, x: comm.scan(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", CANNOT)
def test_namespaces_that_cannot_make_the_result_raise_on_all_ranks(kind: str, call: str) -> None:
    make, words = CANNOT[kind]

    def check(comm: Communicator) -> None:
        array = np.ones((2, 3))
        if kind == "too long" and call == "bcast like it":
            # Only the dtype is known before.
            return
        x = Mine(array, make()) if comm.rank == 0 else array
        expected = TypeError if comm.rank == 0 else ac.PeerError
        with pytest.raises(expected, match=words):
            CALLS[call](comm, x)
        # The ranks are in step, and the remedy works.
        assert CALLS[call](comm, np.asarray(array)).shape

    run(2, check)


def _second_step(comm: Communicator, x: Any) -> Any:
    optimizer = ac.DistributedOptimizer(lambda params, grads: grads, comm=comm, accumulate=2)
    return [optimizer([1.0], [x]) for _ in range(2)][-1][0]


@pytest.mark.parametrize("call", [*CALLS, "tree", "steps"])
def test_results_are_what_the_namespace_makes(call: str) -> None:
    trees = {"tree": lambda comm, x: ac.allreduce_tree([x], comm=comm)[0], "steps": _second_step}
    calls = CALLS | trees

    def check(comm: Communicator) -> None:
        array = np.ones((2, 3))
        result = calls[call](comm, Mine(array, _namespace()) if comm.rank == 0 else array)
        expected = calls[call](comm, array)
        assert type(result) is (np.ndarray if comm.rank else Mine)
        assert np.array_equal(np.asarray(getattr(result, "data", result)), expected)

    run(2, check)


@pytest.mark.parametrize("differ", [False, True])
def test_parameters_that_show_dlpack_alone_are_compared(differ: bool) -> None:
    def check(comm: Communicator) -> None:
        array = np.full(3, float(comm.rank * differ))
        optimizer = ac.DistributedOptimizer(lambda params, grads: grads, comm=comm)
        params = [remote(array) if differ or comm.rank else array]
        with pytest.raises(ac.MismatchError, match=r"params\[0\]") if differ else nullcontext():
            optimizer(params, [np.ones(3)])

    def remote(array: np.ndarray) -> Mine:
        shown = Mine(array, _namespace())
        del shown.dtype
        return shown

    run(3, check)


def test_an_optimizer_may_keep_an_object_whose_dlpack_cannot_be_read() -> None:
    class Optimizer:
        def __init__(self) -> None:
            # As a column of text of pyarrow.
            self.names = SimpleNamespace(__dlpack__=list.pop, __dlpack_device__=lambda: (1, 0))

        def step(self, params: Any, grads: Any) -> Any:
            return grads

    def check(comm: Communicator) -> float:
        optimizer = ac.DistributedOptimizer(Optimizer(), comm=comm)
        return float(optimizer.step([np.zeros(1)], [np.full(1, float(comm.rank))])[0][0])

    assert run(3, check) == [1.0] * 3


@pytest.mark.parametrize("kind", ["nothing", "too long"])
@pytest.mark.parametrize("call", ["tree", "plan", "metrics", "exchange"])
def test_trees_and_exchange_name_the_class_too(call: str, kind: str) -> None:
    make, words = CANNOT[kind]
    calls: dict[str, Any] = {
        "tree": lambda comm, x: ac.allreduce_tree([x], comm=comm),
        "plan": lambda comm, x: comm.plan([x])([x]),
        "metrics": lambda comm, x: ac.mean_metrics([x], 1, comm=comm),
        "exchange": lambda comm, x: ac.exchange(np.ones(3), x),
    }

    def check(comm: Communicator) -> None:
        x = Mine(np.ones(3), make()) if comm.rank == 0 else np.ones(3)
        expected = TypeError if comm.rank == 0 else ac.PeerError
        with pytest.raises(expected, match=rf"Mine has an array namespace whose.*{words}"):
            calls[call](comm, x)

    run(1 if call == "exchange" else 2, check)


@pytest.mark.parametrize("call", ["bcast", "scatter", "scatterv"])
def test_dtypes_of_the_root_that_a_namespace_lacks_raise_on_all_ranks(call: str) -> None:
    def check(comm: Communicator) -> None:
        mine = Mine(np.ones(3, np.float32), _namespace(dtypes="f"))
        counts = () if call != "scatterv" else ([1, 1],) if comm.rank else (None,)
        method = getattr(comm, call)
        for dtype, fails in ((np.float64, True), (np.float32, False)):
            x, like = (np.ones((2, 3), dtype), None) if comm.rank else (None, mine)
            if fails:
                with pytest.raises(ac.PeerError if comm.rank else TypeError, match="float64"):
                    method(x, *counts, 1, like=like)
            else:
                result = method(x, *counts, 1, like=like)
                assert type(result) is (np.ndarray if comm.rank else Mine)

    run(2, check)
