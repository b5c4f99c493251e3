"""The device's way through the collectives, over devices in software: by NCCL, and by way of the host."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._cuda import streams
from arraycomm._cuda.links.link import Nothing
from arraycomm._cuda.links.nccl_link import NcclLink
from arraycomm.testing import run
from properties.test_device_laws import KINDS
from tests.support import internals
from tests.support.collectives import COLLECTIVES
from tests.support.device import in_own_stream, library, linked_devices
from tests.support.on_ranks import LAUNCH, SIZES, OnRanks, alone, each_rank_of

Array = np.ndarray[Any, Any]


# What a device adds is the same with all numbers of ranks with which they can differ.
_MANY = min(3, max(SIZES))


@pytest.fixture(params=sorted({1, _MANY}) if LAUNCH is None else [_MANY])
def size(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
def several() -> int:
    """A number of ranks with which ranks can differ."""
    return _MANY


@pytest.fixture
def on_devices(on_ranks: OnRanks) -> OnRanks:
    """Runs a function on some ranks, each in a stream of its own."""
    return lambda size, fn: on_ranks(size, in_own_stream(fn))


@pytest.fixture
def cuda() -> Iterator[Any]:
    """Devices whose calls go ahead of their headers."""
    with linked_devices("nccl") as machine:
        yield machine


@pytest.fixture(params=["nccl", "staged"])
def any_link(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Devices whose calls go ahead, and those whose arrays are copied for the host."""
    with linked_devices(request.param) as machine:
        yield machine


def _values(comm: Communicator, count: int, dtype: str = "float32") -> Array:
    """One row a rank, other values on every rank."""
    return (np.arange(comm.size * count) * 7 % 23 + comm.rank).astype(dtype).reshape(comm.size, -1)


def _there(x: Any) -> Any:
    import cupy

    return cupy.asarray(x)


def _is_there(x: Any) -> bool:
    import cupy

    return isinstance(x, cupy.ndarray)


def _host(x: Any) -> Any:
    return x.get() if _is_there(x) else x


def _hold(machine: Any) -> threading.Event:
    """Keep this thread's current stream busy until the event is set, or for 20 seconds."""
    import cupy

    event = threading.Event()
    stream = machine.stream(cupy.cuda.get_current_stream().ptr)
    stream.put("hold", lambda: event.wait(20))
    return event


def _wait_until(found: Any) -> None:
    deadline = time.monotonic() + 10
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found()


@pytest.mark.parametrize("name", COLLECTIVES)
@each_rank_of("several", by="on_devices")
def test_ranks_whose_arrays_are_on_the_host_meet_the_others(comm, name, any_link) -> None:
    """On none, and on every rank in turn; each result is where that rank's own array is."""
    for count in (0, 2, 9000):
        x = _values(comm, count)
        want = COLLECTIVES[name](comm, x)
        for odd in range(-1, comm.size):
            for on_host in (True, False):
                mine = x if (comm.rank == odd) == on_host else _there(x)
                got = COLLECTIVES[name](comm, mine)
                assert (got is None) == (want is None)
                assert want is None or np.array_equal(_host(got), want)


@each_rank_of("several", "torch", by="on_devices")
def test_prepared_call_meets_ranks_on_devices(comm, torch, any_link) -> None:
    """The first rank's call was prepared for the host; it waits for what is written to a device."""
    x = _values(comm, 4)
    want, tensor = comm.allreduce(x), torch.from_numpy(x)
    for _ in range(3):
        comm.allreduce(tensor)
    for _ in range(5):
        out = _there(np.zeros_like(x))
        mine = tensor if comm.rank == 0 else _there(x)
        assert comm.allreduce(mine, out=out) is out
        assert np.array_equal(_host(out), want)
        assert np.array_equal(_host(comm.iallreduce(mine).wait()), want)


@pytest.mark.parametrize("any_link", ["first none"], indirect=True)
@each_rank_of("several", by="on_devices")
def test_without_a_device_on_one_rank_all_are_staged(comm, any_link) -> None:
    x = _values(comm, 4)
    for _ in range(3):
        got = comm.allreduce(_there(x) if comm.rank else x)
        assert _is_there(got) == bool(comm.rank)
        assert np.array_equal(_host(got), comm.allreduce(x))
    for one in (comm, comm.dup()):
        found = internals.devices(one)
        assert (found.negotiated, found.link) == (True, None)
        assert found.reason == "rank 0: no device"


@pytest.mark.parametrize("any_link", ["nccl", "first none"], indirect=True)
@each_rank_of("several", by="on_devices")
def test_requests_may_begin_before_the_choice_of_a_link_or_after(comm, any_link) -> None:
    """Ranks that choose a link in a request meet those that begin it late, and go on without a wait for its result."""
    x = _values(comm, 5)
    want = comm.allreduce(x), comm.allgather(x)
    early = comm.rank == 0
    if not early:
        time.sleep(0.02)
    first = comm.iallreduce(_there(x))
    got = [] if early else [_host(first.wait())]
    second = comm.iallgather(_there(x))
    if early:
        got = [_host(first.wait())]
    got.append(_host(second.wait()))
    comm.barrier()
    for found, right in zip(got, want, strict=True):
        assert np.array_equal(found, right)


@each_rank_of("several", by="on_devices")
def test_call_returns_before_the_others_have_come(comm, cuda) -> None:
    """Only the header is still to be seen to; the next call waits for it."""
    with comm.dup() as together:
        x = _there(np.ones(5, "float32"))
        comm.allreduce(x)
        together.barrier()
        if comm.rank:
            together.recv(0)
        got = comm.allreduce(x)
        if comm.rank == 0:
            for rank in range(1, comm.size):
                together.send(np.ones(1), rank)
        comm.barrier()
        together.barrier()
        assert (_host(got) == comm.size).all()


def _let_come(comm: Communicator) -> None:
    """End the others' wait for a message of this rank."""
    for rank in range(1, comm.size):
        comm.send(np.ones(1), rank)


def _note_aborts(comm: Communicator) -> list[float]:
    """Return a list that gets the times at which the link of a communicator is aborted."""
    link: Any = internals.device_link(comm)
    aborted, abort = [], link.abort

    def noted() -> None:
        aborted.append(time.monotonic())
        abort()

    link.abort = noted
    return aborted


def _then_barrier(comm: Communicator, call: Any) -> None:
    """Make a call, whose error may be seen there already, and another."""
    made = call()
    if isinstance(made, ac.Request):
        made.wait()
    comm.barrier()


# Over MPI other ranks would wait for the data of one that is given up.
@alone
@pytest.mark.parametrize("within", [False, True], ids=["while nothing is called", "within a call"])
@each_rank_of("several", by="on_devices")
def test_rank_that_does_not_come_is_noticed(comm, within, cuda) -> None:
    """The caller may be waiting for its device: the watch ends what is under way there.

    Within a call it waits as to see whether leaves are tied; then its end is not on the stream yet.
    """
    x = _there(np.ones(5, "float32"))
    comm.allreduce(x)
    link: Any = internals.device_link(comm)
    aborted, together = _note_aborts(comm), comm.dup()
    internals.set_timeout(comm, 0.3)
    if comm.rank:
        together.recv(0)
        return

    class Waits(type(link)):  # type: ignore[misc]
        def allgather(self, *arguments: Any) -> Any:
            handle = super().allgather(*arguments)
            while not handle.done():
                time.sleep(0.001)
            _host(x)
            return handle

    if within:
        # By a call in full, which no other one has been like.
        link.__class__, x = Waits, _there(np.ones(6, "float32"))
    got = comm.allreduce(x)
    if not within:
        assert np.isnan(_host(got)).all()  # spoilt, once it is given up
        assert aborted
    with pytest.raises(ac.CommTimeoutError, match="is missing"):
        comm.barrier()
    _let_come(together)


# Over MPI other ranks would wait for the data of one that is given up.
@alone
@each_rank_of("several", by="on_devices")
def test_device_that_does_not_come_to_the_end_is_given_up(comm, cuda) -> None:
    """Every rank has called; but the data moves no more, and no error tells why."""
    x = _there(np.ones(5, "float32"))
    comm.allreduce(x)
    link: Any = internals.device_link(comm)
    together, held = comm.dup(), []

    class Held(type(link)):  # type: ignore[misc]
        def allgather(self, *arguments: Any) -> Any:
            held.append(_hold(cuda))
            return super().allgather(*arguments)

    # Each call in full has a copy of the link, in its own stream.
    link.__class__ = Held
    aborted = _note_aborts(comm)
    internals.set_timeout(comm, 0.3)
    got = comm.allreduce(_there(np.ones(6, "float32")))
    _wait_until(lambda: aborted)
    for event in held:
        event.set()
    assert np.isnan(_host(got)).all()
    with pytest.raises((ac.CommTimeoutError, ac.PeerError), match=r"its data did not come|rank"):
        comm.barrier()
    together.barrier()


@each_rank_of("several", by="on_devices")
def test_own_work_before_a_call_may_take_longer_than_the_timeout(comm, cuda) -> None:
    """Other ranks are waited for from where the device comes to the call."""
    x = _there(np.ones(5, "float32"))
    comm.allreduce(x)
    aborted, together = _note_aborts(comm), comm.dup()
    internals.set_timeout(comm, 0.4)
    together.barrier()
    held = _hold(cuda)
    got = comm.allreduce(x)
    time.sleep(0.8)
    together.barrier()
    held.set()
    assert (_host(got) == comm.size).all()
    comm.barrier()
    assert not aborted


@pytest.fixture
def one_each(several: int) -> Iterator[Any]:
    """A device for each rank."""
    with linked_devices("nccl", several) as machine:
        yield machine


@each_rank_of("several", by="on_devices")
def test_parts_of_the_ranks_stay_on_the_devices_of_the_whole(comm, one_each) -> None:
    """Also if a part, in which local ranks differ, has the first array on a device."""
    import cupy

    parts = [comm.split(min(comm.rank, 1)), comm.split(0, key=-comm.rank), comm]
    with cupy.cuda.Device(comm.local_rank), cupy.cuda.Stream(non_blocking=True) as stream:
        for part in parts:
            assert part is not None
            assert part.allreduce(cupy.ones(3)).device.id == comm.local_rank
        stream.synchronize()


@each_rank_of("several", by="on_devices")
def test_without_the_check_arrays_are_staged_unless_a_link_is_there(comm, cuda) -> None:
    x = _there(np.full(9000, comm.rank, "float32"))
    with comm.dup(check=False) as unchecked:
        for _ in range(2):
            assert _host(unchecked.allreduce(x))[0] == sum(range(comm.size))
        assert internals.device_link(unchecked) is None


# Trees ------------------------------------------------------------------------------------------


def _tree(comm: Communicator, where: str) -> dict[str, Any]:
    """Leaves of several dtypes, of which those named in `where` are on the device."""
    x = np.arange(6, dtype="float32").reshape(2, 3) + comm.rank
    leaves = {"a": x, "b": x.astype("float64")[0], "c": x[:0], "d": x * 3, "e": x[1, 1:2] * 5}
    return {name: _there(x) if name in where else x for name, x in leaves.items()}


def _same(got: Any, want: Any) -> bool:
    return all(np.array_equal(_host(got[name]), want[name]) for name in want)


@each_rank_of("several", by="on_devices")
def test_tree_that_is_elsewhere_on_other_ranks_goes_by_the_host(comm, any_link) -> None:
    want = ac.allreduce_tree(_tree(comm, ""), "sum", comm=comm)
    plan = comm.plan(_tree(comm, ""), "sum")
    for where in ("abcde"[comm.rank :], "" if comm.rank else "abcde", "ae", "abcde"):
        got = ac.allreduce_tree(_tree(comm, where), "sum", comm=comm)
        assert _same(got, want)
        assert _same(plan(_tree(comm, where)), want)
    assert np.array_equal(_host(comm.allreduce(_there(want["a"]))), want["a"] * comm.size)


@pytest.mark.parametrize("name", ["allreduce_tree", "Plan"])
@each_rank_of("several", by="on_devices")
def test_tree_on_devices_goes_ahead_of_its_header(comm, name, cuda) -> None:
    """As one array does: the host waits for no other, and what differs is raised by the next call."""
    together = comm.dup()
    tree = _tree(comm, "abcde")
    plan = comm.plan(tree, "sum")
    call = plan if name == "Plan" else lambda tree: ac.allreduce_tree(tree, "sum", comm=comm)
    call(tree)
    together.barrier()
    if comm.rank:
        together.recv(0)
    got = call(tree)
    if comm.rank == 0:
        _let_come(together)
    comm.barrier()
    want = ac.allreduce_tree(_tree(comm, ""), "sum", comm=comm)
    assert _same(got, want)
    differing = (lambda: call(tree)) if comm.rank else (lambda: comm.allreduce(tree["a"]))
    with pytest.raises(ac.MismatchError, match=rf"allreduce\(sum\).*{name}\(sum\) of 5 leaves"):
        _then_barrier(comm, differing)
    together.barrier()


@each_rank_of("several", by="on_devices")
def test_first_gradients_of_all_may_be_missing(comm, any_link) -> None:
    """Where the ranks are yet to choose a link, and this one has no array to tell of."""
    x = np.arange(5, dtype="float32")
    for _ in range(2):
        tree = {"a": None if comm.rank == 0 else _there(x)}
        got = ac.allreduce_gradients(tree, "sum", comm=comm)
        assert np.array_equal(_host(got["a"]), x * (comm.size - 1))


# NCCL that cannot be used -----------------------------------------------------------------------


@pytest.fixture(params=["refuses", "does not connect", "gathers wrongly"])
def failing(cuda: Any, request: pytest.FixtureRequest) -> Iterator[str]:
    """Let NCCL not join the ranks; give what is said of it."""
    from cupy import _nccl

    if request.param == "refuses":
        library().fails["ncclCommInitRankConfig"] = 5
        yield "the cable is out"
    elif request.param == "does not connect":
        with mock.patch.object(_nccl.Mailbox, "connect", return_value=False):
            yield "had not met after 1 s"
    else:
        usual = NcclLink.allgather

        def allgather(link: NcclLink, recv: Any) -> Any:
            usual(link, recv)
            recv.buffer[...] = link.memory.upload(np.zeros(recv.buffer.nbytes, np.uint8))
            return Nothing()

        with mock.patch.object(NcclLink, "allgather", allgather):
            yield "wrong order: [0, 0"


@each_rank_of("several", by="on_devices")
def test_nccl_that_does_not_join_the_ranks_leaves_it_to_staging(comm, failing) -> None:
    """Within a limit of its own; where it was asked for by name, that is an error."""
    limit = 2 if "had not met" in failing else 20
    with comm.dup(timeout=limit) as alone:
        x = _there(_values(alone, 5))
        for _ in range(2):
            assert np.array_equal(_host(alone.allreduce(x)), comm.allreduce(_host(x)))
        told = str(ac.explain(x, comm=alone))
        with comm.dup(timeout=limit) as strict, pytest.raises(ac.BackendUnavailableError) as raised:
            internals.require_backend(strict, "nccl")
    for text in (told, str(raised.value)):
        for part in (failing, "rank 0: NCCL", "NCCL_DEBUG=INFO", "NCCL_SOCKET_IFNAME"):
            assert part in text


# Threads and streams ----------------------------------------------------------------------------


def _calls_of(comm: Communicator, x: Any) -> list[Any]:
    """Start calls whose results are made before their headers are read, and after."""
    return [
        comm.iallreduce(x),
        comm.iallgatherv(x),
        comm.ialltoallv(x, [1] * comm.size),
        comm.iscan(x, out=_there(np.zeros(x.shape, x.dtype))),
    ]


@each_rank_of("several", by="on_devices")
def test_steps_keep_to_the_callers_stream_in_whichever_thread(comm, any_link) -> None:
    """The first call chooses the link. Over NCCL no other thread puts work on the device, elsewhere the progress thread."""
    import cupy

    mine = cupy.cuda.get_current_stream()
    x = _there(_values(comm, 900))
    comm.barrier()
    any_link.log.clear()
    comm.barrier()
    requests = [request for _ in range(2) for request in _calls_of(comm, x)]
    with cupy.cuda.Stream(non_blocking=True):
        # Nobody waits: the progress thread has to do it all.
        _wait_until(lambda: internals.engine(comm).idle)
    blocking = [comm.allgatherv(x), comm.allreduce(x)]
    results = [request.wait() for request in requests] + blocking
    assert all(map(_is_there, results))
    mine.synchronize()
    comm.barrier()
    # Its own is for calls that other ranks' arrays bring to devices before the link is chosen here.
    own = internals.device_link(comm).memory.own_stream
    streams = {stream for pair in comm.allgather_object((mine.ptr, own)) for stream in pair}
    notes = [note for note in any_link.log if note.what != "free"]
    elsewhere = [note for note in notes if note.stream not in streams]
    assert not elsewhere
    async_check = internals.device_link(comm).async_check
    assert async_check or any(note.thread == "arraycomm-progress" for note in notes)


@each_rank_of("several", by="on_devices")
def test_requests_are_on_the_device_over_nccl_when_their_calls_return(comm, cuda) -> None:
    """So what several communicators put there has the order of the program; ranks that come late are waited for."""
    x = _there(_values(comm, 900))
    comms = [comm.dup() for _ in range(2)]
    for turn in range(4):
        time.sleep(0.005 * (comm.rank == turn))
        requests = [request for one in comms for request in _calls_of(one, x)]
        assert [internals.devices(one).reason for one in comms] == ["", ""]
        assert all(map(internals.is_finished, requests))
        for request in requests[:: -1 if turn % 2 else 1]:
            assert not np.isnan(_host(request.wait())).any()
    for one in comms:
        one.free()


@each_rank_of("several", by="on_devices")
def test_who_waits_in_another_stream_finds_its_result_there(comm, any_link) -> None:
    import cupy

    mine, other = cupy.cuda.get_current_stream(), cupy.cuda.Stream(non_blocking=True)
    x = _there(np.ones(900, "float32"))
    comm.allreduce(x)
    request = comm.iallreduce(x)
    with other:
        got = request.wait()
        assert (_host(got) == comm.size).all()
    assert {other.ptr, mine.ptr} <= {stream for stream, _ in _waits(any_link)}
    before = len(_waits(any_link))
    request = comm.iallreduce(x)
    while not request._task.finished:
        time.sleep(0.001)
    assert mine.ptr not in [stream for stream, _ in _waits(any_link)[before:]]
    assert (_host(request.wait()) == comm.size).all()
    assert mine.ptr in [stream for stream, _ in _waits(any_link)[before:]]


@each_rank_of("several", by="on_devices")
def test_a_call_that_all_ranks_leave_is_over_on_the_device(comm, cuda) -> None:
    """Else it would be taken for one that waits there for other ranks, until the time is up."""
    import cupy

    x = _there(np.ones(3, "float32"))
    comm.allreduce(x)
    with pytest.raises((ac.PeerError, ValueError), match="dtype"):
        comm.bcast(cupy.ndarray(3, "i4,i4") if comm.rank == 0 else None, like=x)
    until = time.monotonic() + 5
    while internals.devices(comm).under_way:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["allreduce", "bcast"])
@each_rank_of("several", by="on_devices")
def test_a_group_may_end_while_a_prepared_call_looks_at_its_arrays(comm, cuda, name) -> None:
    x, call = _there(np.ones(3, "float32")), getattr(comm, name)
    for _ in range(2):
        call(x)
    (path,) = internals.fast_paths(comm)._paths.values()
    look, error = path._prepared.look, ac.TransportError("gone")
    path._prepared.look = lambda *a, **k: (look(*a, **k), internals.close(comm, error))[0]
    with pytest.raises(ac.ArrayCommError):
        call(x)


def _waits(machine: Any) -> list[tuple[int, int]]:
    """Return which streams wait for which."""
    return [(note.stream, note.after) for note in machine.log if note.after is not None]


@each_rank_of("several", by="on_devices")
def test_capture_on_one_rank_is_an_error_on_all(comm, cuda) -> None:
    import cupy

    x = _there(np.ones(5, "float32"))
    captured = cupy.cuda.Stream(non_blocking=True)
    if comm.rank == 0:
        captured.begin_capture()
    with captured if comm.rank == 0 else cupy.cuda.get_current_stream():
        with pytest.raises(ac.PeerError if comm.rank else ValueError, match="CUDA graph"):
            comm.allreduce(x)
        with pytest.raises(ac.PeerError if comm.rank else ValueError, match="CUDA graph"):
            ac.allreduce_tree({"a": x}, "sum", comm=comm)
    captured.end_capture()
    assert (_host(comm.allreduce(x)) == comm.size).all()


# What waits outside Python ----------------------------------------------------------------------


# Over MPI other ranks would wait for the data of one that is given up.
@alone
@pytest.mark.parametrize("call", ["allreduce", "iallreduce"])
@each_rank_of("several", by="on_devices")
def test_header_is_checked_while_a_thread_waits_for_cuda(comm, call, cuda) -> None:
    """As one does that takes memory, or loads a kernel, behind a movement whose peers do not come."""
    comm.allreduce(_there(np.ones(5, "float32")))
    link: Any = internals.device_link(comm)
    aborted = _note_aborts(comm)
    fold = link.memory.fold

    def wait_for_an_abort(*arguments: Any) -> None:
        _wait_until(lambda: aborted)
        fold(*arguments)

    link.memory.fold = wait_for_an_abort
    # Nothing is under way any more, and the other rank is late.
    time.sleep(0.15 * (1 + comm.rank))
    x = _there(np.ones(5 + comm.rank, "float32"))
    with pytest.raises(ac.MismatchError, match=r"float32 \(6,\)"):
        _then_barrier(comm, lambda: getattr(comm, call)(x))


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if "v" not in name])
def test_rank_that_ends_has_completed_the_calls_that_it_made(name, cuda) -> None:
    """Else ranks whose devices are later take it for one that has left a call."""
    comms = {}

    def calls(comm: Communicator) -> None:
        comms[comm.rank] = comm
        x = _there(_values(comm, 5))
        for _ in range(4):
            COLLECTIVES[name](comm, x)

    run(3, in_own_stream(calls))
    groups = [internals.group(comms[rank]) for rank in range(3)]
    # Nobody tells itself.
    left = groups[0].control.notes.exit_notices() | groups[1].control.notes.exit_notices()
    assert [left[rank].step for rank in range(3)] == [group.control.step for group in groups]


@each_rank_of("several", by="on_devices")
def test_what_the_device_has_finished_with_is_let_go_between_calls(comm, cuda) -> None:
    """As an array of JAX, which cannot be donated meanwhile."""
    x = _there(np.ones(5, "float32"))
    comm.allreduce(x)
    kept = threading.Event()
    streams.LEASES.add(internals.device_link(comm).memory.record(), kept)
    there = weakref.ref(kept)
    del kept
    comm.allreduce(x)
    _wait_until(lambda: there() is None)


@each_rank_of("several", by="on_devices")
def test_array_that_is_reshaped_before_its_request_is_waited_for_prepares_no_call(
    comm, cuda
) -> None:
    """Else calls with arrays as it was would return others."""
    import cupy

    comm.allreduce(cupy.full(7, 1.0, "float32"))
    x = cupy.full(4, 1.0, "float32")
    request = comm.iallreduce(x)
    x._show(x.elements.reshape(2, 2))
    request.wait()
    for _ in range(3):
        assert comm.allreduce(cupy.full(4, 1.0, "float32")).shape == (4,)


@each_rank_of("several", by="on_devices")
def test_arrays_of_the_first_call_are_let_go_though_calls_like_it_are_prepared(comm, cuda) -> None:
    import cupy

    for call in (comm.allreduce, lambda x: comm.iallreduce(x).wait(), comm.bcast):
        x = cupy.ones(comm.size, "float32")
        there = weakref.ref(x)
        call(x)
        cupy.cuda.get_current_stream().synchronize()
        del x
        _wait_until(lambda there=there: there() is None)


@each_rank_of("several", by="on_devices")
def test_what_waits_for_its_header_on_devices_is_recorded(comm, cuda) -> None:
    """Gradients of all ranks, and buckets of optimizers, whose headers have a word of their own each time."""
    from arraycomm._communicator import runner_of
    from arraycomm._training.rounds import Bucket, Part, Place, Rounds

    placements, put = runner_of(comm).placements, []
    usual = placements.put
    placements.put = lambda *args, **kwargs: put.append(args) or usual(*args, **kwargs)
    tree = {0: _there(_values(comm, 5)), 1: _there(np.ones(3, "int32"))}
    rounds, bucket = Rounds(comm, "sum", {"bucket_bytes": 1 << 20, "compression": None}), None

    def part(number):
        return Part(bucket, lambda: tree, Place(number), may_overwrite=True)

    calls = (
        lambda _: ac.allreduce_gradients(tree, "sum", comm=comm),
        lambda n: rounds.reduce(part(n)).leaves,
        lambda n: rounds.start(part(n)).wait().leaves,
    )
    for call in calls:
        bucket = Bucket(1, range(2))
        first = [_host(leaf) for leaf in call(1).values()]
        for number in range(2, 5):
            assert all(map(np.array_equal, map(_host, call(number).values()), first))
        before = len(put)
        call(5)
        assert len(put) == before + 1


@each_rank_of("several", by="on_devices")
def test_calls_are_recorded_anew_in_the_stream_to_which_a_program_has_gone(comm, cuda) -> None:
    """Not in one from which it soon comes back."""
    import cupy

    from arraycomm._communicator import runner_of

    x, other, counts = _there(np.ones(4, "float32")), cupy.cuda.Stream(non_blocking=True), []
    placements = runner_of(comm).placements
    comm.allreduce(x)
    with mock.patch.object(placements, "put", wraps=placements.put) as put:
        for elsewhere, here in ((7, 1), (7, 1), (20, 0)):
            before = put.call_count
            with other:
                assert {comm.allreduce(x).get()[0] for _ in range(elsewhere)} == {comm.size}
            assert {comm.allreduce(x).get()[0] for _ in range(here)} <= {comm.size}
            counts.append(put.call_count - before)
    assert counts == [1, 1, 11]


def _counts(comm: Communicator, kind: str, turns: int) -> list[dict[str, dict[str, float]]]:
    """Return what two communicators count, of which one prepares calls."""
    call, begin, _ = KINDS[kind]
    x, found = _there(np.ones(comm.size, "float32")), []
    for prepares in (True, False):
        one = comm.dup()
        if not prepares:
            internals.devices(one).prepare = lambda *_: None
        for _ in range(turns):
            call(one, x)
            if begin is not None:
                begin(one, x).wait()
        found.append(one.stats())
        one.free()
    return found


# A count is the same whatever carries the call.
@alone
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"parts"}))
@each_rank_of("several", by="on_devices")
def test_prepared_calls_are_counted_like_those_made_in_full(comm, kind, cuda) -> None:
    """Their bytes and copies, and that those that are waited for take time."""
    prepared, in_full = _counts(comm, kind, 4)
    for each in (prepared, in_full):
        assert all(numbers.pop("seconds") > 0 for numbers in each.values())
    assert prepared == in_full


_WITHOUT_ASSERTIONS = """
from arraycomm.testing import run
from tests.support.device import in_own_stream, linked_devices

def calls(comm):
    import cupy
    x = cupy.asarray([[comm.rank + 1.0] * 2] * 2)
    found = []
    for _ in range(3):
        y = x.copy()
        comm.alltoall(y, out=y)
        found += [comm.allreduce(x).tolist(), y.tolist()]
    return found

if __debug__:
    raise SystemExit("with assertions")
with linked_devices():
    results = run(2, in_own_stream(calls), timeout=10.0)
if results != [[[[3.0, 3.0], [3.0, 3.0]], [[1.0, 1.0], [2.0, 2.0]]] * 3] * 2:
    raise SystemExit(str(results))
"""


@alone
def test_calls_are_prepared_without_assertions() -> None:
    """Python leaves them out with -O; a call into its own array has no prepared form."""
    command = [sys.executable, "-O", "-c", _WITHOUT_ASSERTIONS]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
