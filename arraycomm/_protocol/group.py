"""One group of ranks as this rank has it: its transport, its calls in order, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from arraycomm._callsite import describe_raise
from arraycomm._checks import check_bool, check_seconds
from arraycomm._errors import (
    CommTimeoutError,
    CommunicatorClosedError,
    DeadlockError,
    MismatchError,
    PeerError,
    TransportError,
    is_interrupt,
    text_of,
)
from arraycomm._protocol.agreement import UndeliveredError
from arraycomm._protocol.engine import Engine
from arraycomm._protocol.task import without_traceback
from arraycomm._protocol.waits.deadlock import Counts, DeadlockWatch, Wait
from arraycomm._protocol.waits.watchdog import LAST_MESSAGE, Watchdog
from arraycomm._transports.base import Handle, Steps, Transport
from arraycomm._transports.notes import FAILED, GAVE_UP

# Not thrown away: what is outstanding there is the parent's, and its programs would begin to clean
# up.
_of_parents: Final[list[Engine]] = []


class Tracer(Protocol):
    """Records calls and messages by wrapping their steps."""

    def call(
        self, group: Any, begin: Callable[..., Steps], name: str, prepare: Any, site: str | None
    ) -> Steps:
        """Return `begin(name, prepare, site)`'s steps, recorded; `site` is that of a request."""

    def message(self, group: Any, message: Any, steps: Steps, site: str, *, awaited: bool) -> Steps:
        """Return the steps of a message, recorded; `awaited` if the caller does nothing else."""

    def wait(self, group: Any, site: str) -> AbstractContextManager[None]:
        """Record how long the program is held up by a request that was made at `site`."""


@dataclass(frozen=True, slots=True)
class Options:
    """What holds for every call on a communicator; the same on every rank."""

    check: bool = True
    reproducible: bool = True
    timeout: float | None = 1800.0

    def __post_init__(self) -> None:
        for name in ("check", "reproducible"):
            object.__setattr__(self, name, check_bool(getattr(self, name), name))
        object.__setattr__(self, "timeout", check_seconds(self.timeout))


@dataclass(eq=False)
class Child:
    """A group made from another one; None on a rank that has no part in it.

    `user` returns what uses it, or None. One that is `hidden` is a duplicate that no user sees.
    """

    group: Group | None
    user: Callable[[], Any]
    hidden: bool = False

    def is_over(self) -> bool:
        """Return whether this rank needs it no more: an error ended it, or nobody can use it."""
        made = self.group
        if made is None or made not in made.related:
            return True
        return (made.closed is not None or self.user() is None) and made.may_go()


class Group:
    """The state of one communicator on this rank, below the user's object."""

    def __init__(self, transport: Transport, options: Options, name: str = "world") -> None:
        # What moves data, and the steps in which headers are shown.
        self.transport, self.control = transport, transport.control
        self.options, self.name = options, name
        self.backend = transport.name
        # What modules above keep for this group, by keys of their own.
        self.kept: dict[Any, Any] = {}
        self.rank, self.size = transport.rank, transport.size
        # How many bytes of a payload a header can take along.
        self.inline_bytes = transport.control.payload
        # This group and those made from the same one, in the order of their making: its family.
        self.related: list[Group] = [self]
        # The ranks of this group as ranks of the family's first group.
        self.family_ranks: Sequence[int] = range(self.size)
        own = transport.name != "threads"
        deadlocks = DeadlockWatch(self, certain=options.check, own_process=own)
        self.watchdog = Watchdog(transport, name, options.timeout, deadlocks)
        self.engine = Engine(
            transport.spins,
            transport.threaded,
            self._check,
            self.watchdog.withdraw,
            self._push_related,
            self.close,
        )
        # What ended the group on this rank; no call is made afterwards.
        self.closed: BaseException | None = None
        # Deferred header error, raised by the next call.
        self.deferred_error: BaseException | None = None
        # Whether a call was given up while data was moving: the transport still holds its buffers.
        self.unfinished = False
        # Messages that this rank has sent, less those that it has begun to receive.
        self.unmatched = 0
        # How many it has sent to each rank, and how many of each it has received, by tag.
        self.sent, self.received = Counts(), Counts()
        # For each open block of `raise_together`, the step at which it began.
        self.open_together: list[int] = []
        # Records the calls of this group and its family while a trace is on.
        self.tracer: Tracer | None = None
        # Called when a guard or a tracer is to see every call, also such as pass by the runner.
        self.on_watch: list[Callable[[], None]] = []
        # Called when the group ends on this rank, however it does.
        self.on_end: list[Callable[[], None]] = []
        # Called before those when an error ends it: what is under way has to be given up.
        self.on_failure: list[Callable[[], None]] = []
        # Called at the program's end, and before `free`, to wait for work outside the transport.
        self.on_exit: list[Callable[[], None]] = []
        self.on_free: list[Callable[[], None]] = []
        # What has become of the groups made from this one, on all ranks alike.
        self.children: list[Child] = []
        # How many groups were made from this one, for their names.
        self.made = 0

    def turn(self) -> AbstractContextManager[Any]:
        """Return a context manager for one call of the user's; raises if another is under way."""
        turn: AbstractContextManager[Any] = self.engine.turn
        return turn

    def run(self, steps: Steps) -> Any:
        """Run steps as one call, in this thread."""
        with self.turn():
            return self.engine.run(self.guarded(steps))

    def wait(self, handle: Handle) -> None:
        """Wait for a handle as a call does: a rank that leaves or the timeout closes the group."""

        def steps() -> Steps:
            yield handle

        self.engine.run(self.guarded(steps()))

    def guarded(self, steps: Steps, *, deferred: bool = False) -> Steps:
        """Close the group if steps fail in a way that leaves ranks out of step.

        The error of steps that are `deferred` is kept for the next call, before anything is
        aborted.
        """
        result, undelivered = None, list[Exception]()
        try:
            result = yield from steps
        except UndeliveredError as raised:
            undelivered.append(raised.error)
        except GeneratorExit:
            # Nobody is left who could have waited for it.
            raise
        except TransportError as error:
            if self.deferred_error is not None:
                # Another thread has ended the group, and with it what this call was in.
                raise self.closed_error("") from error
            self.close(error, deferred=deferred)
            self.watchdog.explain_failure(error)
            raise
        except BaseException as error:
            # Also if others have raised in step: the device waits for what is deferred for ever.
            if deferred or not (isinstance(error, PeerError) and error.in_step):
                self.close(error, deferred=deferred)
            raise
        self.control.completed = self.control.step
        if undelivered:
            # Not kept here: its traceback has this frame, and with it the arrays.
            raise undelivered.pop()
        return result

    def _check(self, waited: float) -> None:
        """Raise if waiting on in a collective makes no sense."""
        if self.closed is not None:
            raise self.closed_error(self.watchdog.current[0])
        self.watchdog.check(waited)

    def check_message(self, wait: Wait, waited: float) -> None:
        """Raise if a message will not come any more, or will not be taken."""
        self.watchdog.check_message(wait, waited)
        if waited > LAST_MESSAGE and not isinstance(self.closed, CommTimeoutError | None):
            # The other rank, which may be told no more than this, posts nothing any more either.
            raise self.closed_error(wait.doing)
        self.watchdog.check_message_timeout(wait, waited)

    # The end

    def at_rest(self) -> bool:
        """Return whether this rank has nothing under way, so that the transport may be freed."""
        if self.unfinished or not self.engine.idle:
            return False
        # In shared memory a step that this rank has posted needs it no more.
        return self.control.shared or self.control.done()

    def forget_frames(self) -> None:
        """Keep no frames of the error that ended this group: they hold communicators and arrays."""
        if self.closed is not None and self.closed.__traceback__ is not None:
            self.closed = without_traceback(self.closed)

    def may_go(self) -> bool:
        """Return whether it is at rest here, what was made from it too, and no message is left."""
        mine = self.at_rest() and not self.unmatched
        return mine and all(child.is_over() for child in self.children)

    def end(self, error: BaseException) -> None:
        """Make no call any more on this rank; says nothing to the others."""
        for hook in self.on_end:
            hook()
        self.closed = error

    def refuse(self, reason: str) -> None:
        """Make no call any more, in a forked child."""
        # Another thread of the parent may have held the locks of its engine.
        _of_parents.append(self.engine)
        self.engine.refusal = reason
        self.engine = Engine(0, False, lambda _: None, *[lambda *_: None] * 3)
        self.engine.refusal = reason
        self.end(RuntimeError(reason))

    def close(self, error: BaseException, *, deferred: bool = False) -> None:
        """End the group because of an error, after which the ranks may be out of step."""
        if deferred:
            self.deferred_error = error
        if self.closed is not None:
            return
        self.closed = error
        for hook in self.on_failure:
            hook()
        self.watchdog.give_up(error)
        # Before others hear of it: who sees the notice first sees no result of this rank's either.
        self.control.withdraw()
        if isinstance(error, MismatchError) or (self.control.ended and self.control.done()):
            # All ranks learn of it in the same steps, which this one has taken to the end.
            self.control.completed = self.control.step
        waiting = self.engine.interrupted
        on_control = waiting is self.control and self.control.shared
        # An interrupt may also come between the beginning of a movement and the wait for it.
        begun = waiting is not None or is_interrupt(error)
        self.unfinished = begun and not on_control
        self.end(error)
        in_vain = isinstance(error, CommTimeoutError) and not isinstance(error, DeadlockError)
        # After a timeout, others that wait for the same ranks are to time out themselves; who comes
        # later is told.
        state = GAVE_UP if in_vain else FAILED
        self.control.notes.announce_exit(state, self.control.completed, self._exit_text(error))

    def _exit_text(self, error: BaseException) -> str:
        """Return this rank's traceback, unless it only followed another rank."""
        followed = isinstance(error, PeerError) or (
            isinstance(error, TransportError) and self.transport.shrinks
        )
        return "" if followed else describe_raise(error)

    def closed_error(self, operation: str) -> BaseException:
        """Return what a call on a group that has ended raises."""
        if self.deferred_error is not None:
            deferred, self.deferred_error = self.deferred_error, None
            return deferred
        cause = "" if self.closed is None else text_of(self.closed)
        closed = CommunicatorClosedError(
            f"{operation}: the communicator is closed: "
            f"{type(self.closed).__name__}: {cause}".rstrip(": ")
        )
        closed.__cause__ = self.closed
        return closed

    def _push_related(self) -> None:
        """Push on what is outstanding on the other groups of this rank."""
        for group in self.related:
            if group is not self and not group.engine.idle:
                group.engine.advance()
