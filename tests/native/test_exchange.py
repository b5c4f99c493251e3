"""Small reductions that repeat: made by the native part, they are what they are in Python."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm._native import compiled
from arraycomm._prepared.fast_path import SmallCall
from arraycomm._transports.threads import Group, make_group
from tests.support import internals

if compiled is None:
    pytest.skip("the native part was not built, or is not to be used", allow_module_level=True)


def _alone(**options: Any) -> Communicator:
    """Return the communicator of one rank of two; the other does nothing."""
    return internals.communicator(make_group(2)[0], **options)


def _single() -> Communicator:
    return internals.communicator(make_group(1)[0])


@pytest.fixture
def in_python() -> Iterator[mock.Mock]:
    """Counts the calls that are made in full."""
    full = internals.runner_of(_single()).call_within
    calls = mock.Mock()

    def counted(self: Any, *args: Any, **keywords: Any) -> Any:
        calls()
        return full.__func__(self, *args, **keywords)

    with mock.patch.object(type(full.__self__), "call_within", counted):
        yield calls


def test_a_repeated_reduction_needs_no_python(in_python: mock.Mock) -> None:
    comm = _single()
    x, out = np.ones(4, np.float32), np.empty(4, np.float32)
    with mock.patch.object(SmallCall, "__call__", side_effect=AssertionError):
        for _ in range(5):
            comm.allreduce(x, out=out)
    assert in_python.call_count == 1
    assert comm.stats()["allreduce"]["calls"] == 5


def test_what_is_unlike_the_call_before_is_made_in_full(in_python: mock.Mock) -> None:
    comm = _single()
    x, out = np.arange(4, dtype=np.float32), np.empty(4, np.float32)
    comm.allreduce(x, out=out)
    locked = out.copy()
    locked.flags.writeable = False
    for error, wrong in (
        (TypeError, np.empty(4, np.int32)),
        (ValueError, np.empty((2, 2), np.float32)),
        (BufferError, locked),
    ):
        before = in_python.call_count
        with pytest.raises(error, match="out"):
            comm.allreduce(x, out=wrong)
        assert in_python.call_count == before + 1
    apart = np.zeros(8, np.float32)
    comm.allreduce(x, out=apart[::2])
    assert apart.tolist() == [0, 0, 1, 0, 2, 0, 3, 0]
    assert comm.allreduce(x.view(np.recarray), out=out).tolist() == [0, 1, 2, 3]


def _repeated(comm: Communicator) -> Callable[[], Any]:
    """Return a reduction of one rank of two that is made by the native part, and waits."""
    x, out = np.ones(2), np.empty(2)
    internals.remember_allreduce(comm, x, "sum")
    return lambda: comm.allreduce(x, out=out)


def test_a_wait_can_be_interrupted() -> None:
    comm = _alone()
    threading.Timer(0.1, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        _repeated(comm)()
    with pytest.raises(ac.CommunicatorClosedError, match="KeyboardInterrupt"):
        comm.barrier()


def test_another_thread_is_refused_during_a_wait_which_ends_with_the_timeout() -> None:
    comm = _alone(timeout=0.3)
    errors: list[BaseException] = []

    def wait(call: Callable[[], Any]) -> None:
        try:
            call()
        except ac.ArrayCommError as error:
            errors.append(error)

    call = _repeated(comm)
    thread = threading.Thread(target=wait, args=[call])
    thread.start()
    while not internals.engine(comm).turn.locked():
        time.sleep(0.001)
    wait(call)
    thread.join()
    assert [type(error) for error in errors] == [ac.ConcurrentUseError, ac.CommTimeoutError]
    assert "rank 1 is missing" in str(errors[1])
    with pytest.raises(ac.CommunicatorClosedError, match="waited"):
        comm.barrier()


def test_calls_keep_nothing_alive() -> None:
    [transport] = make_group(1)
    memory: weakref.ref[Group] = weakref.ref(transport._group)
    comm = internals.communicator(transport)
    x, out = np.ones(2), np.empty(2)
    held = [x, out, x.dtype]
    comm.allreduce(x, out=out)
    before = [sys.getrefcount(one) for one in held]
    for _ in range(100):
        comm.allreduce(x, out=out)
    assert [sys.getrefcount(one) for one in held] == before
    comm.free()
    del comm, transport
    gc.collect()
    assert memory() is None


def test_shown_lengths_have_to_be_those_of_what_is_there() -> None:
    """What a rank shows that is longer than a slot, or is not there, is nothing to be read."""
    memory = np.zeros(1024, np.uint8)
    slots = memory.view(np.int64).reshape(2, 2, 32)
    for here, there in ((0, 0), (5, 0), (128, 128), (3, -1), (3, 129), (3, 1 << 40)):
        exchange = compiled.Exchange(**{**_usual(memory), "fold": -1, "gives": ((), 0)})
        data = bytes(range(here))
        # Of the other rank, whose payload lies behind its header.
        slots[1, 1, :16] = [1, *[0] * 12, there, there, 0]
        memory[768 + 128 : 1024] = 7
        want = [data, b"\7" * there] if 0 <= there <= 128 else None
        assert exchange.show(data) == want
        assert exchange.counts()[0] == (want is not None)
    slots[1, 1, 13] = 2
    exchange = compiled.Exchange(**{**_usual(memory), "fold": -1, "gives": ((), 0)})
    assert exchange.show(b"") is None
    with pytest.raises(ValueError, match="do not fit into a slot"):
        exchange.show(bytes(129))
    with pytest.raises(TypeError):
        exchange.show("text")


def _usual(memory: np.ndarray) -> dict[str, Any]:
    return {
        "memory": memory,
        "rank": 0,
        "size": 2,
        "slot": 256,
        "header": bytes(120),
        "headers": bytes(16),
        "takes": ((1,), 8),
        "gives": ((1,), 8),
        "ranks": (0, 2),
        "place": 0,
        "fold": compiled.find_fold("sum", "float64"),
        "dtype": np.dtype(float),
        "control": compiled.Counts(),
        "queue": [],
        "turn": compiled.Turn(),
        "path": mock.Mock(),
        "patient": True,
    }


def test_slots_have_to_be_those_of_a_control_channel() -> None:
    memory = np.zeros(1024, np.uint8)
    usual = _usual(memory)
    # Slots may be full.
    for right in ({}, {"takes": ((1,), 128)}, {"gives": ((1,), 128)}, {"place": 128 - 8}):
        compiled.Exchange(**{**usual, **right})
    for wrong in (
        *({"rank": 2}, {"rank": -1}, {"size": 0}, {"size": 3}, {"slot": 255}, {"slot": 128}),
        *({"header": bytes(119)}, {"takes": ((1,), -8)}, {"takes": ((1,), 136)}),
        *({"headers": bytes(n)} for n in (0, 15, 17, 242)),
        *({"gives": ((1,), n)} for n in (-8, 7, 136)),
        *({"ranks": each} for each in ((-1, 1), (0, 3), (2, 1))),
        *({"place": -8}, {"place": 128}),
        # What is not folded is as long as the parts of all ranks.
        {"fold": -1, "gives": ((1,), 9)},
        *({"fold": -2}, {"fold": 10_000}, {"memory": memory[1:-7]}),
    ):
        with pytest.raises(ValueError, match="not as the control channel has them"):
            compiled.Exchange(**{**usual, **wrong})
    with pytest.raises(TypeError, match="Exchange"):
        compiled.Repeats(np.ndarray).remember("sum", None)


def test_steps_on_a_device_have_to_be_as_they_are_recorded() -> None:
    nothing = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    arguments, group, gather = np.zeros(24, np.uint8), (0, 0, 0, 1, 0, 0), (1, 0, 0, 4, 0, 0)
    kernel, copy, far = (7, 8, 8, 1, 32, 0), (6, 0, 0, 8, 0, 0), 1 << 52
    function = ctypes.cast(nothing, ctypes.c_void_p).value
    usual: dict[str, Any] = dict.fromkeys(("stream", "before", "comm", "word"), 0)
    usual |= {"functions": (function,) * 15, "arguments": arguments[:16], "places": [(8, 0)]}
    usual |= {"steps": [group, gather, kernel, copy], "memories": 1, "number_at": 12}
    for right in ({}, {"memories": 1 << 11}, {"number_at": -1}, {"steps": []}, {"places": []}):
        compiled.DeviceCall(**{**usual, **right})
    for wrong in (
        *({"memories": n} for n in (-1, 0, (1 << 11) + 1)),
        *({"arguments": arguments[4:20]}, {"number_at": 2}, {"number_at": 16}),
        *({"places": [each]} for each in ((-8, 0), (16, 0), (4, 0), (0, far))),
        *({"steps": [group, (kind, *gather[1:])]} for kind in (-1, 0, 6, 7, 8)),
        *({"steps": [(*group[:3], count, 0, 0), gather]} for count in (-1, 2)),
        *({"steps": [(6, *at, 8, 0, 0)]} for at in ((far, 0), (0, far))),
        *({"steps": [(7, 8, at, 1, 32, 0)]} for at in (-8 % 2**64, 4, 16)),
    ):
        with pytest.raises(ValueError, match="the steps are not as they are recorded"):
            compiled.DeviceCall(**{**usual, **wrong})
