"""Requests: calls that go on while the caller does something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, Generic, NoReturn, Self

from arraycomm._arrays.typing import T, T_co
from arraycomm._callsite import CallSite, trim
from arraycomm._checks import check_seconds
from arraycomm._entries import entry, opaque
from arraycomm._errors import CommTimeoutError, raise_interrupt
from arraycomm._protocol.engine import NotFinishedError
from arraycomm._protocol.group import Group
from arraycomm._protocol.task import Task
from arraycomm._protocol.waits import clock
from arraycomm._protocol.waits.waiting import wait_for
from arraycomm._transports.base import Steps
from arraycomm._transports.control import ControlChannel

# What a thread does that takes a result, so that it can use it.
Follow = Callable[[], None]


class Ended:
    """The end of a call: its last step, and what a thread has to do that takes the result."""

    step = 0
    follow: Follow | None = None


# That of calls which leave nothing to do.
_NOTHING: Final = Ended()


def noting(
    program: Steps, found: Callable[[], Follow | None], control: ControlChannel, ended: Ended
) -> Steps:
    """Note the end of a call, whichever thread has made it."""
    found()  # of a call before, whose result was taken at once
    result = yield from program
    ended.follow, ended.step = found(), control.step
    return result


class ProcessBound:
    """An object whose copies are the object itself, and which cannot be pickled.

    So a copy of what holds one, such as of a trainer, goes on to communicate over the same ranks.
    """

    # What to do instead of pickling one, for the error.
    _instead: ClassVar[str] = "make one in each process"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, since it stands for ranks of this "
            f"process; {self._instead}"
        )


class Request(ProcessBound, Generic[T_co]):
    """A collective or a message under way, started by one of the `i…` methods.

    All ranks start the same collectives in the same order; requests may be waited for in any order.
    """

    _instead = "wait for it, and pickle its result"
    # Called with the result and the last step of the call, by the first who waits for it.
    remember: Callable[[Any, int], None] | None = None

    def __init__(
        self,
        group: Group,
        task: Task,
        site: str | CallSite,
        ended: Ended = _NOTHING,
        *,
        awaited: bool = False,
    ) -> None:
        self._group = group
        # Whether it is a part of a blocking call.
        self._awaited = awaited
        self._ended = ended
        self._task = task
        self._site = site

    @opaque
    def wait(self, timeout: float | None = None) -> T_co:
        """Wait for it to finish, and return what the blocking form returns.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait, 0 not to wait; None for as long as the communicator's own timeout
            allows.

        Raises
        ------
        CommTimeoutError
            It is not finished after `timeout` seconds. It goes on: wait again.
        """
        group, task, engine = self._group, self._task, self._group.engine
        try:
            timeout = check_seconds(timeout, or_zero=True)
            with engine.turn:
                task.waited_for = True
                if group.tracer is None or self._awaited:
                    result: T_co = engine.finish(task, timeout)
                else:
                    with group.tracer.wait(group, str(self._site)):
                        result = engine.finish(task, timeout)
                self._follow()
            if self.remember is not None:
                remember, self.remember = self.remember, None
                remember(result, self._ended.step)
            return result
        except NotFinishedError:
            raise CommTimeoutError(
                f"the request made at {self._site} is not finished after {timeout} seconds"
            ) from None
        except BaseException as error:
            trim(error)
            raise
        finally:
            task.waited_for = False

    def _follow(self) -> None:
        """Let this thread use the result, each time in the stream that is current then."""
        if self._ended.follow is not None:
            self._ended.follow()

    @entry
    def test(self) -> bool:
        """Push it on without waiting, and return whether it is finished."""
        finished = self._group.engine.test(self._task)
        if finished and self._task.error is None:
            self._task.outcome.claim()
            self._follow()
        return finished

    def give_up(self, error: BaseException) -> None:
        """End it, because its caller was interrupted while waiting."""
        self._group.engine.give_up(self._task, error)

    @opaque
    def __del__(self) -> None:
        self._task.outcome.drop()

    def __repr__(self) -> str:
        state = "finished" if self._task.finished else "under way"
        return f"<Request made at {self._site}: {state}>"


@entry
def waitall(requests: Iterable[Request[T]]) -> list[T]:
    """Wait for all requests; return their results, in the order of the requests.

    Parameters
    ----------
    requests : iterable of Request
        Of any communicators, started in any order.

    Raises
    ------
    Exception
        The error of the first request that failed, once all have been waited for.
    """
    # All are started before the first is waited for, also if a generator starts them.
    return wait_for_each(_listed("waitall", requests))


@entry
def waitany(requests: Iterable[Request[T]], *, timeout: float | None = None) -> tuple[int, T]:
    """Wait until one of the requests is finished; return its place among them, and its result.

    Parameters
    ----------
    requests : iterable of Request
        Of any communicators, one at least. If several are finished, the first of them is meant: to
        come to the others, leave it out of the next call.
    timeout : float, optional
        Seconds to wait; None for as long as the communicators' own timeouts allow.

    Raises
    ------
    CommTimeoutError
        None is finished after `timeout` seconds. They go on: wait again.
    Exception
        The error of the request that is finished.
    """
    waited_for = _listed("waitany", requests)
    timeout = check_seconds(timeout, or_zero=True)
    if not waited_for:
        raise ValueError("waitany: requests must be one at least; got none")
    deadline = None if timeout is None else clock.now() + timeout
    found: list[int] = []

    def done() -> bool:
        found.extend(number for number, each in enumerate(waited_for) if each.test())
        return bool(found)

    def watch(_: float) -> None:
        if deadline is not None and clock.now() > deadline:
            raise CommTimeoutError(
                f"none of {len(waited_for)} requests is finished after {timeout} seconds"
            )

    # Each test looks after the timeouts, and after the ranks that a request waits for.
    wait_for(done, 1, watch)
    return found[0], waited_for[found[0]].wait()


@entry
def testall(requests: Iterable[Request[Any]]) -> bool:
    """Push all requests on without waiting; return True if all are finished.

    `waitall` then returns their results at once.
    """
    finished = [each.test() for each in _listed("testall", requests)]
    return all(finished)


# pytest takes it for no test of the module that imports it.
testall.__test__ = False  # type: ignore[attr-defined]


def _listed(name: str, requests: Iterable[Request[T]]) -> list[Request[T]]:
    listed = list(requests)
    for each in listed:
        if not isinstance(each, Request):
            raise TypeError(
                f"{name}: requests must be what methods such as iallreduce return, in a list; got "
                f"{type(each).__name__}"
            )
    return listed


def wait_for_each(requests: Iterable[Request[T]]) -> list[T]:
    """Return all results; raise the first error once all have ended."""
    results, errors = [], []
    for each in requests:
        try:
            results.append(each.wait())
        except Exception as error:
            raise_interrupt(error)
            errors.append(error)
    if errors:
        raise errors[0]
    return results
