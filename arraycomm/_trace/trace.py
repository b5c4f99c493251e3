"""Traces of a communicator, from their begin to the file, whatever becomes of the job."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from arraycomm import _launch
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.requests import ProcessBound
from arraycomm._calls.runner import Runner
from arraycomm._collectives.objects import GatherObject
from arraycomm._entries import entries
from arraycomm._errors import ArrayCommError
from arraycomm._exit.exit import when_all_left
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.header import Signature
from arraycomm._protocol.waits.still_waiting import say
from arraycomm._trace import clocks, files
from arraycomm._trace.recorder import Recorder, is_known
from arraycomm._trace.records import Clock, Part
from arraycomm._trace.timeline import timeline
from arraycomm._transports.base import Steps

VARIABLE = "ARRAYCOMM_TRACE"


class CompareClocks(Operation):
    """A step of a trace in which the ranks compare their clocks."""

    name = "trace"

    def __init__(self, context: Context, call: str) -> None:
        super().__init__(context)
        self.signature = Signature(self.name, call)
        self._run = os.urandom(8).hex()

    def steps(self, agreement: Agreement) -> Steps:
        self._found = yield from clocks.compare(self.group, self._run)

    def result(self, agreement: Agreement) -> tuple[Clock, str]:
        return self._found


class BeginTrace(CompareClocks):
    """The beginning of a trace: rank 0 sees that it can write."""

    def __init__(self, context: Context, path: Any, by: str) -> None:
        path = os.fspath(path) if isinstance(path, os.PathLike) else path
        if not isinstance(path, str):
            raise TypeError(f"path must be a str or a pathlib.Path; got {path!r}")
        super().__init__(context, f"begin {path}{by}")
        if self.group.rank == 0:
            try:
                files.prepare(path)
            except OSError as error:
                what = f"{error.strerror}, so that there is no trace{by}"
                raise OSError(error.errno, what, path) from error


@entries()
class Trace(ProcessBound):
    """A trace of a communicator and of its family; see `Communicator.trace`.

    `by` is added to what the ranks compare: it says who has begun the trace.
    """

    def __init__(self, runner: Runner, path: Any, by: str = "") -> None:
        self._runner, self._given, self._by = runner, path, by

    def __enter__(self) -> Self:
        group = self._runner.group
        clock, run = self._runner.call(BeginTrace, self._given, self._by)
        # The program may go to another folder.
        self.path = os.path.abspath(self._given)
        self._recorder = group.tracer if isinstance(group.tracer, Recorder) else Recorder()
        self._first = len(self._recorder.records)
        rank = group.family_ranks[group.rank]
        self._part = Part(rank, group.size, os.uname().nodename, run, [clock])
        self._process = os.getpid()
        for related in group.related:
            related.tracer = self._recorder
            for hook in related.on_watch:
                hook()
        self._recorder.traces += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self._runner.group.closed is None:
            self.finish()
            return
        self.stop()
        self.save()
        told = isinstance(error, ArrayCommError) or is_known(error)
        if isinstance(error, Exception) and not told and self._runner.group.closed is None:
            self._runner.fail(CompareClocks.name, error)

    @property
    def is_own(self) -> bool:
        """Whether this process has begun it, and is not a forked child of the one that has."""
        return os.getpid() == self._process

    def stop(self) -> None:
        """Record nothing any more."""
        self._recorder.traces -= 1
        if not self._recorder.traces:
            for related in self._runner.group.related:
                related.tracer = None

    def finish(self) -> None:
        """End the trace; rank 0 writes it. Collective."""
        self.stop()
        try:
            clock, _ = self._runner.call(CompareClocks, "end")
            self._part.clocks.append(clock)
            parts = self._runner.call(GatherObject, self._gathered(), 0)
        except BaseException:
            self.save()
            raise
        if parts is not None:
            files.write(self.path, timeline(parts))
        files.remove(self.path, self._part.rank)

    def save(self) -> None:
        """Save the records to this rank's own file, where `arraycomm trace` finds them."""
        if self.is_own:
            own = files.part_path(self.path, self._part.rank)
            with self.saying_what_is_lost(own):
                files.write(own, vars(self._gathered()))

    @contextmanager
    def saying_what_is_lost(self, path: str) -> Iterator[None]:
        """Say that a file cannot be written, which must not end the program."""
        try:
            yield
        except OSError as error:
            say(f"arraycomm: the trace {path} cannot be written: {error.strerror}\n")

    def _gathered(self) -> Part:
        part, recorder = self._part, self._recorder
        part.groups, part.dropped = recorder.groups, recorder.dropped
        part.records = recorder.records[self._first :]
        return part


@entries()
class Traceable:
    """The method of a communicator that records its calls."""

    _runner: Runner

    def trace(self, path: Any) -> Trace:
        """Record the calls that all ranks make in a block, and write them as one timeline.

        Entering and leaving the block are collective.

        Parameters
        ----------
        path : str or path-like
            The file that rank 0 writes at the end of the block; the same path on every rank.

        Returns
        -------
        Trace
            For `with`. What is recorded are the calls and messages on this communicator, on those
            made from it, and on the one that it was made from.

        Raises
        ------
        OSError
            Rank 0 cannot write to `path`; the other ranks raise `PeerError`.
        MismatchError
            Ranks pass different paths.

        Notes
        -----
        The file has Chrome's Trace Event Format: open it at ui.perfetto.dev, or print and draw it
        with `arraycomm trace`. Each rank keeps up to 200,000 calls in memory. If the block ends by
        an exception, each saves its own beside the file. In the block, small reductions do not take
        their fast path. Without a trace, no call does anything for it.

        Examples
        --------
        >>> import json, os, tempfile
        >>> import numpy as np
        >>> from arraycomm.testing import run
        >>> path = os.path.join(tempfile.mkdtemp(), "run.json")
        >>> def step(comm):
        ...     with comm.trace(path):
        ...         return float(comm.allreduce(np.ones(3))[0])
        >>> run(2, step)
        [2.0, 2.0]
        >>> with open(path) as file:
        ...     events = json.load(file)["traceEvents"]
        >>> [event["pid"] for event in events if event["name"] == "allreduce"]
        [0, 1]
        """
        return Trace(self._runner, path)


class _WorldTrace:
    """The trace of this process's world, from `init` to its end, by `ARRAYCOMM_TRACE`."""

    def __init__(self) -> None:
        self.trace: Trace | None = None
        self.alone = self.first = False
        self._registered = False

    def begin(self, runner: Runner) -> None:
        """Begin the trace that the environment asks for, if it does; collective.

        A process that a rank has started inherits the variable, but is no rank.
        """
        path = os.environ.get(VARIABLE, "")
        if not path or _launch.claimed_by(os.environ, os.getpid()):
            return
        group = runner.group
        self.trace = Trace(runner, path, f", by {VARIABLE}").__enter__()
        self.alone, self.first = group.size == 1, group.rank == 0
        if not self._registered:
            self._registered = True
            # Called before the ranks wait for one another, since it is registered later.
            atexit.register(self._save)
            when_all_left(self._merge)

    def end(self) -> None:
        """End the trace; collective."""
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.__exit__(None, None, None)

    def _save(self) -> None:
        """Save this rank's part: at the end of a program not every rank comes to a collective."""
        if self.trace is None or not self.trace.is_own:
            return
        self.trace.stop()
        self.trace.save()
        if self.alone:
            self._merge()

    def _merge(self) -> None:
        """Make one file of the parts of ranks that have all ended well."""
        if self.trace is not None and self.first:
            with self.trace.saying_what_is_lost(self.trace.path):
                files.merge(self.trace.path)


_world = _WorldTrace()
begin_world, end_world = _world.begin, _world.end
