"""Objects that stand for something of this process, such as a communicator: what a copy of one is."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn, Self


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
            f"a {type(self).__name__} cannot be pickled, since it stands for ranks of this process; "
            f"{self._instead}"
        )
