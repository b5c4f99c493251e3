"""Traces of calls as they are: what is in the file, and what becomes of it and of the calls."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._trace.files import read
from tests.support import internals
from tests.support.on_ranks import each_rank_of
from tests.trace.event_format import check_format

ELEMENTS = 1 << 16


@contextmanager
def folder_of_all(comm: ac.Communicator) -> Iterator[str]:
    """Give a folder that all ranks know, and remove it."""
    folder = comm.bcast_object(tempfile.mkdtemp() if comm.rank == 0 else None)
    try:
        yield folder
    finally:
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder)


def some_of_each(comm: ac.Communicator) -> None:
    small, large = np.ones(2), np.ones(ELEMENTS)
    for _ in range(3):
        comm.allreduce(small)
    comm.allreduce(large)
    comm.bcast(large if comm.rank == 0 else None)
    requests = [comm.iallreduce(large), comm.iallgather(small)]
    comm.barrier()
    ac.waitall(requests)
    plan = comm.plan({"w": large, "b": small})
    plan({"w": large, "b": small})
    comm.dup().allreduce(small)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.sendrecv(large, right, left, 3)


def traced(comm: ac.Communicator, calls: Callable[[ac.Communicator], None]) -> dict[str, Any]:
    """Return the trace of some calls, on every rank."""
    with folder_of_all(comm) as folder:
        path = os.path.join(folder, "run.json")
        with comm.trace(path):
            calls(comm)
        # Rank 0 writes after the others have gone on.
        comm.barrier()
        found = json.loads(Path(path).read_text("utf-8"))
        assert os.listdir(folder) == ["run.json"]
    return found


@each_rank_of(3)
def test_each_call_is_there_with_what_it_was(comm: ac.Communicator) -> None:
    trace = traced(comm, some_of_each)
    check_format(trace)
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == set("MXsf")
    assert [e["pid"] for e in events if e["name"] == "process_name"] == list(range(3))
    calls = [e for e in trace["traceEvents"] if e["ph"] == "X" and "args" in e]
    for rank in range(3):
        own = [e for e in calls if e["pid"] == rank]
        found = [(e["cat"], e["name"], e["args"]["bytes"]) for e in own]
        assert found.count(("call", "allreduce", 16)) == 4
        assert found.count(("call", "allreduce", 8 * ELEMENTS)) == 1
        assert ("request", "allreduce", 8 * ELEMENTS) in found
        assert ("request", "allgather", 16) in found
        assert [name for _, name, _ in found].count("Plan") == 1
        assert found.count(("wait", "wait", 0)) == 2
        assert ("send", "send", 8 * ELEMENTS) in found
        assert ("recv", "recv", 8 * ELEMENTS) in found
        assert {e["args"]["line"].partition(":")[0] for e in own} == {"test_trace.py"}
        assert {e["args"]["communicator"].rpartition("/")[2] for e in own} == {"world", "dup-1"}
    # The same header steps on every rank, and the algorithm that `explain` names.
    steps = [
        sorted((e["args"]["communicator"], e["args"]["step"], e["name"]) for e in calls
               if e["pid"] == rank and "step" in e["args"])
        for rank in range(3)
    ]  # fmt: skip
    assert all(own == steps[0] for own in steps)
    large = ac.explain(np.ones(ELEMENTS), comm=comm).algorithm
    assert {
        e["args"]["algorithm"]
        for e in calls
        if e["name"] == "allreduce" and e["args"]["bytes"] == 8 * ELEMENTS
    } == {large}
    comm.barrier()


@each_rank_of(3)
def test_no_call_does_anything_for_a_trace_that_is_over(comm: ac.Communicator) -> None:
    x = np.ones(2)
    comm.allreduce(x)
    assert internals.has_fast_paths(comm, 1)
    with folder_of_all(comm) as folder:
        with comm.trace(os.path.join(folder, "one.json")):
            with comm.trace(os.path.join(folder, "two.json")):
                comm.allreduce(x)
                made = comm.dup()
            comm.allreduce(x)
            assert internals.is_traced(comm)
            assert internals.is_traced(made)
            assert internals.has_fast_paths(comm, 0)
        comm.barrier()
        names = [
            [e["name"] for e in read(os.path.join(folder, name))["traceEvents"]].count("allreduce")
            for name in ("one.json", "two.json")
        ]
        assert names == [6, 3]
    assert not internals.is_traced(comm)
    assert not internals.is_traced(made)
    comm.allreduce(x)
    assert internals.has_fast_paths(comm, 1)


def end_on_rank_1(_: int, rank: int) -> None:
    if rank == 1:
        error = RuntimeError("no more data")
        raise error from error


@each_rank_of(3)
def test_exception_in_the_block_raises_everywhere_and_leaves_the_parts(
    comm: ac.Communicator,
) -> None:
    with folder_of_all(comm) as folder:
        path = os.path.join(folder, "run.json")
        expected = RuntimeError if comm.rank == 1 else ac.PeerError
        with pytest.raises(expected, match="no more data"), comm.trace(path):
            end_on_rank_1(comm.allreduce(comm.rank), comm.rank)
        # All are in step, and the file has the calls of all of them.
        comm.barrier()
        found = [e for e in read(path)["traceEvents"] if e["name"] == "allreduce"]
        assert sorted(e["pid"] for e in found) == list(range(3))
        comm.barrier()
        # An error that all ranks know of is not told again.
        with pytest.raises(ValueError if comm.rank == 1 else ac.PeerError), comm.trace(path):
            comm.allreduce(np.ones(2), "sun" if comm.rank == 1 else "sum")
        # The next trace removes what the failed one has left.
        with comm.trace(path):
            comm.barrier()
        comm.barrier()
        assert os.listdir(folder) == ["run.json"]


@each_rank_of(3)
def test_path_that_is_wrong_raises_on_every_rank(comm: ac.Communicator) -> None:
    with folder_of_all(comm) as folder:
        nowhere = os.path.join(folder, "none", "run.json")
        with pytest.raises(OSError if comm.rank == 0 else ac.PeerError, match="none"):
            comm.trace(nowhere).__enter__()
        for wrong in (7, b"run.json"):
            with pytest.raises(TypeError, match="path"):
                comm.trace(wrong).__enter__()
        comm.barrier()


@each_rank_of(3)
def test_ranks_that_name_different_files_raise_a_mismatch(comm: ac.Communicator) -> None:
    with folder_of_all(comm) as folder:
        path = os.path.join(folder, f"{min(comm.rank, 1)}.json")
        with pytest.raises(ac.MismatchError, match=r"trace\(begin .*1\.json\)"):
            comm.dup().trace(path).__enter__()
