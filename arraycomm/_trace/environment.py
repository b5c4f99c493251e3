"""`ARRAYCOMM_TRACE`: a trace of the world, from `init` to the end of the program."""

from __future__ import annotations

import atexit
import os

from arraycomm import _launch
from arraycomm._calls.runner import Runner
from arraycomm._exit.exit import when_all_left
from arraycomm._trace import files
from arraycomm._trace.trace import Trace

VARIABLE = "ARRAYCOMM_TRACE"


class _WorldTrace:
    """The trace of this process's world, while there is one."""

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
begin, end = _world.begin, _world.end
