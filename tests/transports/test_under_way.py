"""What MPI has begun is kept, with its memory, also if an interrupt comes right behind that."""

from __future__ import annotations

import ast
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mpi4py.MPI", exc_type=ImportError)

from mpi4py import MPI

from arraycomm._transports.mpi import under_way
from arraycomm._transports.mpi.notes import MpiNotes
from tests.support import internals
from tests.support.on_ranks import alone

pytestmark = alone

# These keep their memory for longer than the messages, or it is MPI that does.
_OTHERWISE = {"nodes.py", "notes.py"}


class Stop(BaseException):
    pass


# In C, as mpi4py's functions: Python raises the interrupt behind it. What it returns stands for a request.
interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
interrupt.argtypes = ctypes.c_ulong, ctypes.py_object


def test_request_is_kept_if_an_interrupt_comes_right_behind_it() -> None:
    me, begun, before = threading.get_ident(), list[Any](), internals.mpi_movements()
    with pytest.raises(Stop):
        under_way.start(begun, interrupt, me, Stop)
    assert begun == [1]
    with pytest.raises(Stop):
        under_way.Movement(interrupt, me, Stop)
    (kept,) = internals.mpi_movements() - before
    under_way.KEPT_ALIVE.discard(kept)
    assert kept.begun == 1
    assert vars(kept)["_arguments"] == (me, Stop)


def test_nothing_begins_otherwise() -> None:
    for path in Path(under_way.__file__).parent.glob("*.py"):
        calls = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ]
        names = [call.func.attr for call in calls if isinstance(call.func, ast.Attribute)]
        begin = [name for name in names if name[0] == "I" and name[1:2].islower()]
        assert path.name in _OTHERWISE or not {*begin} - {
            "Iprobe",
            "Improbe",
            "Is_initialized",
            "Is_finalized",
        }


def test_threads_never_look_at_one_message_at_once() -> None:
    notes, looking, met = MpiNotes(MPI.COMM_SELF.Dup(), lambda: 0), threading.Lock(), list[bool]()

    def test() -> bool:
        met.append(not looking.acquire(blocking=False))
        time.sleep(0.01)
        return met[-1] or looking.release() is not None

    vars(notes)["_sent"].append((SimpleNamespace(Test=test), b""))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(notes.ask_wait_status, ([0], [0])))
    notes.answer_requests()
    assert set(met) == {False}
