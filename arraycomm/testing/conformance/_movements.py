"""Laws of collectives that move data, and of the arguments and results of all of them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from arraycomm._communicator import Communicator
from arraycomm._dtypes import OpName
from arraycomm._functions import allreduce_tree, synchronize
from arraycomm._messages.matching import ANY_SOURCE, ANY_TAG, Status
from arraycomm.testing import strategies as ranked
from arraycomm.testing._arrays.frameworks import elements_of
from arraycomm.testing._arrays.oracle import same_bits
from arraycomm.testing.conformance._checks import (
    check_copy,
    check_elements,
    check_like,
    native,
    neighbours_unchanged,
    overwrite,
    scribble,
)
from arraycomm.testing.conformance._inputs import (
    Arrays,
    Ragged,
    Reduction,
    Sealed,
    arrays,
    messages,
    moved_into,
    moved_shapes,
    objects,
    orders_of_ranks,
    ragged,
    reductions_of_rows,
    rows,
    sealed,
    small_and_long,
)
from arraycomm.testing.conformance._inputs import tags as message_tags
from arraycomm.testing.conformance._law import law, requested


class MovementLaws:
    """What collectives promise that move data, and all collectives of arguments and results."""

    @law(given_arrays=arrays(ranked.dtypes(movable=True), moved_shapes()))
    def test_allgather_stacks(self, comm: Communicator, given_arrays: Arrays) -> None:
        """Row r of the result is the array of rank r, in every bit."""
        x, want = given_arrays.build(comm.rank), np.stack(given_arrays.elements())
        for result in (comm.allgather(x), *requested(comm, "iallgather", x)):
            check_copy(check_like(result, x), want)

    @law(given_arrays=arrays(ranked.dtypes(movable=True), moved_shapes()), root=ranked.roots())
    def test_bcast_copies(self, comm: Communicator, given_arrays: Arrays, root: int) -> None:
        """Every rank gets the root's array, in every bit, and as an array of its own kind."""
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[root]
        given = x if comm.rank == root else None
        for result in (comm.bcast(x, root), *requested(comm, "ibcast", given, root, like=x)):
            check_copy(check_like(result, x), want)

    @law(
        given_arrays=arrays(ranked.dtypes(movable=True), moved_shapes()),
        root=ranked.roots(),
        how=ranked.per_rank(st.sampled_from(("nothing", "like", "x"))),
    )
    def test_bcast_needs_nothing_of_the_others(
        self, comm: Communicator, given_arrays: Arrays, root: int, how: str
    ) -> None:
        """Other ranks pass nothing or a prototype; they get arrays like the root's, or NumPy's."""
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[root]
        if comm.rank == root or how == "x":
            check_copy(check_like(comm.bcast(x, root), x), want)
        elif how == "like":
            check_copy(check_like(comm.bcast(None, root, like=x), x), want)
        else:
            got, prototype = comm.bcast(None, root), given_arrays.build(root)
            # NumPy's if the framework has no such dtype here.
            like = prototype if type(got) is type(prototype) else want
            check_copy(check_like(got, like), want)

    @law(drawn=moved_into(), root=ranked.roots())
    def test_moved_data_fills_any_out(
        self, comm: Communicator, drawn: tuple[Arrays, Any, Any], root: int
    ) -> None:
        """`out` may have any layout; the memory between its elements stays as it is."""
        given_arrays, out, stack = drawn
        x, elements = given_arrays.build(comm.rank), given_arrays.elements()
        with neighbours_unchanged(out):
            assert comm.bcast(x if comm.rank == root else None, root, out=out) is out
            check_copy(native(elements_of(out)), elements[root])
        with neighbours_unchanged(stack):
            assert comm.allgather(x, out=stack) is stack
            check_copy(native(elements_of(stack)), np.stack(elements))

    @law(given_arrays=arrays(ranked.dtypes(movable=True), moved_shapes()), root=ranked.roots())
    def test_gather_is_allgather_on_the_root_alone(
        self, comm: Communicator, given_arrays: Arrays, root: int
    ) -> None:
        """`gather` stacks the arrays on `root`, and gives None to the others."""
        x, want = given_arrays.build(comm.rank), np.stack(given_arrays.elements())
        result = comm.gather(x, root)
        assert (result is None) == (comm.rank != root)
        if result is not None:
            check_copy(check_like(result, x), want)

    @law(given_arrays=rows(small_and_long()), root=ranked.roots())
    def test_scatter_hands_out_rows(
        self, comm: Communicator, given_arrays: Arrays, root: int
    ) -> None:
        """Rank r gets row r of the root's array; the other ranks need not pass an array."""
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[root][comm.rank, ...]
        check_copy(check_like(comm.scatter(x, root, like=x), x), want)
        local = x if comm.rank == root else None
        check_copy(check_like(comm.scatter(local, root), want if local is None else x), want)
        for result in requested(comm, "iscatter", local, root, like=x):
            check_copy(check_like(result, x), want)

    @law(given_arrays=rows(small_and_long()))
    def test_alltoall_transposes(self, comm: Communicator, given_arrays: Arrays) -> None:
        """Row s on rank r is what rank s has in row r; two calls restore the input."""
        x, elements = given_arrays.build(comm.rank), given_arrays.elements()
        once = comm.alltoall(x)
        check_copy(check_like(once, x), np.stack([own[comm.rank, ...] for own in elements]))
        check_copy(elements_of(comm.alltoall(once)), elements[comm.rank])

    @law(drawn=ragged(), root=ranked.roots())
    def test_uneven_forms_join_rows(self, comm: Communicator, drawn: Ragged, root: int) -> None:
        """The v-forms join rows in rank order, and return how many rows came from each rank."""
        x, elements = drawn.arrays.build(comm.rank), drawn.arrays.elements()
        joined, counts = comm.allgatherv(x, return_counts=True)
        check_copy(check_like(joined, x), np.concatenate(elements))
        assert list(counts) == [len(own) for own in elements]
        gathered = comm.gatherv(x, root, return_counts=True)
        assert (gathered is None) == (comm.rank != root)
        if gathered is not None:
            check_copy(check_like(gathered[0], x), np.concatenate(elements))
            assert list(gathered[1]) == [len(own) for own in elements]
        share = comm.scatterv(x, drawn.counts[root], root, like=x)
        check_copy(check_like(share, x), drawn.rows(root, comm.rank))
        whole, shares = (x, drawn.counts[root]) if comm.rank == root else (None, None)
        for share in requested(comm, "iscatterv", whole, shares, root, like=x):
            check_copy(check_like(share, x), drawn.rows(root, comm.rank))
        for joined, counts in requested(comm, "iallgatherv", x, return_counts=True):
            check_copy(elements_of(joined), np.concatenate(elements))
            assert list(counts) == [len(own) for own in elements]
        for result in requested(comm, "igatherv", x, root, return_counts=True):
            assert (result is None) == (comm.rank != root)
        parts = [drawn.rows(sender, comm.rank) for sender in range(comm.size)]
        own = x, drawn.counts[comm.rank]
        for _, counts in requested(comm, "ialltoallv", *own, return_counts=True):
            assert list(counts) == [len(part) for part in parts]
        received, counts = comm.alltoallv(*own, return_counts=True)
        check_copy(check_like(received, x), np.concatenate(parts))
        assert list(counts) == [len(part) for part in parts]

    @law(given_arrays=messages(small_and_long()), order=orders_of_ranks(), tags=message_tags())
    def test_messages_arrive_as_they_were_sent(
        self, comm: Communicator, given_arrays: Arrays, order: Sequence[int], tags: Sequence[int]
    ) -> None:
        """The receiver need know neither shape nor dtype.

        Tags allow receiving in any order, and so do ranks.
        """
        dest, source = order[comm.rank], order.index(comm.rank)
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[source]
        check_copy(check_like(comm.sendrecv(x, dest, source, tags[0]), want), want)
        sent = [comm.isend(x, dest, tags[0]), comm.isend(np.arange(3), dest, tags[1])]
        check_copy(elements_of(comm.recv(source, tags[1])), np.arange(3))
        check_copy(elements_of(comm.recv(source, tags[0])), want)
        for request in sent:
            request.wait()
        sent = [comm.isend(np.array(tag), dest, tag) for tag in tags]
        assert [int(comm.recv(source, ANY_TAG)) for _ in tags] == list(tags)
        for request in sent:
            request.wait()
        sent = [comm.isend(np.array(comm.rank), other) for other in range(comm.size)]
        assert [int(comm.recv(other)) for other in order] == list(order)
        for request in sent:
            request.wait()
        sending, status = comm.isend(x, dest, tags[0]), Status()
        check_copy(elements_of(comm.recv(ANY_SOURCE, ANY_TAG, status=status)), want)
        assert status == Status(source, tags[0], want.dtype, want.shape, want.nbytes)
        sending.wait()

    @law(drawn=moved_into(), order=orders_of_ranks(), tags=message_tags())
    def test_messages_go_where_the_receiver_says(
        self, comm: Communicator, drawn: Any, order: Sequence[int], tags: Sequence[int]
    ) -> None:
        """`like` chooses framework and device, `out` the memory, which may be that of `x`."""
        given_arrays, out, _ = drawn
        dest, source = order[comm.rank], order.index(comm.rank)
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[source]
        sending = comm.isend(x, dest, tags[0])
        check_copy(check_like(comm.recv(source, tags[0], like=x), x), want)
        sending.wait()
        with neighbours_unchanged(out):
            assert comm.sendrecv(x, dest, source, tags[1], out=out) is out
            check_copy(native(elements_of(out)), want)
        sending, status = comm.isend(x, dest, tags[1]), Status()
        assert comm.irecv(source, tags[1], out=out, status=status).wait() is out
        sending.wait()
        sending = comm.isend(x, dest)
        assert comm.recv(source, out=out) is out
        sending.wait()
        assert (status.source, status.tag) == (source, tags[1])
        check_copy(native(elements_of(out)), want)
        sending = comm.isend(x, dest, tags[0])
        check_copy(check_like(comm.irecv(source, tags[0], like=x).wait(), x), want)
        sending.wait()
        result = comm.sendrecv(x, dest, source, tags[1], like=x, status=status)
        check_copy(check_like(result, x), want)
        assert (status.source, status.tag) == (source, tags[1])
        # Too long to be sent with what describes it.
        mine = np.arange(20_000) + comm.rank
        assert comm.sendrecv(mine, dest, source, out=mine) is mine
        check_copy(mine, np.arange(20_000) + source)

    @law(given_arrays=messages(moved_shapes()), tags=message_tags())
    def test_a_line_of_ranks_passes_on_what_it_gets(
        self, comm: Communicator, given_arrays: Arrays, tags: Sequence[int]
    ) -> None:
        """Blocking calls pass the array of rank 0 and the object of the last rank along a line."""
        size, rank, want = comm.size, comm.rank, given_arrays.elements()[0]
        for tag, limit in ((tags[0], None), (tags[1], 60.0)):
            x = comm.recv(rank - 1, tag, timeout=limit) if rank else given_arrays.build(0)
            if rank < size - 1:
                comm.send(x, rank + 1, tag, timeout=limit)
            check_copy(native(elements_of(x)), native(want))
        status = Status()
        obj = (
            comm.irecv_object(rank + 1, tags[1], status=status).wait() if rank < size - 1 else tags
        )
        if rank:
            comm.send_object(obj, rank - 1, tags[1], timeout=60.0)
        assert obj == tags
        assert status.tag == (tags[1] if rank < size - 1 else None)

    @law(everyones=sealed(ranked.per_rank(objects())), order=orders_of_ranks(), tags=message_tags())
    def test_objects_are_messages_too(
        self, comm: Communicator, everyones: Sealed[Any], order: Sequence[int], tags: Sequence[int]
    ) -> None:
        """They arrive equal and in order; `probe` names what is there, and leaves it."""
        dest, source = order[comm.rank], order.index(comm.rank)
        mine, want = everyones.value[comm.rank], everyones.value[source]
        sent = [comm.isend_object(mine, dest, tag) for tag in (*tags, tags[0])]
        sent.append(comm.isend(np.arange(3), dest, tags[1]))
        for tag in tags:
            found = comm.probe(source, tag)
            said = (found.source, found.tag, found.shape, found.dtype, found.nbytes)
            assert said == (source, tag, None, None, None)
            assert comm.iprobe(source, tag) == found
        assert comm.recv_object(source, tags[1]) == want
        assert comm.irecv_object(ANY_SOURCE, tags[0]).wait() == want
        check_copy(elements_of(comm.recv(source, tags[1])), np.arange(3))
        status = Status()
        assert comm.recv_object(source, ANY_TAG, status=status) == want
        assert (status.source, status.tag) == (source, tags[0])
        assert comm.iprobe(source, ANY_TAG) is None
        for request in sent:
            request.wait()

    @law(reduction=reductions_of_rows(), root=ranked.roots())
    def test_every_collective_fills_out(
        self, comm: Communicator, reduction: Reduction, root: int
    ) -> None:
        """A collective with `out` writes there what it would return, and returns `out`."""
        x = reduction.arrays.build(comm.rank)
        for name, args in arguments_of_collectives(comm, x, reduction.op, root).items():
            result = getattr(comm, name)(*args)
            want = None if result is None else np.array(elements_of(result))
            out = None if want is None else np.zeros_like(want)
            assert getattr(comm, name)(*args, out=out) is out, name
            if want is not None:
                check_elements(out, want, reduction.op)

    @law(given_arrays=rows(moved_shapes()))
    def test_rows_may_be_exchanged_in_place(self, comm: Communicator, given_arrays: Arrays) -> None:
        """`alltoall` may write over its argument."""
        x, elements = np.array(given_arrays.elements()[comm.rank]), given_arrays.elements()
        want = np.stack([own[comm.rank, ...] for own in elements])
        assert comm.alltoall(x, out=x) is x
        check_copy(x, want)

    @law(given_arrays=messages(moved_shapes()), order=orders_of_ranks())
    def test_finished_requests_are_finished(
        self, comm: Communicator, given_arrays: Arrays, order: Sequence[int]
    ) -> None:
        """If `test` returns True, a sent array may change, and a received one is there at once."""
        dest, source = order[comm.rank], order.index(comm.rank)
        x, want = given_arrays.build(comm.rank), given_arrays.elements()[source]
        sending = comm.isend(x, dest)
        if sending.test():
            overwrite(x)
        receiving = comm.irecv(source)
        finished = any(receiving.test() for _ in range(100))
        check_copy(elements_of(receiving.wait(0 if finished else None)), want)
        sending.wait()

    @law(given_arrays=rows(moved_shapes()))
    def test_arguments_may_change_after_a_call(
        self, comm: Communicator, given_arrays: Arrays
    ) -> None:
        """What a rank writes into its argument right after the call reaches no other rank."""
        x, elements = given_arrays.build(comm.rank), given_arrays.elements()
        result = comm.alltoall(x)
        overwrite(x)
        comm.barrier()
        check_copy(elements_of(result), np.stack([own[comm.rank, ...] for own in elements]))

    @law(
        reduction=reductions_of_rows(),
        root=ranked.roots(),
        seed=ranked.per_rank(st.integers(0, 99)),
    )
    def test_every_request_gives_what_its_blocking_call_gives(
        self, comm: Communicator, reduction: Reduction, root: int, seed: int
    ) -> None:
        """All collectives may be outstanding at once, and be waited for in any order."""
        x = reduction.arrays.build(comm.rank)
        arguments = arguments_of_collectives(comm, x, reduction.op, root)
        arguments = {name: each for name, each in arguments.items() if hasattr(comm, f"i{name}")}
        requests = {name: getattr(comm, f"i{name}")(*args) for name, args in arguments.items()}
        names = list(requests)
        random.Random(seed).shuffle(names)
        results = {name: requests[name].wait() for name in names}
        for name, args in arguments.items():
            blocking = getattr(comm, name)(*args)
            assert (results[name] is None) == (blocking is None), name
            if blocking is not None:
                check_elements(elements_of(results[name]), elements_of(blocking), reduction.op)

    @law(everyones=sealed(ranked.per_rank(objects())), root=ranked.roots())
    def test_objects_arrive_equal(
        self, comm: Communicator, everyones: Sealed[Any], root: int
    ) -> None:
        """Python objects arrive as equal objects of the same type."""
        local = everyones.value[comm.rank]
        assert comm.bcast_object(local, root) == everyones.value[root]
        gathered = comm.allgather_object(local)
        assert gathered == list(everyones.value)
        assert list(map(type, gathered)) == list(map(type, everyones.value))
        at_root = comm.gather_object(local, root)
        assert at_root == (gathered if comm.rank == root else None)

    @law(reduction=reductions_of_rows(), root=ranked.roots())
    def test_input_is_not_modified(
        self, comm: Communicator, reduction: Reduction, root: int
    ) -> None:
        """No call changes its arguments."""
        x = reduction.arrays.build(comm.rank)
        before = elements_of(x).tobytes()
        for name, call in _calls(comm, x, reduction.op, root).items():
            call()
            assert elements_of(x).tobytes() == before, f"{name} changed its argument"

    @law(reduction=reductions_of_rows(), root=ranked.roots())
    def test_results_are_nobody_elses(
        self, comm: Communicator, reduction: Reduction, root: int
    ) -> None:
        """A result shares memory with no argument, with no later result, and with no other rank.

        Every rank writes its number into its result, and finds it there after the next call, whose
        result is the same as the first one's.
        """
        x = reduction.arrays.build(comm.rank)
        before = elements_of(x).tobytes()
        for name, call in _calls(comm, x, reduction.op, root).items():
            # Only calls after the first one of their kind may take the fast path.
            call()
            first = call()
            values = [elements_of(result).copy() for result in first]
            writeable = [scribble(result, comm.rank + 1) for result in first]
            second = call()
            comm.barrier()
            for result, later, value, written in zip(first, second, values, writeable, strict=True):
                assert same_bits(elements_of(later), value), f"{name} gave something else"
                _check_no_alias(name, x, result, later)
                if written:
                    content = set(elements_of(result).tobytes())
                    assert content <= {comm.rank + 1}, f"something wrote to a result of {name}"
            assert elements_of(x).tobytes() == before, f"a result of {name} is its argument"


def arguments_of_collectives(
    comm: Communicator, x: Any, op: OpName, root: int
) -> dict[str, tuple[Any, ...]]:
    """Return the arguments of each collective that accepts an array with a row for each rank.

    The subject of a suite need not have all of them.
    """
    one_each = [1] * comm.size
    known: dict[str, tuple[Any, ...]] = {
        "allreduce": (x, op),
        "reduce": (x, op, root),
        "reduce_scatter": (x, op),
        "scan": (x, op),
        "exscan": (x, op),
        "bcast": (x, root),
        "allgather": (x,),
        "allgatherv": (x,),
        "gather": (x, root),
        "gatherv": (x, root),
        "scatter": (x, root),
        "scatterv": (x, one_each, root),
        "alltoall": (x,),
        "alltoallv": (x, one_each),
    }
    return {name: args for name, args in known.items() if hasattr(comm, name)}


def _calls(comm: Any, x: Any, op: OpName, root: int) -> dict[str, Callable[[], list[Any]]]:
    """Return functions that call a collective with `x`, and return its results."""

    def call(name: str, *args: Any) -> list[Any]:
        result = getattr(comm, name)(*args)
        return [] if result is None else [result]

    collectives: dict[str, Callable[[], list[Any]]] = {
        name: functools.partial(call, name, *args)
        for name, args in arguments_of_collectives(comm, x, op, root).items()
    }
    if not isinstance(comm, Communicator):
        return collectives
    plan = comm.plan([x], op)
    return {
        **collectives,
        "iallreduce": lambda: [comm.iallreduce(x, op).wait()],
        "synchronize": lambda: list(synchronize([x], root=root, comm=comm)),
        "plan": lambda: list(plan([x])),
        "allreduce_tree": lambda: list(allreduce_tree([x], op, comm=comm)),
    }


def _check_no_alias(name: str, *results: Any) -> None:
    memories = [elements_of(result) for result in results]
    for number, memory in enumerate(memories):
        for other in memories[:number]:
            assert not np.shares_memory(memory, other), f"a result of {name} shares memory"
