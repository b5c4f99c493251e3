"""The device's way through the collectives, with host memory standing in for a device."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from arraycomm._cuda import arrays, streams
from tests.support import internals
from tests.support.collectives import COLLECTIVES
from tests.support.device_standin import (
    MADE_IN,
    DeviceArray,
    Never,
    Standin,
    devices,
    working_in,
)
from tests.support.on_ranks import LAUNCH, SIZES

Array = np.ndarray[Any, Any]


# Over MPI with one number of ranks: what a device adds is the same with all, and threads have them all.
_SIZES = SIZES if LAUNCH is None else [min(3, max(SIZES))]


@pytest.fixture(params=_SIZES)
def size(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(params=[size for size in _SIZES if size > 1])
def several(request: pytest.FixtureRequest) -> int:
    """A number of ranks with which ranks can differ."""
    number: int = request.param
    return number


@pytest.fixture
def standin() -> Iterator[Standin]:
    """Devices whose calls go ahead of their headers."""
    with devices() as found:
        yield found


@pytest.fixture(params=["ahead", "staged"])
def any_link(request: pytest.FixtureRequest) -> Iterator[Standin]:
    """Devices whose calls go ahead, with addresses for MPI, and those that copy for it."""
    with devices(request.param) as found:
        yield found


def _values(comm: Communicator, count: int, dtype: str = "float32") -> Array:
    """One row a rank, other values on every rank."""
    return (np.arange(comm.size * count) * 7 % 23 + comm.rank).astype(dtype).reshape(comm.size, -1)


def _host(result: Any) -> Any:
    return result.host() if isinstance(result, DeviceArray) else result


@pytest.mark.parametrize("name", COLLECTIVES)
def test_device_gives_what_the_host_gives(on_ranks, size, name, any_link) -> None:
    def check(comm: Communicator) -> None:
        for count in (0, 1, 5, 9000):
            x = _values(comm, count)
            want = COLLECTIVES[name](comm, x)
            for _ in range(3):
                got = COLLECTIVES[name](comm, DeviceArray(x))
                if want is None:
                    assert got is None
                    continue
                assert _host(got).dtype == want.dtype
                assert np.array_equal(_host(got), want)
        assert internals.device_link(comm) is not None

    on_ranks(size, check)


def test_results_are_on_the_device(on_ranks, size, any_link) -> None:
    def check(comm: Communicator) -> None:
        x = DeviceArray(_values(comm, 3))
        for call in ("allreduce", "scan", "allgather", "alltoall", "reduce_scatter"):
            assert (
                isinstance(getattr(comm, call)(x), DeviceArray)
                or internals.device_link(comm) is None
            )
        # The first call was made before the ranks had chosen.
        assert isinstance(comm.allreduce(x), DeviceArray)

    on_ranks(size, check)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "complex64", "bfloat16"])
def test_every_kind_of_dtype_goes_there(on_ranks, several, dtype, any_link) -> None:
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype

    def check(comm: Communicator) -> None:
        x = _values(comm, 7).astype(kind)
        op = "or" if dtype == "bool" else "sum"
        comm.allreduce(DeviceArray(np.ones(1)))
        for _ in range(2):
            got = comm.allreduce(DeviceArray(x), op)
        assert _host(got).tobytes() == comm.allreduce(x, op).tobytes()

    on_ranks(several, check)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("count", [2, 9000])
def test_ranks_whose_arrays_are_on_the_host_meet_the_others(
    on_ranks, several, name, count, any_link
) -> None:
    """On every rank in turn; each result is where that rank's own array is."""

    def check(comm: Communicator) -> None:
        x = _values(comm, count)
        want = COLLECTIVES[name](comm, x)
        for odd in range(comm.size):
            for on_host in (True, False):
                mine = x if (comm.rank == odd) == on_host else DeviceArray(x)
                got = COLLECTIVES[name](comm, mine)
                if want is None:
                    assert got is None
                else:
                    assert np.array_equal(_host(got), want)
        y = COLLECTIVES[name](comm, x)
        assert want is None or np.array_equal(y, want)

    on_ranks(several, check)


def test_out_is_written_wherever_it_is(on_ranks, size, any_link) -> None:
    def check(comm: Communicator) -> None:
        x = _values(comm, 4)
        want = comm.allreduce(x)
        comm.allreduce(DeviceArray(x))
        strided = np.zeros((2 * comm.size, 4), "float32")[::2]
        for out in (np.zeros_like(x), DeviceArray(np.zeros_like(x)), DeviceArray(strided)):
            for mine in (x, DeviceArray(x)):
                assert comm.allreduce(mine, out=out) is out
                assert np.array_equal(_host(out), want)
        for call in (comm.allreduce, comm.alltoall):
            same = DeviceArray(x.copy())
            assert call(same, out=same) is same
            assert np.array_equal(_host(same), call(x))

    on_ranks(size, check)


def test_without_a_device_on_one_rank_all_are_staged(on_ranks, several, standin) -> None:
    def check(comm: Communicator) -> None:
        x = _values(comm, 4)
        for _ in range(3):
            got = comm.allreduce(DeviceArray(x) if comm.rank else x)
            assert np.array_equal(_host(got), comm.allreduce(x))
        assert internals.devices(comm).negotiated
        assert (internals.device_link(comm), internals.devices(comm).reason) == (
            None,
            "a rank has no device",
        )
        with comm.dup() as same:
            assert (internals.devices(same).negotiated, internals.devices(same).reason) == (
                True,
                "a rank has no device",
            )

    standin.available = False
    on_ranks(several, check)


@pytest.mark.parametrize("available", [True, False])
def test_requests_may_begin_before_the_choice_of_a_link_or_after(
    on_ranks, several, standin, available
) -> None:
    """Ranks whose second request begins before the first one's negotiation meet those that are through it."""

    def check(comm: Communicator) -> None:
        x = _values(comm, 5)
        want = comm.allreduce(x), comm.allgather(x)
        with comm.dup() as together:
            early = comm.rank == 0
            if not early:
                together.barrier()
            first = comm.iallreduce(DeviceArray(x))
            got = [] if early else [_host(first.wait())]
            second = comm.iallgather(DeviceArray(x))
            if early:
                together.barrier()
                got = [_host(first.wait())]
            got.append(_host(second.wait()))
            together.barrier()
        for found, right in zip(got, want, strict=True):
            assert np.array_equal(found, right)

    standin.available = available
    on_ranks(several, check)


def test_call_returns_before_the_others_have_come(on_ranks, several, standin) -> None:
    """Only the header is still to be seen to; the next call waits for it."""

    def check(comm: Communicator) -> None:
        with comm.dup() as together:
            x = DeviceArray(np.ones(5, "float32"))
            comm.allreduce(x)
            together.barrier()
            if comm.rank:
                together.recv(0)
            # As on a device, a movement takes its place in a stream, and waits there.
            link: Any = internals.device_link(comm)
            link.alltoall = link.allgather = lambda *_: _Done()
            comm.allreduce(x)
            if comm.rank == 0:
                for rank in range(1, comm.size):
                    together.send(np.ones(1), rank)
            comm.barrier()
            together.barrier()

    on_ranks(several, check)


class _Done:
    def done(self) -> bool:
        return True


def test_mismatch_of_a_call_that_went_ahead_is_raised_by_the_next(
    on_ranks, several, standin
) -> None:
    aborted: list[int] = []

    def check(comm: Communicator) -> None:
        comm.allreduce(DeviceArray(np.ones(5, "float32")))
        link: Any = internals.device_link(comm)
        link.alltoall = link.allgather = lambda *_: _Done()
        link.abort = lambda: aborted.append(comm.rank)
        comm.allreduce(DeviceArray(np.ones(5 + comm.rank % 2, "float32")))
        with pytest.raises(ac.MismatchError, match=r"allreduce\(sum\) float32 \(6,\) at test_dev"):
            comm.barrier()
        with pytest.raises(ac.CommunicatorClosedError, match="MismatchError"):
            comm.barrier()
        assert comm.rank in aborted

    on_ranks(several, check)


def test_wrong_argument_ends_what_others_have_put_on_their_devices(
    on_ranks, several, standin
) -> None:
    def check(comm: Communicator) -> None:
        x = DeviceArray(np.ones(5, "float32"))
        comm.allreduce(x)
        aborted: list[int] = []
        link: Any = internals.device_link(comm)
        link.alltoall = link.allgather = lambda *_: _Done()
        link.abort = lambda: aborted.append(comm.rank)
        if comm.rank == 0:
            with pytest.raises(TypeError, match="allreduce: x must be an array"):
                comm.allreduce("no array")
        else:
            comm.allreduce(x)
        with pytest.raises(ac.PeerError if comm.rank else ac.ArrayCommError, match="rank"):
            comm.barrier()
        assert comm.rank == 0 or aborted

    on_ranks(several, check)


def test_rank_that_does_not_come_is_noticed_while_nothing_is_called(
    on_ranks, several, transport, standin
) -> None:
    """The caller may be waiting for its device: the watch ends what is under way there."""
    if transport != "threads":
        pytest.skip("one rank times out alone, which the other ranks' MPI does not")

    def check(comm: Communicator) -> None:
        comm.allreduce(DeviceArray(np.ones(5, "float32")))
        link: Any = internals.device_link(comm)
        aborted: list[float] = []
        link.alltoall = link.allgather = lambda *_: _Done()
        link.abort = lambda: aborted.append(time.monotonic())
        together = comm.dup()
        internals.set_timeout(comm, 0.3)
        if comm.rank:
            together.recv(0)
        else:
            comm.allreduce(DeviceArray(np.ones(5, "float32")))
            deadline = time.monotonic() + 10
            while not aborted and time.monotonic() < deadline:
                time.sleep(0.01)
            assert aborted
            with pytest.raises(ac.CommTimeoutError, match="is missing"):
                comm.barrier()
            for rank in range(1, comm.size):
                together.send(np.ones(1), rank)

    on_ranks(several, check)


def test_device_that_does_not_come_to_the_end_is_given_up(
    on_ranks, several, transport, standin
) -> None:
    """Every rank has called; but the data moves no more, and no error tells why."""
    if transport != "threads":
        pytest.skip("what is under way would be freed with the other ranks' MPI")

    def check(comm: Communicator) -> None:
        x = DeviceArray(np.ones(5, "float32"))
        comm.allreduce(x)
        link: Any = internals.device_link(comm)
        together, aborted = comm.dup(), []
        link.memory.record = Never
        link.alltoall = link.allgather = lambda *_: _Done()
        link.abort = lambda: aborted.append(comm.rank)
        internals.set_timeout(comm, 0.3)
        comm.allreduce(x)
        deadline = time.monotonic() + 10
        while not aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(
            (ac.CommTimeoutError, ac.PeerError), match=r"its data did not come|rank"
        ):
            comm.barrier()
        assert aborted
        together.barrier()

    on_ranks(several, check)


def test_small_reductions_of_the_host_stay_short_and_meet_devices(
    on_ranks, several, any_link
) -> None:
    def check(comm: Communicator) -> None:
        x = np.ones(3, "float32")
        for _ in range(3):
            assert comm.allreduce(x)[0] == comm.size
        got = comm.allreduce(DeviceArray(x) if comm.rank == 0 else x)
        assert _host(got)[0] == comm.size
        for _ in range(3):
            assert comm.allreduce(x)[0] == comm.size
            got = comm.allreduce(DeviceArray(x) if comm.rank == 0 else x)
            assert _host(got)[0] == comm.size

    on_ranks(several, check)


def test_parts_and_duplicates_have_links_of_their_own(on_ranks, several, any_link) -> None:
    def check(comm: Communicator) -> None:
        x = DeviceArray(np.ones(3, "float32"))
        comm.allreduce(x)
        part = comm.split(comm.rank % 2)
        assert part is not None
        with part, comm.dup() as same:
            for _ in range(2):
                assert _host(part.allreduce(x))[0] == part.size
                assert _host(same.allreduce(x))[0] == comm.size
            assert internals.device_link(same) is not internals.device_link(comm)

    on_ranks(several, check)


def test_without_the_check_arrays_are_staged_unless_a_link_is_there(
    on_ranks, several, standin
) -> None:
    def check(comm: Communicator) -> None:
        x = DeviceArray(np.full(9000, comm.rank, "float32"))
        with comm.dup(check=False) as unchecked:
            for _ in range(2):
                assert _host(unchecked.allreduce(x))[0] == sum(range(comm.size))
            assert internals.device_link(unchecked) is None

    on_ranks(several, check)


def test_functions_of_ones_own_get_the_array_by_way_of_the_host(
    on_ranks, several, any_link
) -> None:
    def check(comm: Communicator) -> None:
        x = DeviceArray(np.full(4, comm.rank + 1.0))
        comm.allreduce(x)
        got = comm.allreduce(x, ac.op(np.multiply))
        assert _host(got)[0] == np.prod(np.arange(comm.size) + 1.0)

    on_ranks(several, check)


# Trees ------------------------------------------------------------------------------------------


def _tree(comm: Communicator, where: str) -> dict[str, Any]:
    """Leaves of several dtypes, of which those named in `where` are on the device."""
    x = np.arange(6, dtype="float32").reshape(2, 3) + comm.rank
    leaves = {"a": x, "b": x.astype("float64")[0], "c": x[:0], "d": x * 3, "e": x[1, 1:2] * 5}
    return {name: DeviceArray(x) if name in where else x for name, x in leaves.items()}


def _same(got: Any, want: Any) -> bool:
    return all(np.array_equal(_host(got[name]), want[name]) for name in want)


@pytest.mark.parametrize("where", ["abcde", "ad", "b"])
def test_tree_is_reduced_leaf_by_leaf_where_it_is(on_ranks, size, where, any_link) -> None:
    def check(comm: Communicator) -> None:
        want = ac.allreduce_tree(_tree(comm, ""), "sum", comm=comm)
        plan = comm.plan(_tree(comm, where), "sum")
        for _ in range(2):
            for got in (
                ac.allreduce_tree(_tree(comm, where), "sum", comm=comm),
                ac.allreduce_gradients(_tree(comm, where), "sum", comm=comm),
                plan(_tree(comm, where)),
            ):
                assert _same(got, want)
        kinds = {name: isinstance(leaf, DeviceArray) for name, leaf in got.items()}
        assert kinds == {name: name in where for name in got}
        assert internals.device_link(comm) is not None

    on_ranks(size, check)


def test_tree_that_is_elsewhere_on_other_ranks_goes_by_the_host(
    on_ranks, several, any_link
) -> None:
    def check(comm: Communicator) -> None:
        want = ac.allreduce_tree(_tree(comm, ""), "sum", comm=comm)
        plan = comm.plan(_tree(comm, ""), "sum")
        for where in ("abcde"[comm.rank :], "" if comm.rank else "abcde", "ae", "abcde"):
            got = ac.allreduce_tree(_tree(comm, where), "sum", comm=comm)
            assert _same(got, want)
            assert _same(plan(_tree(comm, where)), want)
        assert np.array_equal(_host(comm.allreduce(DeviceArray(want["a"]))), want["a"] * comm.size)

    on_ranks(several, check)


@pytest.mark.parametrize("name", ["allreduce_tree", "Plan"])
def test_tree_on_devices_goes_ahead_of_its_header(on_ranks, several, name, standin) -> None:
    """As one array does: the host waits for no other, and what differs is raised by the next call."""

    def check(comm: Communicator) -> None:
        together = comm.dup()
        tree = _tree(comm, "abcde")
        plan = comm.plan(tree, "sum")
        call = plan if name == "Plan" else lambda tree: ac.allreduce_tree(tree, "sum", comm=comm)
        call(tree)
        link: Any = internals.device_link(comm)
        usual = link.alltoall, link.allgather
        together.barrier()
        if comm.rank:
            together.recv(0)
        link.alltoall = link.allgather = lambda *_: _Done()
        call(tree)
        if comm.rank == 0:
            for rank in range(1, comm.size):
                together.send(np.ones(1), rank)
        comm.barrier()
        link.alltoall, link.allgather = usual
        want = ac.allreduce_tree(_tree(comm, ""), "sum", comm=comm)
        assert _same(call(tree), want)
        link.alltoall = link.allgather = lambda *_: _Done()
        call(tree) if comm.rank else comm.allreduce(tree["a"])
        with pytest.raises(ac.MismatchError, match=rf"allreduce\(sum\).*{name}\(sum\) of 5 leaves"):
            comm.barrier()
        together.barrier()

    on_ranks(several, check)


def test_leaves_of_the_host_join_those_that_went_ahead(on_ranks, several, standin) -> None:
    def check(comm: Communicator) -> None:
        comm.allreduce(DeviceArray(np.ones(1)))
        want = ac.allreduce_tree(_tree(comm, ""), "sum", comm=comm)
        plan = comm.plan(_tree(comm, ""), "sum")
        for odd in range(comm.size):
            for where in ("", "ae", "b"):
                tree = _tree(comm, where if comm.rank == odd else "abcde")
                for got in (ac.allreduce_tree(tree, "sum", comm=comm), plan(tree)):
                    assert _same(got, want)
                    assert [type(x) for x in got.values()] == [type(x) for x in tree.values()]

    on_ranks(several, check)


def test_leaves_of_several_frameworks_stay_apart(on_ranks, several, any_link) -> None:
    def check(comm: Communicator) -> None:
        x = np.arange(5, dtype="float32")
        tree = {"a": DeviceArray(x), "b": DeviceArray(x * 2, framework="other")}
        for _ in range(2):
            got = ac.allreduce_tree(tree, "sum", comm=comm)
        assert np.array_equal(_host(got["b"]), x * 2 * comm.size)
        assert (got["a"].framework, got["b"].framework) == ("standin", "other")

    on_ranks(several, check)


def test_first_gradients_of_all_may_be_missing(on_ranks, several, any_link) -> None:
    """Where the ranks are yet to choose a link, and this one has no array to tell of."""

    def check(comm: Communicator) -> None:
        x = np.arange(5, dtype="float32")
        for _ in range(2):
            tree = {"a": None if comm.rank == 0 else DeviceArray(x)}
            got = ac.allreduce_gradients(tree, "sum", comm=comm)
            assert np.array_equal(_host(got["a"]), x * (comm.size - 1))

    on_ranks(several, check)


def test_gradient_that_a_rank_does_not_have_counts_as_zeros(on_ranks, several, any_link) -> None:
    def check(comm: Communicator) -> None:
        for _ in range(2):
            tree = _tree(comm, "abcde")
            tree["b"] = None if comm.rank == 0 else tree["b"]
            got = ac.allreduce_gradients(tree, "sum", comm=comm)
            part = _tree(comm, "")
            part["b"] = part["b"] * (comm.rank > 0)
            assert _same(got, ac.allreduce_tree(part, "sum", comm=comm))

    on_ranks(several, check)


# Threads and streams ----------------------------------------------------------------------------


def _calls_of(comm: Communicator, x: DeviceArray) -> list[Any]:
    """Start calls whose results are made before their headers are read, and after."""
    return [
        comm.iallreduce(x),
        comm.iallgatherv(x),
        comm.ialltoallv(x, [1] * comm.size),
        comm.iscan(x, out=DeviceArray(np.zeros_like(x.array))),
    ]


def test_steps_keep_to_the_callers_stream_in_whichever_thread(on_ranks, several, any_link) -> None:
    """The first calls choose the link, in the progress thread too."""

    def check(comm: Communicator) -> None:
        x = DeviceArray(_values(comm, 900))
        stream = 40 + comm.rank
        with working_in(stream):
            requests = [request for _ in range(2) for request in _calls_of(comm, x)]
        # Nobody waits: the progress thread has to do it all.
        deadline = time.monotonic() + 20
        while not internals.engine(comm).idle and time.monotonic() < deadline:
            time.sleep(0.001)
        with working_in(stream):
            blocking = [comm.allgatherv(x), comm.allreduce(x)]
        results = [request.wait() for request in requests] + blocking
        assert [type(got) for got in results] == [DeviceArray] * len(results)
        queue = internals.device_link(comm).memory.queue
        assert set(queue.streams) == {stream}
        for got in results:
            _host(got)
        took_part.append(comm.rank)

    # Under mpiexec there may be more ranks than the test has.
    took_part: list[int] = []
    MADE_IN.clear()
    on_ranks(several, check)
    made_in = [(thread, stream) for thread, stream in MADE_IN if stream < 40]
    threads = {thread for thread, _ in MADE_IN}
    assert not made_in
    if took_part:
        assert any(thread.name == "arraycomm-progress" for thread in threads)


def test_who_waits_in_another_stream_finds_its_result_there(on_ranks, several, any_link) -> None:
    def check(comm: Communicator) -> None:
        x = DeviceArray(np.ones(900, "float32"))
        comm.allreduce(x)
        waits = internals.device_link(comm).memory.queue.waits
        with working_in(40):
            request = comm.iallreduce(x)
        with working_in(41):
            request.wait()
        assert (41, 40) in waits
        waits.clear()
        with working_in(40):
            comm.iallreduce(x).wait()
        assert not [wait for wait in waits if wait[0] == 40]

    on_ranks(several, check)


def test_capture_on_one_rank_is_an_error_on_all(
    on_ranks, several, standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = DeviceArray(np.ones(5, "float32"))
    check_stream = arrays.check_stream

    def refuse(x: Any) -> None:
        check_stream(x)
        if x is refused:
            raise ValueError("the current stream of torch is captured into a CUDA graph")

    monkeypatch.setattr(arrays, "check_stream", refuse)

    def check(comm: Communicator) -> None:
        x = DeviceArray(np.ones(5, "float32"))
        with pytest.raises(ac.PeerError if comm.rank else ValueError, match="CUDA graph"):
            comm.allreduce(x if comm.rank else refused)
        with pytest.raises(ac.PeerError if comm.rank else ValueError, match="CUDA graph"):
            ac.allreduce_tree({"a": x if comm.rank else refused}, "sum", comm=comm)
        assert _host(comm.allreduce(x))[0] == comm.size

    on_ranks(several, check)


# What waits outside Python ----------------------------------------------------------------------


class _Held:
    """A call to CUDA that returns once what is under way on the device has been aborted."""

    def __init__(self, link: Any) -> None:
        self.aborted = threading.Event()
        self.in_time = True
        link.alltoall = link.allgather = lambda *_: _Done()
        link.abort = self.aborted.set

    def __call__(self, *_: Any) -> bool:
        self.in_time = self.aborted.wait(10) and self.in_time
        return True

    done = __call__

    def wait_on(self, stream: int) -> None:
        """Nothing comes after it."""


@pytest.mark.parametrize("held", ["work", "event"])
@pytest.mark.parametrize("call", ["allreduce", "iallreduce"])
def test_header_is_checked_while_a_thread_waits_for_cuda(
    on_ranks, transport, standin, call, held
) -> None:
    """As one does that takes memory, or loads a kernel, behind a movement whose peers do not come."""
    if transport != "threads":
        pytest.skip("the ranks would wait for one another's data over MPI")

    def check(comm: Communicator) -> None:
        comm.allreduce(DeviceArray(np.ones(5, "float32")))
        link: Any = internals.device_link(comm)
        waits = _Held(link)
        if held == "work":
            link.memory.fold = waits
        else:
            link.memory.record = lambda: waits
        # Nothing is under way any more, and the other rank is late.
        time.sleep(0.15 * (1 + comm.rank))
        getattr(comm, call)(DeviceArray(np.ones(5 + comm.rank, "float32")))
        assert waits.aborted.wait(5)
        assert waits.in_time
        with pytest.raises(ac.MismatchError, match=r"float32 \(6,\)"):
            comm.barrier()

    on_ranks(2, check)


def test_what_the_device_has_finished_with_is_let_go_between_calls(on_ranks, standin) -> None:
    class Kept:
        """As an array of JAX, which cannot be donated meanwhile."""

    def check(comm: Communicator) -> None:
        x = DeviceArray(np.ones(5, "float32"))
        comm.allreduce(x)
        kept = Kept()
        streams.LEASES.add(internals.device_link(comm).memory.record(), kept)
        there = weakref.ref(kept)
        del kept
        comm.allreduce(x)
        deadline = time.monotonic() + 10
        while there() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert there() is None

    on_ranks(2, check)
