"""The order of a data set's items in an epoch, and which of them belong to which rank.

No communication: every rank computes the same order by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MODES: Final = ("exact", "pad", "drop")

Integers = NDArray[np.int64]


def order_of(count: int, seed: int, epoch: int) -> Integers:
    """Return the items of a shuffled data set in the order of this epoch.

    Random numbers are sorted instead of a call of `Generator.shuffle`. NumPy may change the methods
    of its generators from one version to the next, but not the numbers of its bit generators; so a
    saved state stands for the same items in every version.
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(epoch,))
    keys = np.random.PCG64(sequence).random_raw(count)
    return np.argsort(keys, kind="stable")


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of an epoch of `count` items, of which `start` have been consumed.

    After these the ranks take turns, in rounds of one item each: position `start + i` of the global
    order belongs to rank i mod size, in round i // size.
    """

    count: int
    start: int
    rank: int
    size: int
    uneven: str

    @property
    def stop(self) -> int:
        """The position at which the epoch ends; items that are dropped come after it."""
        over = (self.count - self.start) % self.size
        return self.count - over if self.uneven == "drop" else self.count

    @property
    def rounds(self) -> int:
        """Rounds, the same on every rank; without padding, some ranks have no item in the last."""
        return -(-(self.stop - self.start) // self.size)

    def positions(self) -> Integers:
        """Return this rank's position in each round; those of padding lie beyond `count`."""
        padded = self.start + self.rounds * self.size
        stop = padded if self.uneven == "pad" else self.stop
        return np.arange(self.start + self.rank, stop, self.size, dtype=np.int64)

    def position_after(self, rounds: int) -> int:
        """Return how many items of the epoch have been consumed after this many rounds."""
        return min(self.start + rounds * self.size, self.stop)


class Part(NamedTuple):
    """One rank's items of an epoch, and the weight of each; those of each rank that it plays.

    `share` is that of the first of these. The items of number i are those from `bounds[i]` to
    `bounds[i + 1]`.
    """

    epoch: int
    share: Share
    items: Integers
    weights: NDArray[np.float32]
    bounds: tuple[int, ...]


def part_of(
    settings: Mapping[str, Any], epoch: int, start: int, ranks: Sequence[int], size: int
) -> Part:
    """Return the parts of some ranks of `size`, after the first `start` items of the order."""
    count, seed, uneven = (settings[name] for name in ("count", "seed", "uneven"))
    shares = [Share(count, start, rank, size, uneven) for rank in ranks]
    several = [share.positions() for share in shares]
    positions = np.concatenate(several)
    index = positions % max(count, 1)
    if settings["shuffle"] and len(index):
        index = order_of(count, seed, epoch)[index]
    bounds = tuple(accumulate(map(len, several), initial=0))
    return Part(epoch, shares[0], index, (positions < count).astype(np.float32), bounds)
