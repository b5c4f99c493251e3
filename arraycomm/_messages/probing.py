"""Looks for messages that stay where they are: `probe`, which waits for one, and `iprobe`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from arraycomm._checks import check_seconds
from arraycomm._messages.delivery import Message, nothing
from arraycomm._messages.matching import PROC_NULL, Matcher, Status, named
from arraycomm._protocol.group import Group
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.watchdog import LAST_MESSAGE
from arraycomm._transports.base import Steps


class Probe:
    """A look for a message; `found` is its source and tag."""

    def __init__(self, look: Callable[[], tuple[int, int] | None]) -> None:
        self._look = look
        self.found: tuple[int, int] | None = None

    def done(self) -> bool:
        self.found = self._look()
        return self.found is not None


class Prober:
    """Looks for the messages of one group."""

    def __init__(self, group: Group, matcher: Matcher) -> None:
        self._group, self._matcher = group, matcher
        # When `look` last asked ranks where they are, or began to find nothing, and first saw that
        # all of some had left.
        self._asked: float | None = None
        self._gone_since: dict[tuple[int, ...], float] = {}

    def message(self, source: Any, tag: Any, timeout: Any = None) -> Message:
        """Return the wait for a message that can be received."""
        timeout = check_seconds(timeout)
        peer, tags = named(source, tag, self._group.size)
        steps = nothing(Status()) if source is PROC_NULL else self._steps(peer, tags)
        return Message("probe", steps, peer, tags, timeout=timeout)

    def look(self, source: Any, tag: Any) -> Status | None:
        """Say which message can be received, None without one."""
        message = self.message(source, tag)
        if source is PROC_NULL:
            return Status()
        with self._group.turn():
            self._group.engine.advance()
            found = self._matcher.probe(message.peer, message.tags)
            if found is None:
                self._look_for(message)
                return None
        self._asked = None
        return Status(*found, nbytes=None)

    def _steps(self, peer: int | None, tags: range) -> Steps:
        probe = Probe(partial(self._matcher.probe, peer, tags))
        yield probe
        assert probe.found is not None
        return Status(*probe.found, nbytes=None)

    def _look_for(self, message: Message) -> None:
        """Raise once the ranks from one of which a message may come have left."""
        notes, now = self._group.control.notes, clock.now()
        peers = message.peers(self._group, blocks=False)
        if not set(peers) <= notes.exit_notices().keys():
            self._asked = self._asked or now
            if now > self._asked + LAST_MESSAGE:
                self._asked = now
                notes.ask_wait_status(peers)
                self._group.watchdog.check_for_deaths()
            return
        # What they have sent before still comes.
        since = self._gone_since.setdefault(tuple(peers), now)
        self._group.check_message(message.told(self._group, blocks=False), now - since)
