"""Fast paths: calls of a communicator, prepared so that the next ones like them are quick."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Final

import numpy as np

from arraycomm._calls.statistics import Count, Statistics
from arraycomm._native import compiled
from arraycomm._protocol.group import Group
from arraycomm._transports.control import SharedControl

# The fast paths that are kept, of all kinds: each has a few kilobytes of memory.
_MOST: Final = 1024


class FastPath:
    """A prepared call. It returns NotImplemented if the call has to be made in full.

    One of this class itself stands for calls that have none, so that nobody looks again.
    """

    def __call__(self, *args: Any) -> Any:
        """Make the call."""
        return NotImplemented

    def start(self, *args: Any) -> Any:
        """Start the call, and return a request."""
        return NotImplemented

    def count(self) -> Count | None:
        """Return what this path has done so far, unless it is counted elsewhere."""
        return None

    def free(self) -> None:
        """Give back what the transport keeps for it; no call is made afterwards."""


# Stands for a call that has been made once: many are never made again.
ONCE: Final = FastPath()


class FastPaths:
    """The fast paths of one communicator, of every kind; the native part finds some by itself.

    They are given up together: if there are too many, if a guard or a tracer has to see every call,
    and at the end.
    """

    def __init__(self, group: Group, statistics: Statistics) -> None:
        self._group, self._statistics = group, statistics
        self._paths: dict[Hashable, FastPath] = {}
        self.find: Callable[[Hashable], FastPath | None] = self._paths.get
        # Small reductions of NumPy arrays; `again(x, op, out)` makes one and returns `out`, or does
        # nothing and returns None. Another class of control channel does more in a step.
        control = group.control
        shared = compiled is not None and type(control) is SharedControl
        makes_steps = shared or control.native is not None
        self.repeats: Any = compiled.Repeats(np.ndarray) if makes_steps else None
        self.again = self.repeats and self.repeats.again
        statistics.fast_paths = self._counts
        for hooks in (group.on_watch, group.on_end, group.on_free):
            hooks.append(self.forget)

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def may_keep(self) -> bool:
        """Return whether calls may have fast paths: a tracer has to see every call."""
        return self._group.tracer is None and self._group.closed is None

    def keep(self, key: Hashable, path: FastPath) -> None:
        """Keep the fast path of calls with this key."""
        if len(self._paths) >= _MOST:
            self.forget()
        self._paths[key] = path

    def keep_second(self, key: Hashable, make: Callable[[], FastPath]) -> None:
        """Keep what `make` returns once a call has been made in full for a second time."""
        found = self.find(key)
        if self.may_keep and (found is None or found is ONCE):
            self.keep(key, make() if found is ONCE else ONCE)

    def drop(self, key: Hashable) -> None:
        """Give up the fast path of calls with this key; its figures are kept."""
        path = self._paths.pop(key, None)
        if path is not None and (count := path.count()) is not None:
            self._statistics.absorb([count])

    def forget(self) -> None:
        """Give up all fast paths; their figures are kept."""
        self._statistics.absorb(self._counts())
        if self.repeats is not None:
            self.repeats.forget()
        while self._paths:
            self._paths.popitem()[1].free()

    def _counts(self) -> list[Count]:
        return [count for path in self._paths.values() if (count := path.count()) is not None]
