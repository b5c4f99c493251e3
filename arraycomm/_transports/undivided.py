"""What an interrupt must not leave in the middle: what is begun, and what is taken, of messages."""

from __future__ import annotations

from arraycomm._errors import TransportError


class Undivided:
    """Blocks of Python that change what is under way: as a whole, or nobody goes on with it.

    An interrupt may end such a block anywhere. Then every later one raises: a message would be
    begun twice, or taken for another one.
    """

    _divided = False

    def check(self) -> None:
        """Raise if nobody goes on."""
        if self._divided:
            raise TransportError(
                "an interrupt came while this rank began or took messages; go on with another "
                "communicator, for example one that dup() made before"
            )

    def __enter__(self) -> None:
        self.check()
        self._divided = True

    def __exit__(self, kind: object, *_: object) -> None:
        self._divided = kind is not None
