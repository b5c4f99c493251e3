"""Checks of a world of one process, in one program; see `test_runtime.py`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._native import compiled
from tests.support import internals
from tests.support.launched import checks_in, perform


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set variables of the environment for a while; no world is left behind."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
    ac.finalize()


def println_before_init_prints_at_once() -> None:
    with redirect_stdout(io.StringIO()) as printed:
        ac.println("a", 1)
    assert printed.getvalue() == "a 1\n"


def one_process_needs_no_mpi() -> None:
    comm = ac.init()
    assert (comm.backend, comm.rank, comm.size, comm.device) == ("self", 0, 1, "cpu")
    assert comm.mpi_comm is None
    assert comm.allreduce(np.arange(3.0), "mean").tolist() == [0, 1, 2]
    part = comm.split(3)
    assert part is not None
    assert part.dup().bcast_object("x") == "x"
    assert "mpi4py" not in sys.modules
    ac.finalize()


def init_is_idempotent_and_compares_what_is_passed() -> None:
    assert not ac.is_initialized()
    with pytest.raises(ac.NotInitializedError, match=r"call arraycomm\.init\(\) first"):
        ac.world()
    comm = ac.init(timeout=7)
    assert ac.init() is ac.init("auto", timeout=7) is ac.init("self") is ac.world() is comm
    with pytest.raises(ValueError, match="timeout=7 before; got 8"):
        ac.init(timeout=8)
    with pytest.raises(ValueError, match="check=True before; got False"):
        ac.init(check=False)
    with pytest.raises(ValueError, match="backend 'self' before; got 'mpi'"):
        ac.init(backend="mpi")
    ac.finalize()
    assert not ac.is_initialized()
    assert ac.init(timeout=8).allreduce(1) == 1
    with pytest.raises(ac.CommunicatorClosedError, match="finalized"):
        comm.barrier()
    ac.finalize()


def environment_sets_the_defaults() -> None:
    def found() -> tuple[float | None, bool]:
        options = internals.options(ac.init())
        return options.timeout, options.check

    with environment():
        assert found() == (1800.0, True)
    with environment(ARRAYCOMM_TIMEOUT="2.5", ARRAYCOMM_CHECK="0"):
        assert found() == (2.5, False)
    with environment(ARRAYCOMM_TIMEOUT="none"):
        assert found() == (None, True)
    with (
        environment(ARRAYCOMM_TIMEOUT="soon"),
        pytest.raises(ValueError, match="ARRAYCOMM_TIMEOUT must be"),
    ):
        ac.init()
    with (
        environment(ARRAYCOMM_REPORT_AFTER="soon"),
        pytest.raises(ValueError, match="init: ARRAYCOMM_REPORT_AFTER must be a number of seconds"),
    ):
        ac.init()
    for said, check in {"Off": False, "no": False, "TRUE": True, "on": True, "": True}.items():
        with environment(ARRAYCOMM_CHECK=said):
            assert found()[1] is check
    allowed = "ARRAYCOMM_CHECK must be one of 1, true, yes, on, 0, false, no, off; got 'maybe'"
    with environment(ARRAYCOMM_CHECK="maybe"), pytest.raises(ValueError, match=allowed):
        ac.init()


def what_cannot_run_says_what_is_missing() -> None:
    for backend, device, error, said in (
        ("nccl", None, ac.BackendUnavailableError, "init: backend 'nccl' cannot be had: "),
        ("threads", None, ValueError, "arraycomm.testing.run"),
        ("gloo", None, ValueError, "backend must be one of auto, self, mpi"),
        ("auto", "cuda:0", ac.BackendUnavailableError, "init: device 'cuda:0' cannot be had: "),
        ("auto", 0, TypeError, "init: device must be"),
    ):
        with pytest.raises(error, match=said):
            ac.init(backend, device=device)
    for options, error in (
        ({"timeout": "soon"}, TypeError),
        ({"check": 3}, TypeError),
        ({"report_after": True}, TypeError),
        ({"report_after": 0}, ValueError),
    ):
        with pytest.raises(error, match=f"{next(iter(options))} must be"):
            ac.init(**options)
    assert not ac.is_initialized()


def verbose_prints_a_line_for_each_fact() -> None:
    with redirect_stdout(io.StringIO()) as printed:
        ac.init(verbose=True, timeout=None, check=False)
        ac.init()
    assert printed.getvalue().splitlines() == [
        "arraycomm: backend: self",
        "arraycomm: ranks: 1 on 1 node",
        "arraycomm: MPI: none",
        "arraycomm: devices: cpu",
        "arraycomm: check: off",
        "arraycomm: reproducible: on",
        "arraycomm: timeout: none",
        f"arraycomm: native part: {'none' if compiled is None else compiled.levels()[-1]}",
    ]
    with redirect_stdout(None):
        # As in a program whose output was closed before it began.
        ac.init(verbose=True)
    ac.finalize()
    with pytest.raises(TypeError, match="init: verbose must be True or False; got 1"):
        ac.init(verbose=1)  # type: ignore[arg-type]


def large_folds_take_as_many_threads_as_the_environment_says() -> None:
    if compiled is None:
        return
    for threads, taken in (("3", 3), ("1", 1), ("0", 1), ("100", 8)):
        with environment(OMP_NUM_THREADS=threads):
            ac.init()
            assert compiled.use_threads(1) == taken


def list_of_devices_is_taken_by_local_rank() -> None:
    assert ac.init(device=["cpu", "cuda:7"]).device == "cpu"
    ac.finalize()
    with pytest.raises(ValueError, match=r"one for each rank of a node.*; got 0 for 1 ranks: \[\]"):
        ac.init(device=[])
    assert not ac.is_initialized()


def numbers_of_processes_are_never_ignored() -> None:
    """N processes would each compute alone, and nobody would see it."""
    with environment(ARRAYCOMM_NUM_PROCESSES="2"):
        for call in (ac.init, ac.borrow().__enter__):
            with pytest.raises(
                ac.BackendUnavailableError, match="ARRAYCOMM_NUM_PROCESSES is set, but"
            ):
                call()
        assert ac.init("self").size == 1
    numbers = {"ARRAYCOMM_PROCESS_ID": "0", "ARRAYCOMM_COORDINATOR_ADDRESS": "127.0.0.1:4321"}
    with environment(ARRAYCOMM_NUM_PROCESSES="1", **numbers):
        assert ac.init().backend == "self"
    with environment(ARRAYCOMM_NUM_PROCESSES="2", **numbers):
        with pytest.raises(ac.BackendUnavailableError, match="no MPI launcher has started these"):
            ac.init("mpi")
        with pytest.raises(ac.NotInitializedError, match="one of several"), ac.borrow():
            pass


def forked_child_is_refused() -> None:
    comm = ac.init()
    internals.watch_exit(comm)
    child = os.fork()
    if child == 0:
        with pytest.raises(ac.CommunicatorClosedError, match="a forked process cannot use"):
            comm.barrier()
        sys.exit(5)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 5
    comm.barrier()


CHECKS = checks_in(globals())

if __name__ == "__main__":
    for name in list(os.environ):
        if name.startswith(("PMI", "OMPI_COMM", "ARRAYCOMM")):
            del os.environ[name]
    perform(CHECKS)
