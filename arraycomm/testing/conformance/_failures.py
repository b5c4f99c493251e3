"""Laws of what happens if ranks do not agree."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast

import numpy as np
from hypothesis import strategies as st

from arraycomm._arrays.buffer import Array
from arraycomm._communicator import Communicator
from arraycomm._errors import CommTimeoutError, CommunicatorClosedError, MismatchError, PeerError
from arraycomm._functions import allreduce_gradients, allreduce_tree, synchronize
from arraycomm.testing import strategies as ranked
from arraycomm.testing.conformance._checks import raises
from arraycomm.testing.conformance._inputs import Sealed, sealed
from arraycomm.testing.conformance._law import SEVERAL, law, missing
from arraycomm.testing.conformance._movements import arguments_of_collectives

_Call = Callable[[Communicator, Array], Any]


def _then(*calls: _Call) -> _Call:
    """Return a function that makes these calls one after the other."""

    def make(comm: Communicator, x: Array) -> None:
        for call in calls:
            call(comm, x)

    return make


def _barrier(comm: Communicator, _: Array) -> None:
    comm.barrier()


def _allreduce(comm: Communicator, x: Array) -> Any:
    return comm.allreduce(x)


# For each kind of disagreement: the call of most ranks, and the call of one rank.
DISAGREEMENTS: Final[dict[str, tuple[_Call, _Call]]] = {
    "op": (_allreduce, lambda comm, x: comm.allreduce(x, "max")),
    "dtype": (_allreduce, lambda comm, x: comm.allreduce(x.astype(np.float64))),
    "shape": (_allreduce, lambda comm, x: comm.allreduce(x[:, None])),
    "length": (_allreduce, lambda comm, x: comm.allreduce(x[1:])),
    "number": (_allreduce, lambda comm, _: comm.allreduce(1.0)),
    "root": (lambda comm, x: comm.reduce(x, root=0), lambda comm, x: comm.reduce(x, root=1)),
    "length of bcast": (lambda comm, x: comm.bcast(x, 0), lambda comm, x: comm.bcast(x[1:], 0)),
    "operation": (_allreduce, lambda comm, x: comm.allgather(x)),
    "request": (_allreduce, lambda comm, x: comm.ireduce(x).wait()),
    "prefix": (lambda comm, x: comm.scan(x), lambda comm, x: comm.exscan(x)),
    "dtype of rows": (
        lambda comm, x: comm.allgatherv(x),
        lambda comm, x: comm.allgatherv(x.astype(np.float64)),
    ),
    "order": (_then(_allreduce, _barrier), _then(_barrier, _allreduce)),
    "one call more": (_allreduce, _then(_barrier, _allreduce)),
    "one call less": (_then(_barrier, _allreduce), _allreduce),
    "object": (lambda comm, x: comm.bcast_object(x, 0), lambda comm, x: comm.allgather_object(x)),
    "options": (lambda comm, _: comm.dup(), lambda comm, _: comm.dup(timeout=3.0)),
    "split": (lambda comm, _: comm.dup(), lambda comm, _: comm.split(0)),
    "structure": (
        lambda comm, x: allreduce_tree({"a": x}, comm=comm),
        lambda comm, x: allreduce_tree([x], comm=comm),
    ),
    "leaf": (
        lambda comm, x: synchronize({"a": x, "b": 1}, comm=comm),
        lambda comm, x: synchronize({"a": x, "b": 1.0}, comm=comm),
    ),
    "fusion": (
        lambda comm, x: allreduce_tree([x], comm=comm),
        lambda comm, x: allreduce_tree([x], bucket_bytes=1, comm=comm),
    ),
}

# For each kind of wrong argument: the error, and a call that raises it.
_WRONG_ARGUMENTS: Final[dict[str, tuple[type[Exception], _Call]]] = {
    "no array": (TypeError, lambda comm, _: comm.allreduce({"a": 1})),
    "objects": (TypeError, lambda comm, _: comm.allgather(np.array([{}]))),
    "op of dtype": (TypeError, lambda comm, x: comm.allreduce(x > 0, "sum")),
    "unknown op": (ValueError, lambda comm, x: comm.reduce(x, cast("Any", "average"))),
    "root": (ValueError, lambda comm, x: comm.bcast(x, comm.size)),
    "nothing to send": (TypeError, lambda comm, _: comm.bcast(None, comm.rank)),
    "shape of out": (ValueError, lambda comm, x: comm.allreduce(x, out=x[1:].copy())),
    "dtype of out": (TypeError, lambda comm, x: comm.allreduce(x, out=np.empty(len(x)))),
    "read-only out": (
        BufferError,
        lambda comm, x: comm.allreduce(x, out=np.broadcast_to(x[0], x.shape)),
    ),
    "large number": (OverflowError, lambda comm, _: comm.allreduce(2**64)),
    "leaf": (TypeError, lambda comm, x: allreduce_tree([x, "text"], comm=comm)),
    "no leaf": (TypeError, lambda comm, x: synchronize([x, object()], comm=comm)),
    "counts": (ValueError, lambda comm, x: comm.alltoallv(x, [len(x) + 1] * comm.size)),
    "color": (TypeError, lambda comm, _: comm.split(0.5)),  # type: ignore[call-overload]
    "unpicklable": (Exception, lambda comm, _: comm.allgather_object(threading.Lock())),
}


def calls_that_wait(comm: Communicator) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return all collectives, and what is made of these, with arguments that all ranks may pass."""
    x = np.ones((comm.size, 2))
    arguments = {
        **arguments_of_collectives(comm, x, "sum", 0),
        "barrier": (),
        "bcast_object": (1, 0),
        "allgather_object": (1,),
        "gather_object": (1, 0),
        "maxloc": (x,),
        "minloc": (x,),
        "plan": ([x],),
        "synchronize": ([x],),
        "allreduce_tree": ([x],),
        "allreduce_gradients": ([x],),
    }
    trees = (synchronize, allreduce_tree, allreduce_gradients)
    calls = {each.__name__: partial(each, comm=comm) for each in trees if not missing(comm, each)}
    calls |= {name: getattr(comm, name) for name in arguments if hasattr(comm, name)}
    return {name: (call, arguments[name]) for name, call in calls.items()}


class FailureLaws:
    """What collectives promise if ranks do not agree."""

    @law(
        ranks=SEVERAL,
        kinds=st.lists(st.sampled_from(sorted(DISAGREEMENTS)), min_size=1),
        culprit=ranked.roots(),
        count=st.sampled_from((2, 5_000, 40_000)),
        before=st.integers(0, 2),
    )
    def test_disagreement_is_an_error_on_every_rank(
        self, comm: Communicator, kinds: Sequence[str], culprit: int, count: int, before: int
    ) -> None:
        """If one rank makes another call, all raise `MismatchError`, and none hangs.

        The error names that rank. Later calls say that the communicator is closed; the one of which
        it is a duplicate still works.
        """
        x = np.ones(count, np.float32)
        for kind in kinds:
            usual, other = DISAGREEMENTS[kind]
            if missing(comm, usual, other):
                continue
            part = comm.dup()
            for _ in range(before):
                part.allreduce(x)
            with raises(MismatchError) as caught:
                (other if comm.rank == culprit else usual)(part, x)
            assert f"rank {culprit}" in str(caught[0]), caught[0]
            with raises(CommunicatorClosedError):
                part.barrier()
            assert comm.allreduce(1) == comm.size

    @law(
        wrong=sealed(ranked.per_rank(st.none() | st.sampled_from(sorted(_WRONG_ARGUMENTS)))),
        count=st.sampled_from((2, 40_000)),
    )
    def test_wrong_argument_is_an_error_on_every_rank(
        self, comm: Communicator, wrong: Sealed[Any], count: int
    ) -> None:
        """The ranks that pass one raise the built-in error, and the others `PeerError`.

        All ranks are still in step after that, and the communicator still works.
        """
        known = {kind for kind, (_, call) in _WRONG_ARGUMENTS.items() if not missing(comm, call)}
        kinds = [kind if kind in known else None for kind in wrong.value]
        culprits = [rank for rank, kind in enumerate(kinds) if kind is not None]
        kind, x = kinds[comm.rank], np.ones(count, np.float32)
        for _ in range(2):
            if kind is not None:
                error, call = _WRONG_ARGUMENTS[kind]
                with raises(error):
                    call(comm, x)
            elif culprits:
                with raises(PeerError) as caught:
                    comm.allreduce(x)
                assert caught[0].rank in culprits, f"rank {caught[0].rank} is not to blame"
            assert comm.allreduce(1) == comm.size

    @law(ranks=SEVERAL, culprit=ranked.roots(), count=st.sampled_from((2, 40_000)))
    def test_rank_that_leaves_is_an_error_on_the_others(
        self, comm: Communicator, culprit: int, count: int
    ) -> None:
        """If one rank has ended, the others' next call raises `PeerError` with its number."""
        x = np.ones(count, np.float32)
        comm.allreduce(x)
        if comm.rank == culprit:
            return
        with raises(PeerError) as caught:
            comm.allreduce(x)
        assert caught[0].rank == culprit, f"rank {caught[0].rank} is not to blame"
        with raises(CommunicatorClosedError):
            comm.barrier()

    @law(
        ranks=SEVERAL,
        culprit=ranked.roots(),
        how=st.sampled_from(("call", "call", "communicator")),
        which=st.integers(0, 99),
    )
    def test_rank_that_does_not_come_is_named(
        self, comm: Communicator, culprit: int, how: str, which: int
    ) -> None:
        """A wait has a limit, its call's before the communicator's; the error names the rank."""
        part = comm.dup(timeout=60.0 if how == "call" else 0.05)
        limit = 0.05 if how == "call" else None
        calls = calls_that_wait(part)
        call, arguments = calls[sorted(calls)[which % len(calls)]]
        if comm.rank != culprit:
            with raises(CommTimeoutError) as caught:
                call(*arguments, timeout=limit)
            # Between nodes others may not be known to have come either.
            named = re.findall(r"rank (\d+) is missing", str(caught[0]))
            assert str(culprit) in named, caught[0]
            assert str(comm.rank) not in named, caught[0]
            with raises(CommunicatorClosedError):
                part.barrier()
        assert comm.allreduce(1) == comm.size

    @law(
        ranks=SEVERAL,
        name=st.sampled_from(("recv", "recv_object", "probe", "sendrecv")),
        tag=st.integers(0, 9),
        receiver=ranked.roots(),
    )
    def test_message_that_does_not_come_is_named(
        self, comm: Communicator, name: str, tag: int, receiver: int
    ) -> None:
        """A receive or a look for a message waits as long as it says, and the others hear of it."""
        part, source = comm.dup(), (comm.rank - 1) % comm.size
        if name == "sendrecv":
            part.sendrecv(1, (comm.rank + 1) % comm.size, source, timeout=60.0)
            name = "recv"
        calls = {"recv": (source, tag), "recv_object": (source, tag), "probe": (source, tag)}
        # One rank alone: another one's wait would end with the first that gives up.
        if comm.rank == receiver:
            with raises(CommTimeoutError) as caught:
                getattr(part, name)(*calls[name], timeout=0.05)
            assert f"from rank {source} with tag {tag}" in str(caught[0]), caught[0]
        comm.barrier()
        with raises(CommunicatorClosedError if comm.rank == receiver else PeerError) as caught:
            part.barrier()
        assert comm.rank == receiver or caught[0].rank == receiver, caught[0]

    @law(ranks=SEVERAL, culprit=ranked.roots(), count=st.sampled_from((2, 40_000)))
    def test_exception_before_a_call_is_an_error_on_the_others(
        self, comm: Communicator, culprit: int, count: int
    ) -> None:
        """An exception that leaves `with comm:` on one rank is `PeerError` on the others.

        They learn of it in their next call on this communicator; other communicators still work.
        """
        x = np.ones(count, np.float32)
        expected_error = ArithmeticError if comm.rank == culprit else PeerError
        with raises(expected_error) as caught, comm.dup() as part:
            part.allreduce(x)
            if comm.rank == culprit:
                raise ArithmeticError("before the call")
            part.allreduce(x)
        if comm.rank != culprit:
            assert caught[0].rank == culprit, f"rank {caught[0].rank} is not to blame"
            assert "before the call" in caught[0].traceback, caught[0].traceback
        assert comm.allreduce(1) == comm.size
