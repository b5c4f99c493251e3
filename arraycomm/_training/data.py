"""Which items of a data set belong to which rank, and how far each has come with them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_int64
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any, Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from arraycomm._collectives.operation import Call, agreement_only
from arraycomm._communicator import Communicator
from arraycomm._session import world
from arraycomm._training.items import Items, items_of
from arraycomm._training.order import MODES, Share, order_of

_NAME: Final = "DistributedDataContainer"
_MAX_EPOCH: Final = (1 << 63) - 1
# What a state must have in common with the container that takes it.
_SETTINGS: Final = ("count", "shuffle", "seed", "uneven")
_STATE: Final = (*_SETTINGS, "epoch", "consumed")


class Batch(NamedTuple):
    """Some items of one rank, and their weights: what `DistributedDataContainer.batches` yields."""

    items: Any
    weights: NDArray[np.float32]


class DistributedDataContainer(Sequence[Any]):
    """This rank's items of a data set, in a global order that does not depend on the rank count.

    Parameters
    ----------
    data : array, tree of arrays, or sequence; n items
        An array of any framework, a memory map too: its items lie along axis 0. A dict, a tuple
        with arrays in it, a dataclass or another pytree of arrays that are all of length n along
        axis 0; an item is a tree of rows, and None stays None. Anything else with `len` and
        integer indices: a list (also of arrays), a map-style data set of torch. The same data on
        every rank; only this rank's items are ever read.
    comm : Communicator, optional
        `world()` by default.
    shuffle : bool
        Whether the global order is a permutation, drawn anew for each epoch.
    seed : int
        Of the permutation, together with the epoch; not negative.
    uneven : str
        Where n is not a multiple of the number of ranks: "exact" gives some ranks one item more,
        so that every item is there exactly once; "pad" repeats items of the global order from its
        beginning, with weight 0, so that all ranks have the same number; "drop" leaves the last
        items out, likewise.

    Attributes
    ----------
    weights : ndarray, shape (len(self),), float32
        1 for each item, 0 for the repeated ones of "pad".
    epoch : int
        The epoch under way, 0 at the beginning.

    Raises
    ------
    MismatchError
        The ranks have passed data of different lengths, or different settings.
    TypeError
        `data` is none of these; the message names the leaf of a tree that is no array.
    ValueError
        The arrays of a tree differ in length (the message has their paths), or a setting has no
        such value.

    Notes
    -----
    Item i of the global order belongs to rank i mod size, as item i // size: a batch of m items on
    each of p ranks is the same global batch as one of m·p items on one rank.

    An index gives one item; a slice gives items as `batches` does. Neither counts as consumed.

    Collective, each in one small message: the constructor, `set_epoch`, `batches` and
    `load_state_dict`. Everything else is local. The order takes 8 n bytes for a moment, and
    8 n / size afterwards.

    The container can be given to `torch.utils.data.DataLoader`, with workers: they follow
    `set_epoch` also where they are kept for the next epoch.
    """

    def __init__(
        self,
        data: Any,
        *,
        comm: Communicator | None = None,
        shuffle: bool = False,
        seed: int = 0,
        uneven: str = "exact",
    ) -> None:
        def prepare(comm: Communicator) -> Call:
            self._items: Items = items_of(data)
            self._settings = _check_settings(len(self._items), shuffle, seed, uneven)
            said = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
            return agreement_only(_NAME, said)

        group = comm or world()
        group._call(_NAME, prepare)
        self._comm: Communicator | None = group
        self._rank, self._size = group.rank, group.size
        # Epoch and start, in memory that the processes of a DataLoader's workers see too.
        self._shared: Any = RawArray(c_int64, 2)
        self._begin(0, 0)

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self._epoch

    @property
    def weights(self) -> NDArray[np.float32]:
        """1 for each item of this rank, 0 for the repeated ones of "pad"."""
        self._follow()
        return self._weights.copy()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in its own order where the container shuffles; collective.

        Parameters
        ----------
        epoch : int
            From 0; the same on every rank. The epoch of a state that was loaded, and that nothing
            has been consumed from since, goes on where it stopped; any other begins afresh.

        Raises
        ------
        TypeError, ValueError
            `epoch` is no integer, or negative.
        MismatchError
            The ranks have passed different epochs.
        """

        def prepare(_: Communicator) -> tuple[int, str]:
            wanted = _natural(epoch, "set_epoch", "epoch", _MAX_EPOCH)
            return wanted, f"epoch={wanted}"

        wanted, used = self._agree("set_epoch", prepare)
        if used or wanted != self._epoch:
            self._begin(wanted, 0)

    def batches(self, n: int) -> Iterator[Batch]:
        """Go through what is left of the epoch, `n` items of this rank at a time; collective.

        Parameters
        ----------
        n : int
            Items of one rank in a batch, the same on every rank: all ranks together have n · size.

        Returns
        -------
        iterator of Batch
            Named tuples `(items, weights)`. `items` is an array where the data is one, a tree of
            arrays where it is a tree, and else a list; `weights` is an ndarray of float32, as long
            as the batch, of 1 and, for the repeated items of "pad", 0. Every rank gets the same
            number of batches. The last one may be shorter; with "exact" it may be shorter on some
            ranks than on others, or have no items there.

        Raises
        ------
        TypeError, ValueError
            `n` is no integer, or less than 1.
        MismatchError
            The ranks have passed different `n`.
        RuntimeError
            From the iterator, where the loop has itself called `set_epoch`, `load_state_dict`,
            `advance` or `batches`.

        Notes
        -----
        A batch counts as consumed when the loop gets it: a state that is saved at the end of the
        loop's body, after the batch has been learnt, is followed by the next batch.

        The first call goes on from a state that was loaded. A later call begins the epoch again, as
        for data that are gone through once more without `set_epoch`.
        """

        def prepare(_: Communicator) -> tuple[int, str]:
            wanted = _natural(n, "batches", "n", least=1)
            return wanted, f"n={wanted}"

        wanted, used = self._agree("batches", prepare)
        if used:
            self._begin(self._epoch, 0)
        self._used = True
        return self._pass(wanted, self._disturb())

    def advance(self, n: int) -> None:
        """Count `n` more items of this rank as consumed; local.

        For loops that get their items otherwise than by `batches`, which counts by itself: a
        DataLoader asks for items long before the loop gets them, so the loop calls
        `advance(len(batch))` after each batch.

        Parameters
        ----------
        n : int
            Not negative. Where some ranks have an item less than others, they may count one more
            than they have.

        Raises
        ------
        TypeError, ValueError
            `n` is no integer, negative, or more than what is left of the epoch.
        """
        count = _natural(n, "advance", "n")
        left = self._share.rounds - self._taken
        if count > left:
            raise ValueError(
                f"advance: n must be at most {left}, what is left of this rank's part of epoch "
                f"{self._epoch}; got {count}. Begin every epoch with set_epoch"
            )
        self._disturb()
        self._taken += count
        self._used = self._used or count > 0

    def state_dict(self) -> dict[str, Any]:
        """Return how far the loop has come, to be saved with the parameters; local.

        Returns
        -------
        dict
            "epoch" and "consumed", the number of items that all ranks together have consumed of
            this epoch, as integers; "count" (n), "shuffle", "seed" and "uneven" as passed. The same
            on every rank when all have consumed as many batches.

        Notes
        -----
        Save the state of rank 0. It has an item in every round; a rank without one in the last
        round, and that counts by `advance`, cannot tell whether the others are past it.
        """
        consumed = self._share.position_after(self._taken)
        return {**self._settings, "epoch": self._epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, whatever number of ranks has saved it; collective.

        From then on the container's items are this rank's share of those that were not consumed, in
        the same global order, until the next epoch begins.

        Parameters
        ----------
        state : dict
            From `state_dict`, of a container with data of the same length and the same settings;
            the same on every rank (`synchronize` sends it to those that have none).

        Raises
        ------
        TypeError, ValueError
            `state` is not such a dict, or differs from this container; the message says in what.
        MismatchError
            The ranks have passed different states.
        """

        def prepare(_: Communicator) -> tuple[tuple[int, int], str]:
            epoch, consumed = _check_state(state, self._settings)
            return (epoch, consumed), f"epoch={epoch}, consumed={consumed}"

        (epoch, consumed), _ = self._agree("load_state_dict", prepare)
        self._begin(epoch, consumed)

    def __len__(self) -> int:
        self._follow()
        return len(self._index)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Any: ...
    def __getitem__(self, index: int | slice) -> Any:
        self._follow()
        if isinstance(index, slice):
            return self._items.many(self._index[index])
        try:
            position = operator.index(index)
        except TypeError:
            raise TypeError(
                f"{_NAME}: an index must be an integer or a slice; got {index!r}"
            ) from None
        if not -len(self._index) <= position < len(self._index):
            raise IndexError(
                f"{_NAME}: index {position} is out of range; rank {self._rank} "
                f"has {len(self._index)} of {self._settings['count']} items"
            )
        return self._items.one(int(self._index[position]))

    def __iter__(self) -> Iterator[Any]:
        self._follow()
        return (self._items.one(item) for item in self._index.tolist())

    def __repr__(self) -> str:
        return (
            f"<{_NAME}: {len(self)} of {self._settings['count']} items "
            f"on rank {self._rank} of {self._size}>"
        )

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self) | {"_comm": None}
        if get_spawning_popen() is None:
            # Not on its way to a process of ours: nobody will be there to be followed.
            state["_shared"] = None
        return state

    def _agree(self, operation: str, prepare: Callable[[Communicator], tuple[Any, str]]) -> Any:
        """Check an argument with all ranks; return it, and whether any of them has consumed items.

        Some ranks may have had no items to consume.
        """
        if self._comm is None:
            raise RuntimeError(
                f"{operation}: this container was copied or sent from another process, and has no "
                "communicator; make one here"
            )
        checked: list[Any] = []

        def call(comm: Communicator) -> Call:
            argument, said = prepare(comm)
            checked.append(argument)
            return agreement_only(operation, said, bytes([self._used]))

        used = self._comm._call(operation, call)
        return checked[0], any(map(any, used))

    def _begin(self, epoch: int, start: int) -> None:
        self._take(epoch, start)
        self._shared[:] = epoch, start

    def _take(self, epoch: int, start: int) -> None:
        """Take this rank's share of an epoch of whose global order `start` items are consumed."""
        count, seed, uneven = (self._settings[name] for name in ("count", "seed", "uneven"))
        share = Share(count, start, self._rank, self._size, uneven)
        positions = share.positions()
        self._weights: NDArray[np.float32] = (positions < count).astype(np.float32)
        index = positions % max(count, 1)
        if self._settings["shuffle"] and len(index):
            index = order_of(count, seed, epoch)[index]
        self._share, self._index, self._epoch = share, index, epoch
        self._taken, self._used = 0, False
        self._disturb()

    def _follow(self) -> None:
        """In a worker's copy, begin the epoch that the container itself has begun since."""
        if self._shared is None:
            return
        epoch, start = self._shared
        if (epoch, start) != (self._epoch, self._share.start):
            self._take(epoch, start)

    def _disturb(self) -> object:
        """End the passes under way; return what tells the next one from those."""
        self._current = object()
        return self._current

    def _pass(self, n: int, current: object) -> Iterator[Batch]:
        while True:
            if self._current is not current:
                raise RuntimeError(
                    "batches: the container was moved on during the loop, by set_epoch, "
                    "load_state_dict, advance or another call of batches; leave the loop first"
                )
            first = self._taken
            stop = min(first + n, self._share.rounds)
            if first == stop:
                return
            own = slice(first, stop)
            batch = Batch(self._items.many(self._index[own]), self._weights[own].copy())
            self._taken = stop
            yield batch


def _check_settings(count: int, shuffle: Any, seed: Any, uneven: Any) -> dict[str, Any]:
    if not isinstance(shuffle, bool | np.bool_):
        raise TypeError(f"{_NAME}: shuffle must be True or False; got {shuffle!r}")
    if uneven not in MODES:
        raise ValueError(f"{_NAME}: uneven must be one of {', '.join(MODES)}; got {uneven!r}")
    checked = (count, bool(shuffle), _natural(seed, _NAME, "seed"), str(uneven))
    return dict(zip(_SETTINGS, checked, strict=True))


def _check_state(state: Any, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epoch and the number of consumed items of a state that fits these settings."""
    name = "load_state_dict"
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{name}: state must be a dict that state_dict has returned; got "
            f"{type(state).__name__}. Where one rank alone has loaded it, synchronize gives it to all"
        )
    missing = [key for key in _STATE if key not in state]
    if missing:
        raise ValueError(
            f"{name}: state must be a dict that state_dict has returned; it has no "
            f"{', '.join(map(repr, missing))}"
        )
    for key in _SETTINGS:
        if state[key] != settings[key]:
            raise ValueError(
                f"{name}: state is of a container with {key}={state[key]!r}; this one has "
                f"{key}={settings[key]!r}. Make it as that one was made"
            )
    epoch = _natural(state["epoch"], name, 'state["epoch"]', _MAX_EPOCH)
    return epoch, _natural(state["consumed"], name, 'state["consumed"]', settings["count"])


def _natural(value: Any, operation: str, name: str, most: int | None = None, least: int = 0) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{operation}: {name} must be an integer; got {value!r}") from None
    if number < least or (most is not None and number > most):
        limits = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{operation}: {name} must be {limits}; got {number}")
    return number
