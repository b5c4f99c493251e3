"""Laws of wrong arguments: an error on every rank at once, after which the ranks go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

import arraycomm as ac
from arraycomm import Communicator
from arraycomm.adapters.numpy import SGD
from arraycomm.testing import given
from arraycomm.testing import strategies as ranked
from arraycomm.testing._ranks.rank_groups import RankGroup, lockstep_over
from properties.test_laws import TIMEOUT
from properties.test_machine import LAUNCHED


class Wrong(NamedTuple):
    """What a wrong call raises on its rank; `several` if it is wrong only if there are others."""

    kind: type[Exception]
    message: str
    call: Callable[[Communicator], Any]
    several: bool = False


FIVE = np.ones(5, np.float32)
LOCK, DATES = {"f": threading.Lock()}, [np.zeros(2, "M8[s]")]


def rows(c: Communicator, dtype: Any = float) -> Any:
    """Return a row for each rank."""
    return np.ones((c.size, 2), dtype)


def frozen(c: Communicator, *shape: int) -> Any:
    return np.broadcast_to(np.float32(1) if shape else 1.0, shape or (c.size, 2))


def after(c: Communicator) -> int:
    """Return the next rank, which is the root of a call that is wrong on another one."""
    return (c.rank + 1) % c.size


def joined(
    c: Communicator, *op: Any, weight: Any = 1, tree: Any = 1.0, calls: int = 1, **options: Any
) -> None:
    with ac.join(c) as block:
        for _ in range(calls):
            block.weight = weight
            ac.allreduce_gradients(tree, *op, comm=c, **options)


def trained(c: Communicator, **options: Any) -> None:
    ac.DistributedOptimizer(SGD(0.1), comm=c, **options)


def reduced(c: Communicator, **options: Any) -> Any:
    return ac.allreduce_gradients([1.0], comm=c, **options)


def gathered(c: Communicator, out: Any) -> Any:
    return c.gather(np.ones(2), c.rank, out=out)


def summed(c: Communicator, x: Any, count: int = 1, out: Any = None) -> Any:
    return c.reduce_scatter(x, counts=[count] * c.size, out=out)


def counted(c: Communicator, counts: Any) -> Any:
    return c.alltoallv(rows(c), counts)


def shared(c: Communicator, counts: Any, out: Any = None) -> Any:
    return c.scatterv(rows(c), counts, c.rank, out=out)


# Right calls with a root, by their names; None if the others need not call anything.
RIGHT: dict[str, Callable[[Communicator, int], Any] | None] = {
    "allreduce": lambda c, _: c.allreduce(FIVE),
    "allgatherv": lambda c, _: c.allgatherv(np.ones(c.rank)),
    "gather": lambda c, root: c.gather(1.0, root),
    "gatherv": lambda c, root: c.gatherv(np.ones(c.rank), root),
    "scatter": lambda c, root: c.scatter(None, root),
    "scatterv": lambda c, root: c.scatterv(None, None, root),
    "alltoall": lambda c, _: c.alltoall(rows(c)),
    "alltoallv": lambda c, _: c.alltoallv(np.ones(c.size), [1] * c.size),
    "reduce_scatter": lambda c, _: c.reduce_scatter(rows(c)),
    "scan": lambda c, _: c.scan(1.0),
    "exscan": lambda c, _: c.exscan(1.0),
    "gather_object": lambda c, root: c.gather_object(1, root),
    "bcast_object": lambda c, root: c.bcast_object(1, root),
    "mean_metrics": lambda c, _: ac.mean_metrics(2.0, np.float32(0.5), comm=c),
    "allreduce_gradients": lambda c, _: joined(c),
    "join": lambda c, _: joined(c, calls=0),
    "grid": lambda c, _: c.grid(1),
    "DistributedOptimizer": lambda c, _: trained(c),
    "message": None,
}
# Of calls that are not among these, the others call `allreduce`.
WRONG: dict[str, list[Wrong]] = {
    "allreduce": [
        Wrong(TypeError, "allreduce.*allreduce_tree", lambda c: c.allreduce([1, 2])),
        Wrong(TypeError, "bcast_object", lambda c: c.allreduce("no")),
        Wrong(TypeError, "Python objects", lambda c: c.allreduce(np.array([{}]))),
        Wrong(TypeError, "'mean' is not defined for int64", lambda c: c.allreduce(1, "mean")),
        Wrong(TypeError, 'use "or"', lambda c: c.allreduce(np.ones(2, bool))),
        Wrong(TypeError, "no order", lambda c: c.allreduce(1j, "min")),
        Wrong(TypeError, "only be moved", lambda c: c.allreduce(np.zeros(1, "M8[s]"))),
        Wrong(ValueError, "op must be one of sum, mean", lambda c: c.allreduce(1.0, "avg")),
        Wrong(TypeError, "name of a reduction", lambda c: c.allreduce(1.0, ["sum"])),
        Wrong(OverflowError, "allreduce", lambda c: c.allreduce(2**70)),
        Wrong(ValueError, "shape", lambda c: c.allreduce(np.ones(3), out=np.ones(4))),
        Wrong(TypeError, "dtype", lambda c: c.allreduce(np.ones(3), out=np.ones(3, "f4"))),
        Wrong(ValueError, "out must.* shape", lambda c: c.allreduce(FIVE, out=FIVE[:4].copy())),
        Wrong(ValueError, "out must.* shape", lambda c: c.allreduce(FIVE, out=FIVE[None].copy())),
        Wrong(TypeError, "out must.* dtype", lambda c: c.allreduce(FIVE, out=np.ones(5))),
        Wrong(BufferError, "read-only", lambda c: c.allreduce(FIVE, out=frozen(c, 5))),
        Wrong(ValueError, "timeout must be .*0", lambda c: c.allreduce(1.0, timeout=0)),
        Wrong(ValueError, r"timeout must be .*-1\.0", lambda c: c.allreduce(1.0, timeout=-1.0)),
    ],
    "bcast": [
        Wrong(ValueError, "root must be a rank", lambda c: c.bcast(1.0, c.size)),
        Wrong(ValueError, "root must be a rank", lambda c: c.reduce(1.0, root=-1)),
        Wrong(TypeError, "root must be an integer", lambda c: c.bcast(1.0, "0")),
        Wrong(TypeError, "passes the array to send", lambda c: c.bcast(None, c.rank)),
        Wrong(BufferError, "read-only", lambda c: c.bcast(rows(c), c.size - 1, out=frozen(c))),
    ],
    "split": [
        Wrong(TypeError, "color must be an integer", lambda c: c.split("a")),
        Wrong(TypeError, "key an integer", lambda c: c.split(0, 0.5)),
    ],
    "tree": [
        Wrong(TypeError, r"\['a'\]\[1\]", lambda c: ac.allreduce_tree({"a": [1.0, ""]}, comm=c)),
        Wrong(TypeError, r"tree\['n'\].*mean", lambda c: ac.allreduce_tree({"n": 3}, comm=c)),
        Wrong(ValueError, "op must be one of", lambda c: ac.allreduce_tree([], "avg", comm=c)),
        Wrong(ValueError, "plan: op must be one of", lambda c: c.plan([], "avg")),
        Wrong(TypeError, r"plan: tree\[0\].*cast", lambda c: c.plan([np.zeros(3, int)])),
        Wrong(TypeError, r"mean_metrics: tree\[0\]", lambda c: ac.mean_metrics(DATES, 1, comm=c)),
        Wrong(TypeError, r"\['f'\] cannot be", lambda c: ac.raise_on_difference(LOCK, comm=c)),
        Wrong(TypeError, r"tree\[0\]", lambda c: ac.synchronize([object()], comm=c)),
        *(
            Wrong(
                TypeError,
                r"tree\['a'\]: dtype .*",
                lambda c, x=leaf: ac.synchronize({"a": x}, comm=c),
            )
            for leaf in (np.array([1, None]), np.zeros(2, np.longdouble))
        ),
        Wrong(ValueError, "root must be a rank", lambda c: ac.synchronize([], root=c.size, comm=c)),
    ],
    "gradients": [
        Wrong(ValueError, "op must be", lambda c: ac.allreduce_gradients([], "avg", comm=c)),
        Wrong(ValueError, "missing must be", lambda c: reduced(c, missing="ones")),
        Wrong(ValueError, "compression must.*'float8'", lambda c: reduced(c, compression="float8")),
        Wrong(ValueError, "compression must be", lambda c: reduced(c, compression=np.float16)),
    ],
    "DistributedOptimizer": [
        *(
            Wrong(kind, f"{name} must be", lambda c, o={name: value}: trained(c, **o))
            for name, kind, values in (
                ("accumulate", ValueError, (0, -1)),
                ("accumulate", TypeError, (2.0, True, None)),
                ("bucket_bytes", ValueError, (0,)),
                ("compression", ValueError, ("float8", np.float16, True)),
                ("verify_every", ValueError, (-1,)),
                ("virtual_ranks", TypeError, (9.0, "9")),
                ("op", ValueError, ("max", "avg", None)),
            )
            for value in values
        ),
        Wrong(TypeError, "shard must be True or False", lambda c: trained(c, shard=1)),
    ],
    "allreduce_gradients": [
        Wrong(ValueError, "op must be", lambda c: joined(c, "max")),
        Wrong(ValueError, "op must be one of", lambda c: joined(c, "avg", tree=[])),
        Wrong(ValueError, "compression must be", lambda c: joined(c, compression="float8")),
        *(
            Wrong(ValueError, "weight must be", lambda c, w=weight: joined(c, weight=w))
            for weight in (-1, 1e39, 1e-46)
        ),
        Wrong(TypeError, "weight must be", lambda c: joined(c, weight="1")),
        Wrong(TypeError, "tree must be an array", lambda c: joined(c, tree="text")),
    ],
    "mean_metrics": [
        Wrong(kind, "weight must be", lambda c, w=weight: ac.mean_metrics(1.0, w, comm=c))
        for kind, weights in {
            ValueError: (-1, np.nan, np.inf, 1e308, 5e-324),
            TypeError: ("3", None, 1j, np.ones(1)),
        }.items()
        for weight in weights
    ]
    + [
        Wrong(TypeError, "onto must be", lambda c, o=onto: ac.mean_metrics(1.0, 1, onto=o, comm=c))
        for onto in (3, "", [{}], [[1.0], [[2.0], 3.0]])
    ],
    "bcast_object": [
        Wrong(TypeError, "timeout must be .*'1'", lambda c: c.bcast_object(1, timeout="1")),
        Wrong(TypeError, "timeout must be .*True", lambda c: c.bcast_object(1, timeout=True)),
    ],
    "allgather_object": [Wrong(Exception, "pickle", lambda c: c.allgather_object(LOCK))],
    "allgatherv": [
        Wrong(ValueError, "x must have an axis 0.*allgather", lambda c: c.allgatherv(1.0))
    ],
    "gatherv": [
        Wrong(ValueError, "there is gather", lambda c: c.gatherv(np.array(1), c.rank)),
        Wrong(ValueError, "root must be a rank", lambda c: c.gatherv(np.ones(2), -1)),
    ],
    "gather": [
        Wrong(TypeError, "gather: .*x must be an array", lambda c: c.gather([1], c.rank)),
        Wrong(ValueError, "root must be a rank", lambda c: c.gather(1.0, c.size)),
        Wrong(ValueError, "must have the shape", lambda c: gathered(c, np.ones(2))),
        Wrong(TypeError, "must have dtype", lambda c: gathered(c, rows(c, "f4"))),
        Wrong(BufferError, "read-only", lambda c: gathered(c, frozen(c))),
    ],
    "scatter": [
        Wrong(TypeError, "x is None on the root", lambda c: c.scatter(None, c.rank)),
        Wrong(ValueError, "one row for each", lambda c: c.scatter(np.ones(c.size + 1), c.rank)),
        Wrong(ValueError, "have the shape", lambda c: c.scatter(rows(c), c.rank, out=rows(c))),
        Wrong(BufferError, "read-only", lambda c: c.scatter(None, after(c), out=frozen(c)), True),
        Wrong(TypeError, "out must be an array", lambda c: c.scatter(None, after(c), out=1), True),
        Wrong(TypeError, "like must be", lambda c: c.scatter(None, after(c), like="torch"), True),
    ],
    "scatterv": [
        Wrong(TypeError, "x is None", lambda c: c.scatterv(None, [1], c.rank)),
        Wrong(ValueError, "there is scatter", lambda c: c.scatterv(1.0, [1], c.rank)),
        Wrong(TypeError, "counts must be a sequence", lambda c: shared(c, None)),
        Wrong(ValueError, r"\d in all, as x has", lambda c: shared(c, [*[1] * (c.size - 1), 0])),
        Wrong(ValueError, "the shape", lambda c: shared(c, [1] * c.size, np.ones((2, 2)))),
        Wrong(
            *(ValueError, "axis 0", lambda c: c.scatterv(None, None, after(c), out=np.ones(()))),
            several=True,
        ),
    ],
    "alltoall": [
        Wrong(ValueError, r"one row .* shape \(\d, …\)", lambda c: c.alltoall(np.ones(c.size + 1))),
        Wrong(TypeError, "must have dtype", lambda c: c.alltoall(rows(c), out=rows(c, int))),
    ],
    "alltoallv": [
        Wrong(ValueError, "there is alltoall", lambda c: c.alltoallv(1.0, [1])),
        Wrong(ValueError, "one length for each", lambda c: counted(c, [1] * c.size + [0])),
        Wrong(ValueError, r"\d in all", lambda c: counted(c, [2] * c.size)),
        Wrong(ValueError, "one length for each", lambda c: counted(c, [-1, *[1] * (c.size - 1)])),
        Wrong(TypeError, "integers", lambda c: counted(c, [1.0] * c.size)),
        Wrong(TypeError, "sequence of integers", lambda c: counted(c, 3)),
        Wrong(TypeError, "sequence of integers", lambda c: counted(c, "111")),
    ],
    "reduce_scatter": [
        Wrong(ValueError, "one row for", lambda c: c.reduce_scatter(np.ones((c.size + 1, 2)))),
        Wrong(ValueError, "must have the shape", lambda c: c.reduce_scatter(rows(c), out=rows(c))),
        Wrong(
            *(ValueError, r"each of the \d ranks, 4 in all, as x has rows; got \[3, [3, ]*3\]"),
            lambda c: summed(c, np.ones((4, 2)), 3),
            several=True,
        ),
        Wrong(TypeError, "sequence of integers", lambda c: c.reduce_scatter(rows(c), counts=3)),
        Wrong(ValueError, "counts shares out; got a 0-d array", lambda c: summed(c, 1.0)),
        Wrong(ValueError, "must have the shape", lambda c: summed(c, rows(c), out=np.ones(2))),
    ],
    "scan": [Wrong(BufferError, "read-only", lambda c: c.scan(rows(c), out=frozen(c)))],
    "exscan": [Wrong(TypeError, 'use "or"', lambda c: c.exscan(np.ones(2, bool)))],
    "gather_object": [
        Wrong(ValueError, "root must be", lambda c: c.gather_object(1, c.size)),
        Wrong(Exception, "pickle", lambda c: c.gather_object(LOCK, c.rank)),
    ],
    "grid": [
        Wrong(ValueError, r"dims must be .* is \d, or 0", lambda c: c.grid((c.size + 1,))),
        *(
            Wrong(ValueError, "dims must be numbers whose product", lambda c, n=dims: c.grid(n))
            for dims in [(-1,), ()]
        ),
        *(
            Wrong(ValueError, f"dims must be 1 to 64; got {number}", lambda c, n=number: c.grid(n))
            for number in (-1, 0, 65)
        ),
        Wrong(TypeError, "dims must be an integer or several; got 'a'", lambda c: c.grid("a")),
        Wrong(ValueError, "a bool for each of 1 dims", lambda c: c.grid(1, (True, False))),
    ],
    "message": [
        Wrong(ValueError, r"send: dest must be a rank.*got \d", lambda c: c.send(1, c.size)),
        Wrong(ValueError, "send: dest must be a rank.*got -1", lambda c: c.isend(1, -1)),
        Wrong(TypeError, "send: dest must be a rank.*got '0'", lambda c: c.send(1, "0")),
        Wrong(TypeError, "send: dest must be a rank.*got None", lambda c: c.send(1, None)),
        Wrong(TypeError, "send: dest must be a rank", lambda c: c.send(1, ac.ANY_SOURCE)),
        Wrong(ValueError, r"recv: source must be a rank.*got \d", lambda c: c.recv(c.size)),
        Wrong(ValueError, "recv: source must be a rank.*got -1", lambda c: c.irecv(-1)),
        Wrong(TypeError, r"recv: source must be a rank.*got 0\.0", lambda c: c.recv(0.0)),
        Wrong(TypeError, r"recv: source must be a .*comm\.ANY", lambda c: c.recv(ac.ANY_TAG)),
        Wrong(ValueError, "send: tag must be 0 to 1048575", lambda c: c.send(1, 0, -1)),
        Wrong(ValueError, "recv: tag must be 0 to", lambda c: c.recv(0, 1 << 20)),
        Wrong(TypeError, "recv: tag must be an integer", lambda c: c.irecv(0, "a")),
        Wrong(TypeError, r"tag must be an .*comm\.ANY", lambda c: c.recv(0, ac.ANY_SOURCE)),
        Wrong(ValueError, "send: dest must be a rank", lambda c: c.sendrecv(1, c.size, 0)),
        Wrong(TypeError, r"recv: status must be an arraycomm", lambda c: c.recv(0, status={})),
        Wrong(ValueError, "iprobe: source must be a rank", lambda c: c.iprobe(c.size)),
        Wrong(ValueError, "probe: tag must be 0 to", lambda c: c.probe(0, -1)),
        *(
            Wrong(kind, "recv: timeout must be", lambda c, t=timeout: c.recv(0, timeout=t))
            for kind, timeout in [(ValueError, 0), (ValueError, -1.0), (TypeError, "1")]
        ),
    ],
}
# Ranks without data take part all the same.
WRONG["join"] = WRONG["allreduce_gradients"]

# What is wrong with an `out` whose shape is known only when all have been heard, made from a right one.
WRONG_OUTS: list[tuple[type[Exception], str, Callable[[Any], Any]]] = [
    (ValueError, "must have the shape", lambda right: right[:-1].copy()),
    (ValueError, "must have the shape", lambda right: np.ones((len(right), 3))),
    (TypeError, "must have dtype", lambda right: right.astype("f8")),
    (BufferError, "read-only", lambda right: np.broadcast_to(right[0], right.shape)),
    (
        *(BufferError, "share memory|read-only"),
        lambda right: as_strided(right[0].copy(), right.shape, (0, 4)),
    ),
    (TypeError, "out must be an array", lambda _: "out"),
    (TypeError, "out must be an array", lambda _: 1.0),
    (OverflowError, "out", lambda _: 2**70),
]
if find_spec("jax") is not None:
    import jax

    WRONG_OUTS += [(BufferError, "immutable", lambda right: jax.numpy.ones(right.shape))]


class Refusals:
    """Subclasses say over what."""

    @given(ranks=range(1, 5), culprits=st.sets(ranked.roots(), min_size=1), timeout=TIMEOUT)
    def test_every_wrong_value_is_an_error_on_every_rank_which_go_on(
        self, comm: Communicator, culprits: set[int]
    ) -> None:
        """It names the argument; `PeerError` of the others tells the same, and who is to blame."""
        for name, wrong in [(name, each) for name, several in WRONG.items() for each in several]:
            operation = name if name in RIGHT else "allreduce"
            right = RIGHT[operation]
            if wrong.several and comm.size == 1:
                continue
            if comm.rank in culprits:
                with pytest.raises(wrong.kind, match=wrong.message):
                    wrong.call(comm)
            elif right is not None:
                with pytest.raises(ac.PeerError, match=wrong.message) as caught:
                    right(comm, min(culprits))
                blamed = caught.value.rank
                assert blamed in culprits
                assert f"{operation}: rank {blamed} raised" in str(caught.value)
                assert "test_refusal_laws.py" in caught.value.traceback
            # Repeated calls like this one take another way.
            assert comm.allreduce(FIVE).tolist() == [comm.size] * 5

    @given(
        ranks=range(2, 5),
        culprit=ranked.roots(),
        length=st.sampled_from((3, 9_000)),
        form=st.sampled_from(("", "i")),
        timeout=TIMEOUT,
    )
    def test_wrong_out_of_a_later_known_shape_concerns_its_rank_alone(
        self, comm: Communicator, culprit: int, length: int, form: str
    ) -> None:
        size, rank, root = comm.size, comm.rank, (culprit + 1) % comm.size
        x, counts = np.full((size * length, 2), rank + 1, np.float32), [length] * size

        def call(name: str, *arguments: Any, out: Any = None) -> Any:
            begun = getattr(comm, form + name)(*arguments, out=out)
            return begun.wait() if form else begun

        for name, arguments in {
            "allgatherv": (x,),
            "gatherv": (x, culprit),
            "alltoallv": (x, counts),
            "scatterv": (x, counts, root) if rank == root else (None, None, root),
        }.items():
            right = call(name, *arguments)
            # Others of `scatterv` know all but the length.
            for kind, message, make in WRONG_OUTS[: 1 if name == "scatterv" else None]:
                before = comm.iallgatherv(x)
                if rank == culprit:
                    with pytest.raises(kind, match=f"{name}: .*({message})"):
                        call(name, *arguments, out=make(right))
                else:
                    assert np.array_equal(call(name, *arguments), right)
                assert len(before.wait()) == size * len(x)


if LAUNCHED:
    from properties.test_laws import over_mpi

    class TestSharedMemory(Refusals):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=True))

    class TestMessages(Refusals):
        def _group(self) -> RankGroup:
            return lockstep_over(over_mpi(share=False))

else:

    class TestThreads(Refusals):
        pass
