"""Calls under way in a process group of torch.distributed, and the order in which they are made."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import torch
from torch.distributed import Work

import arraycomm as ac
from arraycomm._entries import untraced
from arraycomm._errors import is_interrupt

# Polls of a message in which nothing but the core is given up; then the wait sleeps between polls.
_POLLS: Final = 2000
_NAP: Final = 5e-5


@untraced
class _Awaitable(Work):
    """What torch asks of work, over `is_completed`, `result` and the error."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._error: BaseException | None = None

    def is_completed(self) -> bool:
        """Return whether the work has ended, with an error or without."""
        raise NotImplementedError

    def block(self, seconds: float | None) -> None:
        """Wait until the work has ended, or for this many seconds."""
        raise NotImplementedError

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; raise what the call has raised."""
        self.block(timeout.total_seconds() or None)
        if not self.is_completed():
            raise ac.CommTimeoutError(
                f"wait: the work is not finished after {timeout.total_seconds():g} seconds; it "
                "goes on, so wait again, or with a longer timeout"
            )
        if self._error is not None:
            # It may be raised more than once; where it came from is in the library.
            raise self._error.with_traceback(None)
        return True

    def synchronize(self) -> None:
        """Wait for the end; on the host nothing else has to be ordered."""
        self.wait()

    def is_success(self) -> bool:
        """Return whether the work has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error with which the work has ended, or None."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the result, once it is there."""
        return self._tensors

    def _outcome(self, _: object = None) -> list[torch.Tensor]:
        self.wait()
        return self._tensors


@untraced
class Call(_Awaitable):
    """A collective: made by the thread that waits for it, or by the thread of its lane."""

    def __init__(self, call: Callable[[], None], tensors: list[torch.Tensor], lane: Lane) -> None:
        super().__init__(tensors)
        self._call: Callable[[], None] | None = call
        self._lane = lane
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._settled: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def run(self) -> None:
        """Make the call, and keep its error for those who wait; raise what interrupts it."""
        try:
            assert self._call is not None
            self._call()
        except BaseException as error:
            self._error = error
            if is_interrupt(error):
                raise
        finally:
            self._call = None
            self._ended.set()

    def settle(self) -> None:
        """Complete the future, if somebody has asked for it: its callbacks run here."""
        with self._lock:
            settled, self._settled = self._settled, None
        if settled is not None:
            settled.set_result(None)

    def is_completed(self) -> bool:
        """Return whether the call has ended, with an error or without."""
        return self._ended.is_set()

    def block(self, seconds: float | None) -> None:
        """Wait until the call has ended, or for this many seconds."""
        if seconds is None:
            self._lane.make_until(self)
        else:
            self._ended.wait(seconds)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors.

        C++ sees the error of a future only if a callback has raised it: as a RuntimeError with its
        text.
        """
        with self._lock:
            if self._future is None:
                self._settled = torch.futures.Future()
                self._future = self._settled.then(self._outcome)
        if self.is_completed():
            self.settle()
        return self._future


class Lane:
    """The calls of one communicator, in the order of their making, one at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[Call] = deque()
        self._one_at_a_time = threading.Lock()
        self._starts: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def make(self, call: Call, *, at_once: bool) -> None:
        """Make a call behind those before it: in this thread before it returns, or in another one.

        A callback of a future, which runs in the lane's own thread, may wait for the call it makes.
        """
        self._waiting.append(call)
        if at_once or self._thread is threading.current_thread():
            self.make_until(call)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._starts.put(True)

    def make_until(self, call: Call) -> None:
        """Make calls in this thread until this one has ended, wherever it was made."""
        while not call.is_completed():
            self._make_next()

    def end(self) -> None:
        """Make what is left, and end the thread."""
        while self._waiting:
            self._make_next()
        if self._thread is not None:
            self._starts.put(False)

    def _run(self) -> None:
        while self._starts.get():
            # Those who wait for the call raise it.
            with suppress(BaseException):
                self._make_next()

    def _make_next(self) -> None:
        with self._one_at_a_time:
            call = self._waiting[0] if self._waiting else None
            if call is not None:
                # Taken out only then, so that an interrupt loses none.
                if not call.is_completed():
                    call.run()
                self._waiting.popleft()
        if call is not None:
            call.settle()


@untraced
class Message(_Awaitable):
    """A message under way, which waits for no collective, and no collective for it.

    `turn` is held by the thread that calls the communicator of the messages. `deliver` is called
    once, when the message has come.
    """

    def __init__(
        self,
        request: Any,
        turn: threading.Lock,
        tensors: list[torch.Tensor],
        deliver: Callable[[], None] = lambda: None,
        status: ac.Status | None = None,
    ) -> None:
        super().__init__(tensors)
        self._request, self._turn, self._deliver = request, turn, deliver
        self._status = status
        self._ended = False

    def is_completed(self) -> bool:
        """Push the message on; return whether it has come, or has failed."""
        if not self._ended and self._request.test():
            with self._turn:
                self._take()
        return self._ended

    def _take(self) -> None:
        if self._ended:
            return
        try:
            self._request.wait()
            self._deliver()
        except Exception as error:
            self._error = error
        self._ended = True

    def block(self, seconds: float | None) -> None:
        """Wait until the message has come or failed, or for this many seconds."""
        deadline = None if seconds is None else time.monotonic() + seconds
        polls = 0
        while not self.is_completed() and (deadline is None or time.monotonic() < deadline):
            polls += 1
            time.sleep(0 if polls < _POLLS else _NAP)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors, which a thread of its own waits for."""
        settled: torch.futures.Future[Any] = torch.futures.Future()
        future = settled.then(self._outcome)

        def settle() -> None:
            self.block(None)
            settled.set_result(None)

        threading.Thread(target=settle, name="arraycomm-message", daemon=True).start()
        return future

    def source_rank(self) -> int:
        """Return the rank that a message has come from, if any could send it."""
        source = None if self._status is None else self._status.source
        return -1 if source is None else source

    # The name by which torch's own recv asks.
    _source_rank = source_rank
