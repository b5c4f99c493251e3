"""Requests: calls that go on while the caller does something else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from arraycomm._collectives.process_bound import ProcessBound
from arraycomm._entries import entry, opaque
from arraycomm._errors import CommTimeoutError
from arraycomm._protocol.engine import Task
from arraycomm._protocol.group import Group


class Request(ProcessBound):
    """A collective or a message under way, started by one of the `i…` methods.

    All ranks start the same collectives in the same order; requests may be waited for in any order.
    """

    _instead = "wait for it, and pickle its result"

    def __init__(self, group: Group, task: Task, site: str) -> None:
        self._group = group
        self._task = task
        self._site = site

    @entry
    def wait(self, timeout: float | None = None) -> Any:
        """Wait for it to finish, and return what the blocking form returns.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None for as long as the communicator's own timeout allows.

        Raises
        ------
        CommTimeoutError
            It is not finished after `timeout` seconds. It goes on: wait again.
        """
        try:
            with self._group.turn():
                self._task.waited_for = True
                return self._group.engine.finish(self._task, timeout)
        except TimeoutError:
            raise CommTimeoutError(
                f"the request made at {self._site} is not finished after {timeout} seconds"
            ) from None
        finally:
            self._task.waited_for = False

    @entry
    def test(self) -> bool:
        """Push it on without waiting, and tell whether it is finished."""
        self._group.engine.advance()
        if self._task.finished and self._task.error is None:
            self._task.claim()
        return self._task.finished

    def give_up(self, error: BaseException) -> None:
        """End it, because its caller was interrupted while waiting."""
        self._group.engine.give_up(self._task, error)

    @opaque
    def __del__(self) -> None:
        self._task.drop()

    def __repr__(self) -> str:
        state = "finished" if self._task.finished else "under way"
        return f"<Request made at {self._site}: {state}>"


@entry
def waitall(requests: Iterable[Request]) -> list[Any]:
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
    results, errors = [], []
    # All are started before the first is waited for, also if a generator starts them.
    for request in list(requests):
        try:
            results.append(request.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results
