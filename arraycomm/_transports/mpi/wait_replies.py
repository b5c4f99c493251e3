"""What a rank learns of others' waits between nodes, in O(log p) messages for each of p ranks.

A rank asks a few others itself. If it is to know of many, it asks some *collectors*, which are the
same for all ranks. A collector asks those of whom it does not know, once for all who ask it, and a
moment later tells these what it knows: which ranks have come, and in what others wait, those at one
place together. The rank then asks some of whom it has heard nothing, since they may have left. If
no collector answers, since none waits, it asks everyone itself: then few ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import Final

from arraycomm._transports.notes import Notes

# Kinds of control messages.
ASKING, WAITING, COLLECTING, TELLING = range(1, 5)
# This many ranks are asked without a collector.
_FEW: Final = 8
# Seconds in which replies come to a collector, after which it asks again, and within which it
# answers.
_REPLIES: Final = 0.1
_AGAIN: Final = 1.0
_PATIENCE: Final = 0.3
# What fits in a message: this many ranges of ranks, and characters of a status. At most this many
# places are told.
_RANGES: Final = 150
_STATUS: Final = 600
_PLACES: Final = 32

# Sends a message of a kind, with a step and a text, to a rank.
Send = Callable[[int, int, int, str], None]


class WaitReplies(Notes):
    """What other ranks have told one rank; `posted` returns the last step that it has posted."""

    def __init__(self, rank: int, size: int, posted: Callable[[], int], send: Send) -> None:
        self._rank, self._size, self._posted, self._send = rank, size, posted, send
        # The wait status of this rank.
        self.status = ""
        # The steps that others had posted, and their wait statuses.
        self._known: dict[int, tuple[int, str]] = {}
        count = (size - 1).bit_length()
        self._collectors = [number * size // count for number in range(count)]
        # Whom a collector is to tell of, since when, and whether one has told.
        self._wanted: Sequence[int] = ()
        self._wanted_since, self._heard = 0.0, False
        # As a collector: for which step it has asked, and when; who is to be told.
        self._collected = (-1, 0.0)
        self._askers: set[int] = set()

    def step(self, rank: int) -> int:
        """Return the last step that a rank is known to have posted."""
        return self._known.get(rank, (0, ""))[0]

    def wait_status(self, rank: int) -> str:
        return self._known.get(rank, (0, ""))[1]

    def report_wait(self, status: str) -> None:
        self.status = status

    def ask_wait_status(self, ranks: Sequence[int]) -> None:
        if len(ranks) <= _FEW:
            self._say(ASKING, ranks)
        elif self._rank in self._collectors:
            self._collect(self._posted())
        else:
            self._wanted, self._wanted_since, self._heard = ranks, monotonic(), False
            self._say(COLLECTING, self._collectors)

    def receive(self, source: int, kind: int, step: int, text: str) -> None:
        """Take note of a message, and answer it."""
        if kind == TELLING:
            self._hear(step, text)
            return
        self._known[source] = (step, text)
        if kind == ASKING:
            self._say(WAITING, [source])
        elif kind == COLLECTING:
            self._askers.add(source)
            self._collect(step)

    def go_on(self) -> None:
        """Send what has been collected, if it is time, and ask the ranks that are missing in it."""
        if self._askers and monotonic() > self._collected[1] + _REPLIES:
            askers, self._askers = self._askers, set()
            for step, text in self._told():
                for asker in askers:
                    self._send(asker, TELLING, step, text)
        if self._wanted and (self._heard or monotonic() > self._wanted_since + _PATIENCE):
            ranks, self._wanted = self._wanted, ()
            step = self._posted()
            silent = [r for r in ranks if self.step(r) < step and not self.wait_status(r)]
            self._say(ASKING, silent[:_FEW] if self._heard else ranks)

    def _say(self, kind: int, ranks: Iterable[int]) -> None:
        step = self._posted()
        for rank in ranks:
            self._send(rank, kind, step, self.status)

    def _collect(self, step: int) -> None:
        """Ask the ranks that are not known to have posted a step, unless just asked."""
        last, when = self._collected
        if step > last or monotonic() > when + _AGAIN:
            self._collected = (step, monotonic())
            others = (rank for rank in range(self._size) if rank != self._rank)
            self._say(ASKING, [rank for rank in others if self.step(rank) < step])

    def _told(self) -> Iterator[tuple[int, str]]:
        """Yield steps and the ranks that have posted them, with what late ones wait in."""
        places: dict[tuple[int, str], list[int]] = {}
        known = {**self._known, self._rank: (self._posted(), self.status)}
        for rank, (step, status) in sorted(known.items()):
            late = step < self._collected[0]
            places.setdefault((step, _shortened(status) if late else ""), []).append(rank)
        for (step, status), ranks in sorted(places.items(), reverse=True)[:_PLACES]:
            ranges = _ranges(ranks)
            for start in range(0, len(ranges), _RANGES):
                yield step, f"{' '.join(ranges[start : start + _RANGES])}\n{status}"

    def _hear(self, step: int, text: str) -> None:
        self._heard = True
        ranges, _, status = text.partition("\n")
        for pair in ranges.split():
            first, last = map(int, pair.split("-"))
            for rank in range(first, last + 1):
                # What the rank itself has told is longer.
                known = self.step(rank)
                if step > known or (step == known and not self.wait_status(rank)):
                    self._known[rank] = (step, status)


def _shortened(status: str) -> str:
    """Return what a rank waits in, and whether in vain; the rest of a status may be missing."""
    doing, _, facts = status.partition("\n")
    return f"{doing[:_STATUS]}\n{facts.partition(',')[0]}]" if doing else ""


def _ranges(ranks: Sequence[int]) -> list[str]:
    """Return sorted ranks as ranges, first and last of each."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return [f"{first}-{last}" for first, last in found]
