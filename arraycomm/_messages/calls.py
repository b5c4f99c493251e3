"""Messages from one rank to another: each method's signature, and one line that makes the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from arraycomm._arrays.typing import ReceivedT
from arraycomm._calls.requests import ProcessBound, Request
from arraycomm._entries import entries, entry
from arraycomm._messages.envelopes import Pickled
from arraycomm._messages.matching import Status, Wildcard
from arraycomm._messages.messages import Messenger

F = TypeVar("F", bound=Callable[..., Any])


def _ending(method: F) -> F:
    """Let a call of messages end the group if it is interrupted; the others do so themselves."""

    @functools.wraps(method)
    def enter(self: MessageCalls, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._messenger.leave_by(error)
            raise

    return cast(F, enter)


@entries(trimmed=True)
class MessageCalls(ProcessBound):
    """The calls of a communicator in which one rank sends and another receives."""

    _messenger: Messenger

    def send(
        self, x: Any, dest: int | Wildcard, tag: int = 0, *, timeout: float | None = None
    ) -> None:
        """Send an array to one rank, which calls `recv`.

        Parameters
        ----------
        x : array, shape S
            Any array, of any dtype without Python objects.
        dest : int or PROC_NULL
            The rank that receives. It may be this rank, if that has called `irecv` for it. With
            `arraycomm.PROC_NULL`, which is what lies beyond the border of a grid, nothing is sent.
        tag : int
            From 0 to 1048575. Messages between two ranks with one tag arrive in the order of their
            sending; those with different tags may overtake one another.

        Notes
        -----
        Returns when `x` may be changed again: a short message may then still be under way, a long
        one has been received. Messages wait for no collective, and no collective waits for them.
        """
        try:
            self._messenger.send(x, dest, tag, timeout=timeout)
        except BaseException as error:
            self._messenger.leave_by(error)
            raise

    def recv(
        self,
        source: int | Wildcard,
        tag: int | Wildcard = 0,
        *,
        like: ReceivedT | None = None,
        out: ReceivedT | None = None,
        status: Status | None = None,
        timeout: float | None = None,
    ) -> ReceivedT:
        """Receive an array from one rank, which calls `send`.

        Parameters
        ----------
        source : int, ANY_SOURCE or PROC_NULL
            The rank that sends; with `arraycomm.ANY_SOURCE` any rank. With `arraycomm.PROC_NULL`
            nothing comes: the result is `out` as it is, or None.
        tag : int or ANY_TAG
            The tag that it sends with; with `arraycomm.ANY_TAG` any tag.
        like : array, optional
            An array of the framework and device wanted. NumPy otherwise.
        out : array, shape S, optional
            Where the elements go. If it cannot take them, or `like` is no array, the call raises
            and the message is lost.
        status : Status, optional
            Is told the rank and tag of the message, and its dtype, shape and bytes.

        Returns
        -------
        array, shape S
            The array as it was sent; its shape and dtype need not be known here.

        Raises
        ------
        PeerError
            The sender raised instead of sending, or left; with ANY_SOURCE, all others have left.
        CommTimeoutError
            Nothing came within the timeout.

        Notes
        -----
        Messages go to receives in the order of the calls: each to the first receive that takes it.
        Those of one rank arrive in the order of their sending, also with ANY_SOURCE. With several
        ranks' messages to choose from, those that have come first are taken first, as far as the
        transport knows.
        """
        try:
            return self._messenger.recv(source, tag, like, out, status, timeout=timeout)
        except BaseException as error:
            self._messenger.leave_by(error)
            raise

    def sendrecv(
        self,
        x: Any,
        dest: int | Wildcard,
        source: int | Wildcard,
        tag: int = 0,
        *,
        like: ReceivedT | None = None,
        out: ReceivedT | None = None,
        status: Status | None = None,
        timeout: float | None = None,
    ) -> ReceivedT:
        """Send to one rank and receive from another at the same time; see `send` and `recv`.

        `out` may be memory of `x`.
        """
        try:
            return self._messenger.sendrecv(
                x, dest, source, tag, like, out, status, timeout=timeout
            )
        except BaseException as error:
            self._messenger.leave_by(error)
            raise

    def isend(self, x: Any, dest: int | Wildcard, tag: int = 0) -> Request[None]:
        """Start `send`; leave `x` alone until the request is finished."""
        try:
            return self._messenger.isend(x, dest, tag)
        except BaseException as error:
            self._messenger.leave_by(error)
            raise

    def irecv(
        self,
        source: int | Wildcard,
        tag: int | Wildcard = 0,
        *,
        like: ReceivedT | None = None,
        out: ReceivedT | None = None,
        status: Status | None = None,
    ) -> Request[ReceivedT]:
        """Start `recv`; leave `out` alone until the request is finished, which fills `status`."""
        try:
            return self._messenger.irecv(source, tag, like, out, status)
        except BaseException as error:
            self._messenger.leave_by(error)
            raise

    @_ending
    def send_object(
        self, obj: Any, dest: int | Wildcard, tag: int = 0, *, timeout: float | None = None
    ) -> None:
        """Send a Python object to one rank, which calls `recv_object`; as a pickle.

        Parameters
        ----------
        obj : object
            Anything that pickles.
        dest, tag, timeout
            As for `send`, with whose messages those of objects share order and tags.
        """
        self._messenger.send(Pickled(obj), dest, tag, timeout=timeout)

    @_ending
    def recv_object(
        self,
        source: int | Wildcard,
        tag: int | Wildcard = 0,
        *,
        status: Status | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Receive a Python object from one rank, which calls `send_object`.

        The arguments are those of `recv`: the ranks of a job trust one another, since a pickle can
        run code. With PROC_NULL the result is None.

        Raises
        ------
        TypeError
            The message is an array, or in `recv` an object; it is lost.
        """
        return self._messenger.recv(source, tag, Pickled(), None, status, timeout=timeout)

    @_ending
    def isend_object(self, obj: Any, dest: int | Wildcard, tag: int = 0) -> Request[None]:
        """Start `send_object`; `obj` may be changed at once."""
        return self._messenger.isend(Pickled(obj), dest, tag)

    @_ending
    def irecv_object(
        self, source: int | Wildcard, tag: int | Wildcard = 0, *, status: Status | None = None
    ) -> Request[Any]:
        """Start `recv_object`; the request returns the object, and fills `status`."""
        return self._messenger.irecv(source, tag, Pickled(), None, status)

    @_ending
    def probe(
        self, source: int | Wildcard, tag: int | Wildcard = 0, *, timeout: float | None = None
    ) -> Status:
        """Wait until a message can be received, and leave it where it is.

        Parameters
        ----------
        source, tag, timeout
            As for `recv`.

        Returns
        -------
        Status
            `source` and `tag` of the message that a `recv` with these arguments would get, if no
            other receive takes it before. Its `dtype`, `shape` and `nbytes` are None: `recv` makes
            the array, and tells them.

        Raises
        ------
        PeerError, CommTimeoutError
            As for `recv`.
        """
        return self._messenger.probe(source, tag, timeout=timeout)

    @entry
    def iprobe(self, source: int | Wildcard, tag: int | Wildcard = 0) -> Status | None:
        """Return what `probe` would, or None if there is no such message yet; does not wait."""
        return self._messenger.iprobe(source, tag)
