"""Shards: an optimizer's parameters divided over the ranks; each updates its own, then shows them.

Whole parameters are divided, so that each is updated as if it were alone. Every rank works out the
same division from dtypes and shapes; the header of each exchange says whether all did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple, NoReturn

import optree

from arraycomm._arrays.buffer import Array, BufferView
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import result_prototype, view
from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.requests import Request, waitall
from arraycomm._calls.runner import Runner
from arraycomm._communicator import Communicator, runner_of
from arraycomm._dtypes import name_of
from arraycomm._errors import forgiving
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.header import LeafSpec, Signature, digest
from arraycomm._reduce import algorithms
from arraycomm._transports.base import Bytes, Steps
from arraycomm._trees.buffers import BufferPool
from arraycomm._trees.layout import ALIGNMENT, Spec
from arraycomm._trees.pytrees import flatten

NAME: Final = "exchange_shards"
# Up to how many characters messages list the owners of parameters.
_LONG: Final = 80


class Shard(NamedTuple):
    """One parameter, or its update, that is exchanged; `owner` is the rank that has updated it."""

    path: str
    owner: int
    spec: Spec
    # Its values on the owner; on others an array of the result's framework and device.
    array: Any


def divide(sizes: Sequence[int], ranks: int, known: Mapping[int, int] | None = None) -> list[int]:
    """Return which rank owns each parameter, given their bytes.

    The largest goes first, each to the rank that has the least, the lowest of these. `known` has
    the owners of parameters that have one already.
    """
    owners = dict(known or {})
    loads = [0] * ranks
    for number, owner in owners.items():
        loads[owner] += sizes[number]
    rest = (number for number in range(len(sizes)) if number not in owners)
    for number in sorted(rest, key=lambda number: -sizes[number]):
        owner = owners[number] = loads.index(min(loads))
        loads[owner] += sizes[number]
    return [owners[number] for number in range(len(sizes))]


def nbytes_of(spec: Spec) -> int:
    """Return the bytes of an array of this dtype and shape."""
    dtype, shape = spec
    return prod(shape) * dtype.itemsize


class Message:
    """Where the parameters of one message are: those of each rank side by side, in rank order."""

    def __init__(self, numbers: Sequence[int], shards: Sequence[Shard], ranks: int) -> None:
        self.numbers = sorted(numbers, key=lambda number: shards[number].owner)
        # Where each of them begins, in bytes; where each rank's part begins, and the end.
        self.offsets: list[int] = []
        self.bounds, end = [0] * (ranks + 1), 0
        for number in self.numbers:
            self.offsets.append(end)
            nbytes = nbytes_of(shards[number].spec)
            end += nbytes + -nbytes % ALIGNMENT
            self.bounds[shards[number].owner + 1] = end
        for rank in range(ranks):
            self.bounds[rank + 1] = max(self.bounds[rank : rank + 2])
        self._pool = BufferPool(end)
        self.signature = _signature(shards, self.numbers)

    def acquire(self) -> Bytes:
        """Return memory for the message, which nothing else uses."""
        memory, is_new = self._pool.acquire()
        if is_new:
            # The bytes between parameters are sent too.
            memory[...] = 0
        return memory

    def slot(self, memory: Bytes, index: int, spec: Spec) -> Array:
        """Return the place of a parameter as an array."""
        dtype, shape = spec
        end = self.offsets[index] + nbytes_of(spec)
        return memory[self.offsets[index] : end].view(dtype).reshape(shape)


def _signature(shards: Sequence[Shard], numbers: Sequence[int]) -> Signature:
    leaves = tuple(
        LeafSpec(shard.path, name_of(shard.spec[0]), shard.spec[1])
        for shard in (shards[number] for number in numbers)
    )
    owners = ", ".join(str(shards[number].owner) for number in numbers)
    if len(owners) > _LONG:
        owners = f"{owners[:_LONG]}, ... ({digest(owners)})"
    return Signature(NAME, leaves=leaves, settings=(("owners", owners),))


class ExchangeShards(Operation):
    """The parameters of one message, of which every rank has updated its own."""

    name, code = NAME, 62

    def __init__(self, context: Context, message: Message, shards: Sequence[Shard]) -> None:
        super().__init__(context)
        self._message, self._shards = message, [shards[number] for number in message.numbers]
        self.signature = message.signature
        rank = self.group.rank
        self._views = [_view(shard, is_own=shard.owner == rank) for shard in self._shards]
        self._memory = message.acquire()
        for index, shard in enumerate(self._shards):
            if shard.owner == rank:
                self._slot(index)[...] = self._views[index].array
                self.copies += 1
        self.nbytes = len(self._own)

    @property
    def _own(self) -> Bytes:
        start, end = self._message.bounds[self.group.rank : self.group.rank + 2]
        return self._memory[start:end]

    def _slot(self, index: int) -> Array:
        return self._message.slot(self._memory, index, self._shards[index].spec)

    def pack(self, room: int) -> Bytes | None:
        longest = max(end - start for start, end in pairwise(self._message.bounds))
        return self._own if longest <= room else None

    def steps(self, agreement: Agreement) -> Steps:
        bounds = self._message.bounds
        if self.payload is None:
            yield from algorithms.allgatherv(self.placement.link, self._memory, bounds)
            return
        for rank, (start, end) in enumerate(pairwise(bounds)):
            self._memory[start:end] = agreement.payload(rank, end - start)

    def result(self, agreement: Agreement) -> dict[int, Any]:
        """Return the values of other ranks' parameters, by their numbers."""
        rank = self.group.rank
        return {
            self._message.numbers[index]: to_framework(self._slot(index), self._views[index])
            for index, shard in enumerate(self._shards)
            if shard.owner != rank
        }


def _view(shard: Shard, *, is_own: bool) -> BufferView:
    """Return the view of what is sent, or of what the result is to be like."""
    if not is_own:
        return result_prototype(shard.array, shard.path)
    found = view(shard.array, shard.path)
    if (found.dtype, found.shape) != shard.spec:
        dtype, shape = shard.spec
        raise TypeError(
            f"{shard.path} must keep its dtype and shape, {dtype} {shape}, since the other ranks "
            f"expect these; the update returned {found.dtype} {found.shape}; convert it in the "
            "optimizer"
        )
    return found


class Shards:
    """Exchanges what the ranks have updated of one optimizer's parameters."""

    def __init__(self, comm: Communicator, bucket_bytes: int) -> None:
        self.comm, self._bucket_bytes = comm, bucket_bytes
        self._key: Any = None
        self._messages: list[Message] = []

    def divide(
        self, specs: Iterable[Spec], known: Mapping[int, int] | None = None
    ) -> tuple[int, ...]:
        """Return which rank owns each parameter; see the function of this name."""
        return tuple(divide([nbytes_of(spec) for spec in specs], self.comm.size, known))

    def exchange(
        self, parameters: Iterable[tuple[str, int, Spec, Any]]
    ) -> Iterator[tuple[int, Any]]:
        """Yield the values of the parameters that other ranks own, with their numbers here.

        Collective. `parameters` are what `Shard` consists of. While one message moves, later ones
        are packed, and what came with earlier ones can be used.
        """
        shards = [Shard(*parameter) for parameter in parameters]
        if self.comm.size == 1 or not shards:
            return
        messages = self._messages_of(shards)
        if len(messages) == 1:
            yield from self._runner.call(ExchangeShards, messages[0], shards).items()
            return
        requests = [self._runner.start(ExchangeShards, each, shards) for each in messages]
        for number, request in enumerate(requests):
            yield from _wait(request, requests[number + 1 :]).items()

    def fail(self, error: Exception) -> NoReturn:
        """Make the other ranks' exchange raise, in step; raises `error` here."""
        self._runner.fail(NAME, error)
        raise error

    def guarded(self, update: Callable[[], Any]) -> Any:
        """Return what an update of this rank's part returns; the other ranks hear of its errors."""
        try:
            return update()
        except Exception as error:
            self.fail(error)

    @staticmethod
    def items_like(tree: Any) -> Callable[[Any], list[Any] | None]:
        """Return what finds a value's items, one for each leaf of `tree`; None if it has others."""
        leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
        flat = flatten(tree)
        is_known = [id(leaf) for leaf in leaves] == [id(leaf) for leaf in flat.leaves]

        def items(value: Any) -> list[Any] | None:
            if not is_known:
                found = flatten(value)
                return found.leaves if found.structure == flat.structure else None
            with suppress(ValueError):
                return spec.flatten_up_to(value)
            return None

        return items

    @staticmethod
    def spec_of(array: Any, path: str) -> Spec:
        """Return the dtype and shape of an array."""
        found = view(array, path)
        return found.dtype, found.shape

    @property
    def _runner(self) -> Runner:
        return runner_of(self.comm)

    def _messages_of(self, shards: Sequence[Shard]) -> list[Message]:
        """Cut the parameters into messages; those of the last call are kept, with their memory."""
        key = [shard[:3] for shard in shards]
        if key != self._key:
            parts = _cut([nbytes_of(shard.spec) for shard in shards], self._bucket_bytes)
            self._messages = [Message(part, shards, self.comm.size) for part in parts]
            self._key = key
        return self._messages


def _wait(request: Request, later: Sequence[Request]) -> dict[int, Any]:
    """Return the result of a request; if it fails, finish those that were started after it."""
    try:
        found: dict[int, Any] = request.wait()
    except BaseException:
        with forgiving:
            waitall(later)
        raise
    return found


def _cut(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Divide numbers, in order, into parts of about this many bytes."""
    parts: list[list[int]] = [[]]
    nbytes = 0
    for number, size in enumerate(sizes):
        if nbytes >= limit:
            parts.append([])
            nbytes = 0
        parts[-1].append(number)
        nbytes += size
    return parts
