"""Which items of a data set belong to which rank, and how many each has consumed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from ctypes import c_int64
from functools import partial
from inspect import GEN_CLOSED, getgeneratorstate
from itertools import cycle, islice, pairwise, product
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any, Final, Generic, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from arraycomm._arrays.typing import DataT, T
from arraycomm._calls.operation import Context
from arraycomm._checks import MOST_RANKS, check_at_least, check_bool, check_integer
from arraycomm._collectives.groups import SmallExchange
from arraycomm._communicator import Communicator, runner_of
from arraycomm._entries import entries
from arraycomm._protocol.agreement import Agreement
from arraycomm._session import world
from arraycomm._training.batches.items import Items, items_of
from arraycomm._training.batches.order import MODES, Part, part_of

_NAME: Final = "DistributedDataContainer"
_MAX_EPOCH: Final = (1 << 63) - 1
# What a state must have in common with the container that takes it.
_SETTINGS: Final = ("count", "shuffle", "seed", "uneven")
_STATE: Final = (*_SETTINGS, "epoch", "consumed")
_NOTHING: Final = object()

# From this rank's batches, as indices into the container, to their items.
Load = Callable[[Iterator[Sequence[int]]], Iterable[Any]]


class Batch(NamedTuple, Generic[DataT]):
    """Some items of one rank, and their weights: what `DistributedDataContainer.batches` yields."""

    items: DataT
    weights: NDArray[np.float32]


class Pass(Iterator[Batch[DataT]]):
    """The batches of one loop; its length is their number."""

    def __init__(self, batches: Generator[Batch[DataT]], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Self:
        if getgeneratorstate(self._batches) == GEN_CLOSED:
            raise RuntimeError("batches: this loop has ended; call batches again for each epoch")
        return self

    def __next__(self) -> Batch[DataT]:
        return next(self._batches)


class AgreeOn(SmallExchange):
    """An argument that is the same on all ranks; `check` returns it, and the text to compare."""

    def __init__(
        self, context: Context, check: Callable[[], tuple[Any, str]], used: bool = False
    ) -> None:
        self._argument, text = check()
        super().__init__(context, text, bytes([used]))

    def result(self, agreement: Agreement) -> Any:
        return self._argument, any(map(any, super().result(agreement)))


class MakeContainer(AgreeOn):
    """See `DistributedDataContainer`."""

    name, code = "DistributedDataContainer", 32


class SetEpoch(AgreeOn):
    """See `DistributedDataContainer.set_epoch`."""

    name, code = "set_epoch", 33


class Batches(AgreeOn):
    """See `DistributedDataContainer.batches`."""

    name, code = "batches", 34


class LoadStateDict(AgreeOn):
    """See `DistributedDataContainer.load_state_dict`."""

    name, code = "load_state_dict", 35


@entries()
class DistributedDataContainer(Sequence[Any], Generic[DataT]):
    """This rank's items of a data set, in a global order that does not depend on the rank count.

    Parameters
    ----------
    data : array, tree of arrays, or sequence; n items
        An array of any framework, a memory map too: its items lie along axis 0. A dict, a tuple
        with arrays in it, a dataclass or another pytree of arrays that are all of length n along
        axis 0; an item is a tree of rows, and None stays None. Anything else with `len` and
        integer indices: a list (also of arrays), a map-style data set of torch. The same data on
        every rank; only this rank's items are ever read (`example` may read one more).
    comm : Communicator, optional
        `world()` by default.
    shuffle : bool
        Whether the global order is a permutation, drawn anew for each epoch.
    seed : int
        Of the permutation, together with the epoch; not negative.
    uneven : str
        What happens if n is not a multiple of the number of ranks. "exact" gives some ranks one
        item more, so that each item belongs to exactly one rank. "pad" repeats items from the
        beginning of the global order, with weight 0, so that all ranks have the same number. "drop"
        leaves out the last items, so that all ranks have the same number.
    virtual_ranks : int, optional
        Play this number of ranks, at least as many as there are: each virtual rank has the items
        and batches that it would have as a rank. Rank r of p plays virtual ranks r, r + p, r + 2p,
        …; see `batches`, and `DistributedOptimizer`.

    Attributes
    ----------
    virtual_rank : int
        The virtual rank that is played with the batch that the loop has got last: the rank itself
        without virtual ranks. In a round without one it is `virtual_ranks` or more.
    completes_step : bool
        Whether that batch is of the last round of a step, after which a distributed optimizer
        changes the parameters: always without virtual ranks.
    weights : ndarray, shape (len(self),), float32
        1 for each item, 0 for the repeated ones of "pad".
    epoch : int
        The epoch under way, 0 at the beginning.

    Raises
    ------
    MismatchError
        The ranks have passed data of different lengths, or different settings.
    TypeError
        `data` is none of these, such as a table by columns, a sparse or lazy array, a generator, or
        an IterableDataset of torch, also one with a length; the message says what to pass, or names
        a leaf of a tree that is no array.
    ValueError
        The arrays of a tree differ in length (the message has their paths), or a setting has a
        value that does not exist.

    Notes
    -----
    Item i of the global order belongs to rank i mod size, as item i // size: a batch of m items on
    each of p ranks is the same global batch as one of m·p items on one rank.

    An index gives one item; a slice gives items as `batches` does. Neither counts as consumed.

    Collective, each in one small message: the constructor, `set_epoch`, `batches` and
    `load_state_dict`. Everything else is local. An order takes 8 n bytes while it is drawn, and 8 n
    / size afterwards.

    `arraycomm.adapters.torch.DataLoader` loads batches by worker processes. The container can also
    be given to `torch.utils.data.DataLoader` itself, whose workers follow `set_epoch` even if the
    loader keeps them for the next epoch; with "exact" some ranks may then have a batch less.
    """

    @overload
    def __init__(
        self,
        data: DataT,
        *,
        comm: Communicator | None = None,
        shuffle: bool = False,
        seed: int = 0,
        uneven: str = "exact",
        virtual_ranks: int | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: DistributedDataContainer[Any],
        data: Any,
        *,
        comm: Communicator | None = None,
        shuffle: bool = False,
        seed: int = 0,
        uneven: str = "exact",
        virtual_ranks: int | None = None,
    ) -> None: ...
    def __init__(
        self,
        data: Any,
        *,
        comm: Communicator | None = None,
        shuffle: bool = False,
        seed: int = 0,
        uneven: str = "exact",
        virtual_ranks: int | None = None,
    ) -> None:
        group = comm or world()
        self._comm: Communicator | None = group
        self._rank, self._size = group.rank, group.size
        self._is_virtual = virtual_ranks is not None

        def check() -> tuple[Part, str]:
            if self._is_virtual:
                self._size = check_at_least(
                    virtual_ranks, group.size, f"{_NAME}: virtual_ranks", MOST_RANKS
                )
            # Those that this rank plays, one in each round.
            self._ranks = range(group.rank, self._size, group.size)
            self._rounds = -(-self._size // group.size)
            self._items: Items = items_of(data)
            self._settings = _check_settings(len(self._items), shuffle, seed, uneven)
            # Epoch and start, in memory that a DataLoader's worker processes share.
            self._shared: Any = _shared_memory()
            text = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
            return self._part_of(0, 0), f"{text}, virtual_ranks={virtual_ranks}"

        part, _ = runner_of(group).call(MakeContainer, check)
        self._begin(part)

    @property
    def epoch(self) -> int:
        """The epoch under way."""
        return self._epoch

    @property
    def virtual_rank(self) -> int:
        """The virtual rank of the last batch; this rank without virtual ranks."""
        return self._rank + self._round * self._ranks.step

    @property
    def completes_step(self) -> bool:
        """Whether the last batch is of the last round of a step."""
        return not self._is_within

    @property
    def weights(self) -> NDArray[np.float32]:
        """1 for each item of this rank, 0 for the repeated ones of "pad"."""
        self._follow()
        return self._weights.copy()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, in an order of its own if the container shuffles; collective.

        Parameters
        ----------
        epoch : int
            From 0; the same on every rank. The epoch of a loaded state continues where the state
            was saved, if nothing has been consumed since it was loaded. Any other epoch begins at
            its first item.

        Raises
        ------
        TypeError, ValueError
            `epoch` is no integer, or negative.
        MismatchError
            The ranks have passed different epochs.
        """

        def check() -> tuple[Part, str]:
            wanted = check_at_least(epoch, 0, "set_epoch: epoch", _MAX_EPOCH)
            return self._part_of(wanted, 0), f"epoch={wanted}"

        part, used = self._agree(SetEpoch, check)
        if used or part.epoch != self._epoch:
            self._begin(part)

    def batches(self, n: int, *, pad: bool = False, load: Load | None = None) -> Pass[DataT]:
        """Go through what is left of the epoch, `n` items of this rank at a time; collective.

        Parameters
        ----------
        n : int
            Items of one rank in a batch, the same on every rank: all ranks together have n · size.
            With virtual ranks, items of one of these.
        pad : bool
            Whether the last batch, which may be shorter, is filled up to `n` by items of this rank,
            or of the data set if this rank has none, with weight 0: the shapes of all batches are
            the same, as under `jax.jit`. The same on every rank.
        load : callable, optional
            Loads the items, for example by worker processes. Called as `load(indices)` when the
            loop begins. `indices` is an iterator over this rank's batches, each a `range` of
            indices into the container, or a list if it is filled up; the last one may be empty.
            Returns an iterable of their items, in the same order. It may read ahead: this changes
            neither weights nor states.

        Returns
        -------
        iterator of Batch
            For one loop, of whose batches it has the number as its length, the same on every rank.
            Named tuples `(items, weights)`. `items` is an array if the data is an array, a tree of
            arrays if the data is a tree, and otherwise a list. `weights` is an ndarray of float32,
            as long as the batch: 1, or 0 for repeated items. Without `pad` the last one may be
            shorter; with "exact" it may be shorter on some ranks than on others, or empty.

        Raises
        ------
        TypeError, ValueError
            `n` is no integer, or less than 1; `pad` is no bool; `load` cannot be called, or has no
            item to fill up the batches of a rank with. From the iterator: `load` has returned too
            few batches.
        MismatchError
            The ranks have passed different `n` or `pad`.
        RuntimeError
            From the iterator, if the loop itself called `set_epoch`, `load_state_dict`, `advance`
            or `batches`, and for a second loop over it.

        Notes
        -----
        A batch counts as consumed when the loop gets it. So a state that is saved at the end of the
        loop's body continues with the next batch.

        The first call continues from a loaded state. A later call begins the same epoch again.

        With virtual ranks the loop goes in rounds: first the first batches of all virtual ranks,
        one round after another, then the second ones. It has as many turns on every rank. A rank
        without a virtual rank in the last round gets the batch of its first one again, with weights
        0; a distributed optimizer leaves out what comes of it. A batch counts as consumed in the
        last round.
        """

        def check() -> tuple[tuple[int, Part], str]:
            wanted = check_at_least(n, 1, "batches: n")
            if not (load is None or callable(load)):
                raise TypeError(f"batches: load must be a function; got {load!r}")
            check_bool(pad, "batches: pad")
            part = self._part_of(self._epoch, 0)
            lacks = any(start == stop for start, stop in pairwise(part.bounds))
            if pad and load is not None and lacks and len(self._items):
                raise ValueError(
                    f"batches: load cannot fill up the batches of rank {self._rank}, which has no "
                    "item; leave out pad, or load"
                )
            return (wanted, part), f"n={wanted}, pad={pad}"

        (wanted, part), used = self._agree(Batches, check)
        if used:
            self._begin(part)
        self._used = True
        return self._pass(wanted, pad, load)

    def num_batches(self, n: int) -> int:
        """Return the number of batches of `n` items in the epoch; local, the same on every rank.

        Parameters
        ----------
        n : int
            Items of one rank in a batch.

        Returns
        -------
        int
            The batches of the whole epoch; if a state was loaded, those that it had left, until the
            next epoch begins.

        Raises
        ------
        TypeError, ValueError
            `n` is no integer, or less than 1.
        """
        return -(-self._share.rounds // check_at_least(n, 1, "num_batches: n")) * self._rounds

    def example(self) -> Any:
        """Return an item of the data set, also on a rank that has none; local.

        For its structure, shapes and dtypes. It does not count as consumed.

        Returns
        -------
        item
            This rank's first item, or if it has none, the first of the data set.

        Raises
        ------
        ValueError
            The data set is empty.
        """
        if not self._settings["count"]:
            raise ValueError("example: the data set has no items, so there is none to look at")
        return self[0] if len(self) else self._items.one(0)

    def advance(self, n: int) -> None:
        """Count `n` more items of this rank as consumed; local.

        For loops that do not get their items from `batches`, which counts by itself. A DataLoader
        asks for items long before the loop gets them, so the loop calls `advance(len(batch))` after
        each batch.

        Parameters
        ----------
        n : int
            Not negative. Ranks that have one item less than others may count one more than they
            have.

        Raises
        ------
        TypeError, ValueError
            `n` is no integer, negative, or more than what is left of the epoch, or the container
            has virtual ranks, whose items come in rounds.
        """
        if self._is_virtual:
            raise ValueError(
                "advance: with virtual_ranks items are counted by batches alone, in whole rounds; "
                "get them from batches or arraycomm.adapters.torch.DataLoader"
            )
        count = check_at_least(n, 0, "advance: n")
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
        """Return what has been consumed, to be saved with the parameters; local.

        Returns
        -------
        dict
            "epoch" and "consumed", the number of items that all ranks together have consumed of
            this epoch, as integers; "count" (n), "shuffle", "seed" and "uneven" as passed. The same
            on every rank when all have consumed as many batches.

        Notes
        -----
        Save the state of rank 0, which has an item in every round. A rank without an item in the
        last round, if it counts by `advance`, cannot know whether the others have consumed theirs.

        Raises
        ------
        RuntimeError
            Some of the rounds of virtual ranks are still to come, where other numbers of ranks have
            consumed other items.
        """
        if self._is_within:
            raise RuntimeError(
                f"state_dict: round {self._round + 1} of {self._rounds} of virtual ranks is under "
                "way, which is a place that another number of ranks does not have; save where "
                "completes_step is True"
            )
        consumed = self._share.position_after(self._taken)
        return {**self._settings, "epoch": self._epoch, "consumed": consumed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, whatever number of ranks has saved it; collective.

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

        def check() -> tuple[Part, str]:
            epoch, consumed = _check_state(state, self._settings)
            return self._part_of(epoch, consumed), f"epoch={epoch}, consumed={consumed}"

        part, _ = self._agree(LoadStateDict, check)
        self._begin(part)

    def __len__(self) -> int:
        self._follow()
        return len(self._index)

    @overload  # type: ignore[override]  # a slice has the type of the data, which may be no sequence
    def __getitem__(  # type: ignore[overload-overlap]  # an item of a list is no list
        self: DistributedDataContainer[list[T]], index: int
    ) -> T: ...
    @overload
    def __getitem__(self, index: int) -> DataT: ...
    @overload
    def __getitem__(self, index: slice) -> DataT: ...
    def __getitem__(self, index: int | slice) -> Any:
        self._follow()
        if isinstance(index, slice):
            return self._items.many(self._index[index])
        position = check_integer(index, f"{_NAME}: an index must be an integer or a slice")
        if not -len(self._index) <= position < len(self._index):
            raise IndexError(
                f"{_NAME}: index {position} is out of range; rank {self._rank} "
                f"has {len(self._index)} of {self._settings['count']} items"
            )
        return self._items.one(int(self._index[position]))

    @overload
    def __iter__(self: DistributedDataContainer[list[T]]) -> Iterator[T]: ...  # type: ignore[overload-overlap]
    @overload
    def __iter__(self) -> Iterator[DataT]: ...
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
            # The copy does not go to a child process, so it has no container to follow.
            state["_shared"] = None
        return state

    def _agree(self, operation: type[AgreeOn], check: Callable[[], tuple[Any, str]]) -> Any:
        """Check an argument with all ranks; return it, and whether any of them has consumed items.

        Some ranks may have had no items to consume.
        """
        if self._comm is None:
            raise RuntimeError(
                f"{operation.name}: this container was copied or sent from another process, and "
                "has no communicator; make one here"
            )
        return runner_of(self._comm).call(operation, check, self._used)

    def _part_of(self, epoch: int, start: int) -> Part:
        """Return this rank's part of an epoch; made before the ranks agree, as it takes memory."""
        part: Part | None = getattr(self, "_part", None)
        if part is not None and (epoch, start) == (part.epoch, part.share.start):
            return part
        return part_of(self._settings, epoch, start, self._ranks, self._size)

    def _begin(self, part: Part) -> None:
        self._take(part)
        self._shared[:] = part.epoch, part.share.start

    def _take(self, part: Part) -> None:
        self._part = part
        self._epoch, self._share, self._index, self._weights, self._bounds = part
        self._taken, self._used = 0, False
        self._round, self._is_within = 0, False
        self._disturb()

    def _follow(self) -> None:
        """In a worker's copy, begin the epoch that the original container has begun since."""
        if self._shared is None:
            return
        epoch, start = self._shared
        if (epoch, start) != (self._epoch, self._share.start):
            self._take(self._part_of(epoch, start))

    def _disturb(self) -> object:
        """End the passes under way; return an object that identifies the next one."""
        self._current = object()
        return self._current

    def _pass(self, n: int, pad: bool = False, load: Load | None = None) -> Pass[Any]:
        starts = range(self._taken, self._share.rounds, n)
        length = len(starts) * self._rounds
        return Pass(self._go_through(n, starts, pad, self._disturb(), load), length)

    def _go_through(
        self, n: int, starts: range, pad: bool, current: object, load: Load | None
    ) -> Generator[Batch[Any]]:
        self._check_current(current)
        indices = (self._own(*turn, n, pad) for turn in product(starts, range(self._rounds)))
        loaded = iter((load or partial(self._load, n if pad else 0))(indices))
        for number, (start, turn) in enumerate(product(starts, range(self._rounds))):
            self._check_current(current)
            items = next(loaded, _NOTHING)
            if items is _NOTHING:
                raise ValueError(
                    f"batches: load must return the items of all {len(starts) * self._rounds} "
                    f"batches of rank {self._rank}; it returned {number}"
                )
            self._round, self._is_within = turn, turn < self._rounds - 1
            if not self._is_within:
                self._taken = min(start + n, self._share.rounds)
            own = self._held(start, turn, n)
            weights = self._weights[own.start : own.stop] * np.float32(turn < len(self._ranks))
            missing = n - len(weights) if pad else 0
            yield Batch(items, np.pad(weights, (0, missing)) if missing else weights)
        self._check_current(current)

    def _held(self, start: int, turn: int, n: int) -> range:
        """Return which items a batch of a round has, as indices into the container."""
        # Without a virtual rank in the round, those of the first one.
        number = turn if turn < len(self._ranks) else 0
        first, stop = self._bounds[number], self._bounds[number + 1]
        return range(min(first + start, stop), min(first + start + n, stop))

    def _own(self, start: int, turn: int, n: int, pad: bool) -> Sequence[int]:
        """Return a batch of a round as indices into the container; none if it has no item."""
        own = self._held(start, turn, n)
        if not pad or len(own) == n:
            return own
        number = turn if turn < len(self._ranks) else 0
        first, stop = self._bounds[number], self._bounds[number + 1]
        return list(islice(cycle(own or range(first, min(first + 1, stop))), n))

    def _check_current(self, current: object) -> None:
        if self._current is not current:
            raise RuntimeError(
                "batches: the container was moved on during the loop, by set_epoch, "
                "load_state_dict, advance or another call of batches; leave the loop first"
            )

    def _load(self, filled: int, indices: Iterator[Sequence[int]]) -> Iterator[Any]:
        """Load the items of batches, which have `filled` items if that is not 0."""
        for own in indices:
            index = self._index[slice(own.start, own.stop) if isinstance(own, range) else own]
            yield self._items.many(index if len(own) or not filled else np.zeros(filled, np.int64))


def _shared_memory() -> Any:
    try:
        return RawArray(c_int64, 2)
    except OSError as error:
        raise OSError(
            f"{_NAME}: there is no memory that worker processes could share ({error}); free some, "
            "or raise the limit on the size of files"
        ) from error


def _check_settings(count: int, shuffle: Any, seed: Any, uneven: Any) -> dict[str, Any]:
    shuffled = check_bool(shuffle, f"{_NAME}: shuffle")
    if uneven not in MODES:
        raise ValueError(f"{_NAME}: uneven must be one of {', '.join(MODES)}; got {uneven!r}")
    checked = (count, shuffled, check_at_least(seed, 0, f"{_NAME}: seed"), str(uneven))
    return dict(zip(_SETTINGS, checked, strict=True))


def _check_state(state: Any, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the epoch and the number of consumed items of a state that fits these settings."""
    name = "load_state_dict"
    if not isinstance(state, Mapping):
        raise TypeError(
            f"{name}: state must be a dict that state_dict has returned; got "
            f"{type(state).__name__}. If one rank alone has loaded it, synchronize gives it to all"
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
    epoch = check_at_least(state["epoch"], 0, f'{name}: state["epoch"]', _MAX_EPOCH)
    return epoch, check_at_least(
        state["consumed"], 0, f'{name}: state["consumed"]', settings["count"]
    )
