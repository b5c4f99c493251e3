"""Laws of numbers as arguments: NumPy's and 0-d arrays are Python's own, and others are refused."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm import DistributedDataContainer as Data
from arraycomm._protocol.group import Options
from arraycomm.adapters.numpy import SGD
from arraycomm.testing import Schedule, given
from arraycomm.testing import run as run_threads
from tests.support.on_ranks import each_rank_of

X = np.arange(6.0)
Call = Callable[[Communicator, Any], Any]


def optimizer(name: str) -> Call:
    def make(c: Communicator, value: Any) -> None:
        ac.DistributedOptimizer(SGD(0.5), comm=c, **{name: value})

    return make


def joined(c: Communicator, value: Any) -> Any:
    with ac.join(comm=c):
        return ac.allreduce_gradients([X], comm=c, bucket_bytes=value)


INTEGERS: dict[str, Call] = {
    **{name: optimizer(name) for name in ("bucket_bytes", "accumulate", "verify_every")},
    "virtual_ranks": lambda c, n: optimizer("virtual_ranks")(c.split(c.rank), n),
    "tree": lambda c, n: ac.allreduce_tree(X, comm=c, bucket_bytes=n),
    "gradients": lambda c, n: ac.allreduce_gradients([X], comm=c, bucket_bytes=n),
    "join": joined,
    "bcast": lambda c, n: c.bcast(X, root=n),
    "synchronize": lambda c, n: ac.synchronize(X, comm=c, root=n),
    "send": lambda c, n: c.sendrecv(X, ac.PROC_NULL, ac.PROC_NULL, tag=n),
    "split": lambda c, n: c.split(n, key=n).size,
    "grid": lambda c, n: c.grid(n).dims,
    "dims": lambda c, n: c.grid([n, 0]).dims,
    "coords_of": lambda c, n: c.grid(1, periods=True).coords_of(n),
    "rank_at": lambda c, n: c.grid(1, periods=True).rank_at([n]),
    "axis": lambda c, n: c.grid(2).shift(n),
    "steps": lambda c, n: c.grid(1, periods=True).shift(0, n),
    "counts": lambda c, n: c.split(c.rank).scatterv(X[:1], [n]),
    "fsum": lambda c, n: ac.fsum(X.reshape(2, 3), n, comm=c),
    "println": lambda c, n: ac.println(ranks=[n], comm=c, file=io.StringIO()),
    "seed": lambda c, n: len(Data(X, comm=c, shuffle=True, seed=n)),
    "batches": lambda c, n: len([*Data(X, comm=c).batches(n)]),
    "Schedule": lambda c, n: Schedule(n),
    "run": lambda c, n: run_threads(n, lambda _: 3),
}
BOOLS: dict[str, Call] = {
    "shard": optimizer("shard"),
    "periods": lambda c, b: c.grid(1, periods=b).periods,
    "sub": lambda c, b: c.grid(1).sub([b]).dims,
    "return_counts": lambda c, b: type(c.allgatherv(X, return_counts=b)),
    "elementwise": lambda c, b: ac.op(max, elementwise=b),
    "println": lambda c, b: ac.println(timestamp=b, comm=c, file=io.StringIO()),
    "shuffle": lambda c, b: len(Data(X, comm=c, shuffle=b)),
    "pad": lambda c, b: len([*Data(X, comm=c).batches(4, pad=b)]),
    "exchange": lambda c, b: ac.exchange(X, X, copy=b),
}
SECONDS: dict[str, Call] = {
    "barrier": lambda c, s: c.barrier(timeout=s),
    "wait": lambda c, s: c.iallreduce(X).wait(timeout=s).sum(),
    "waitany": lambda c, s: ac.waitany([c.iallreduce(X)], timeout=s)[1].sum(),
    "run": lambda c, s: run_threads(1, lambda _: 3, timeout=s),
    "given": lambda c, s: callable(given(timeout=s)),
    "split": lambda c, s: Options(timeout=s),
}
ODD = (Fraction(1), Decimal(1), math.nan, math.inf, 1j)
# What no argument can be, though its type may be right.
ABSURD = [
    (INTEGERS, (10**5000, -(10**5000))),
    (SECONDS, (10**400, -(10**400), Fraction(10**400), math.nan, -math.inf, np.float32("nan"))),
]
# What is passed, those that mean the same, and those that are refused.
LAWS = [
    (INTEGERS, 1, (np.int64(1), np.int16(1), np.array(1)), (1.0, "1", np.float32(1), X, *ODD)),
    (BOOLS, True, (np.bool_(True),), (1, 0, "no", np.array(True), X)),
    (SECONDS, 9, (9.0, Fraction(9), np.int64(9), None), ("9", True, np.array(9.0), X, Decimal(9))),
]


@pytest.mark.parametrize(("calls", "plain", "same", "others"), LAWS, ids=("int", "bool", "s"))
@each_rank_of("several")
def test_numbers_of_numpy_are_those_of_python(
    comm: Communicator, calls: dict[str, Call], plain: Any, same: Any, others: Any
) -> None:
    for name, call in calls.items():
        expected = repr(call(comm, plain))
        for value in same:
            # To seconds and integers None is another value.
            assert repr(call(comm, value)) == expected or value is None, (name, value)
        for value in others:
            with pytest.raises((TypeError, ValueError), match=r"must be .*; got") as refused:
                call(comm, value)
            assert type(refused.value) is TypeError or calls is BOOLS, (name, value)


@pytest.mark.parametrize(("calls", "values"), ABSURD, ids=("int", "s"))
@each_rank_of("several")
def test_numbers_that_no_argument_can_be_are_refused_by_name(
    comm: Communicator, calls: dict[str, Call], values: Any
) -> None:
    for call in calls.values():
        for value in values:
            with pytest.raises(ValueError, match=r"must be .*; got"):
                call(comm, value)
