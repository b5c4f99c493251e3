"""Calls of compiled programs: on a communicator of their own, each with its place in the program.

A program that was dispatched may still run while the next call is made, so its calls must not meet
those that are made outside. Ranks compare the places, so that calls in another order raise on all
of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from arraycomm._collectives.groups import hide
from arraycomm._communicator import Communicator, group_of, runner_of, trees_of
from arraycomm._messages.matching import TAGS, Status
from arraycomm._messages.messages import Messenger
from arraycomm._protocol.header import Signature
from arraycomm._training.comparison.verification import Shows, nothing_shown
from arraycomm._training.join import PrivateGuard
from arraycomm._training.numbered import NumberedGradients, Numbering
from arraycomm._trees.leaves import Onto


class _PlaceGuard(PrivateGuard):
    """Puts the place of a call in its program into what the ranks compare."""

    def __init__(self, shared: Communicator) -> None:
        super().__init__(shared)
        # Of this thread: the runner says who calls from two threads at the same time.
        self.current = threading.local()

    def current_place(self) -> int:
        """Return the place of this thread's call in its program, from 1; 0 outside of programs."""
        return getattr(self.current, "place", 0)

    def substitute(self, operation: Any) -> Any:
        """Return what makes the operation, with its place."""
        place = self.current_place()
        if not place:
            return operation

        def placed(*args: Any, **kwargs: Any) -> Any:
            made = operation(*args, **kwargs)
            made.signature = self.sign(made.signature, place)
            return made

        return placed

    def place(self) -> int | None:
        """Return the place of this thread's call, by which its fast path is found."""
        return None if self.refuses else self.current_place()

    def sign(self, signature: Signature, place: int) -> Signature:
        """Put the place behind the op."""
        if not place:
            return signature
        ops = [signature.op] if signature.op else []
        return replace(signature, op=", ".join([*ops, f"call {place} of a program"]))


class ProgramCalls:
    """The calls of programs over the ranks of one communicator, made on a duplicate."""

    # Those that messages between programs may have.
    tags: Final = range(TAGS)

    def __init__(self, shared: Communicator) -> None:
        self.comm = hidden_dup(shared)
        self._guard = _PlaceGuard(shared)
        runner_of(self.comm).set_guard(self._guard)
        self._messenger = Messenger(runner_of(self.comm), self._guard.current_place)

    def sendrecv(self, x: Any, dest: int, source: int, tag: int, out: Any, status: Status) -> Any:
        """Send to one rank and receive from another, both at the same place of their programs."""
        try:
            return self._messenger.sendrecv(x, dest, source, tag, None, out, status, timeout=None)
        except BaseException as error:
            self._messenger.leave_by(error)
            raise

    def refuse(self, error: Exception, dest: int, source: int, tag: int) -> None:
        """Raise the error of an array of `sendrecv`, and tell the rank that would have got it."""
        self._messenger.refuse(error, dest, source, tag)

    def fail(self, name: str, error: Exception) -> None:
        """Make the other ranks' next call raise, in step, because of an error raised here."""
        runner_of(self.comm).fail(name, error)

    @contextmanager
    def at(self, place: int) -> Iterator[None]:
        """Make this thread's calls at this place, 1 or more."""
        self._guard.current.place = place
        try:
            yield
        finally:
            self._guard.current.place = 0


def calls_of(comm: Communicator) -> ProgramCalls:
    """Return the calls of programs over a communicator; collective when it is first asked for."""
    kept = group_of(comm).kept
    if ProgramCalls not in kept:
        kept[ProgramCalls] = ProgramCalls(comm)
    calls: ProgramCalls = kept[ProgramCalls]
    return calls


def hidden_dup(shared: Communicator) -> Communicator:
    """Return a duplicate that no user sees, which is freed once nobody has it; collective."""
    made = shared.dup()
    hide(runner_of(shared), runner_of(made), made)
    return made


class GradientCalls:
    """The reduction of gradients on a communicator that nothing else uses; see `Rounds`."""

    def __init__(self, comm: Communicator, op: str, options: dict[str, Any]) -> None:
        self.comm, self.op, self.options = comm, op, options

    def reduce(
        self,
        leaves: list[Any],
        numbering: Numbering,
        place: int = 0,
        missing: str = "zeros",
        look: Shows = nothing_shown,
        onto: Onto | None = None,
    ) -> Any:
        """Reduce the gradients of an update at a place of a program; 0 is outside of programs."""
        runner, memory = runner_of(self.comm), trees_of(self.comm)
        options = {**self.options, "missing": missing, "onto": onto}
        with numbering.update(place) as where:
            return runner.call(
                NumberedGradients, memory, leaves, self.op, where, numbering, look, **options
            )
