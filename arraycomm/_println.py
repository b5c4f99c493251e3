"""`println`: lines of all ranks, in rank order."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from arraycomm._calls.operation import Context
from arraycomm._checks import check_bool, check_several
from arraycomm._collectives.objects import AllgatherObject
from arraycomm._communicator import Communicator, runner_of
from arraycomm._entries import entry
from arraycomm._errors import naming
from arraycomm._exit.exit import refuse_forked_child
from arraycomm._session import is_initialized, world
from arraycomm._writing import write


class _Line(NamedTuple):
    """What one rank prints, and how."""

    values: tuple[Any, ...]
    sep: str | None
    end: str | None
    file: Any
    ranks: int | Iterable[int] | None
    timestamp: Any

    def text(self, rank: int, size: int, place: str = "") -> str:
        """Return the line of this rank; an empty string if it is not to be printed."""
        for name, value in (("sep", self.sep), ("end", self.end)):
            if not isinstance(value, str | None):
                raise TypeError(f"{name} must be a string or None; got {value!r}")
        if self.file is not None and not callable(getattr(self.file, "write", None)):
            raise TypeError(f"file must have a method write; got {self.file!r}")
        if self.ranks is not None and rank not in _checked(self.ranks, size):
            return ""
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")[:23]
        values = (" " if self.sep is None else self.sep).join(map(str, self.values))
        end = "\n" if self.end is None else self.end
        return f"{f'{now} ' if check_bool(self.timestamp, 'timestamp') else ''}{place}{values}{end}"


def _checked(ranks: int | Iterable[int], size: int) -> list[int]:
    chosen = check_several(ranks, "ranks must be a rank or several")
    if not all(0 <= rank < size for rank in chosen):
        raise ValueError(f"ranks must be ranks from 0 to {size - 1}; got {ranks!r}")
    return chosen


class Println(AllgatherObject):
    """See `println`."""

    name, code = "println", 16

    def __init__(self, context: Context, line: _Line) -> None:
        rank, size = context.group.rank, context.group.size
        super().__init__(context, line.text(rank, size, f"[{rank}/{size}] "))


@entry
def println(
    *values: Any,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,
    ranks: int | Iterable[int] | None = None,
    timestamp: bool | None = None,
    comm: Communicator | None = None,
) -> None:
    r"""Print every rank's values, in the order of the ranks.

    Collective once arraycomm is initialized: rank 0 writes all lines, each as
    `2026-01-31T12:00:00.000 [rank/size] values`. Before `init` a process is rank 0 of 1, and writes
    its values at once, as `print` does.

    Parameters
    ----------
    *values : object
        What would be passed to `print`; may differ between ranks.
    sep, end : str or None
        As for `print`: between the values, and behind each rank's line.
    file : object with a method `write`, optional
        Where rank 0 writes; its standard output by default. Other ranks' files are not used.
    ranks : int or iterable of int, optional
        The ranks whose lines are printed; all by default. The others take part without a line. Each
        rank's own argument decides on its line.
    timestamp : bool, optional
        Whether lines begin with the time; by default only those after `init`.
    comm : Communicator, optional
        `world()` by default.

    Raises
    ------
    OSError
        On rank 0, if its output is broken or full. The other ranks have finished the call, and
        raise nothing: the ranks are in step.
    TypeError, ValueError
        An argument is wrong, or a value cannot be printed; the other ranks raise `PeerError`.

    Notes
    -----
    Characters that the output cannot encode are written as escapes such as `\u00e9`. If rank 0 has
    no standard output at all (`sys.stdout` is None), nothing is written.
    """
    if comm is None and not is_initialized():
        refuse_forked_child("println")
        line = _Line(values, sep, end, file, ranks, False if timestamp is None else timestamp)
        with naming("println"):
            write(line.text(0, 1), file)
        return
    comm = comm or world()
    line = _Line(values, sep, end, file, ranks, True if timestamp is None else timestamp)
    lines = runner_of(comm).call(Println, line)
    if comm.rank == 0:
        write("".join(lines), file)
