"""How groups are made from others, and freed."""

from __future__ import annotations

import functools
import itertools
import mmap
import operator
import signal
import struct
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np

from arraycomm._calls.operation import Context, Operation
from arraycomm._calls.placement import Placements
from arraycomm._calls.runner import OperationClass, Runner
from arraycomm._callsite import user_level
from arraycomm._errors import BackendUnavailableError, CommunicatorClosedError
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.group import Group, Options
from arraycomm._protocol.header import Signature
from arraycomm._transports.base import Bytes

_COLOR_AND_KEY: Final = struct.Struct("<?qq")
# Bytes that MPI and what ranks share may take for a communicator.
_NEEDED: Final = 8 << 20
# How many hidden duplicates one call can free.
_MOST: Final = 64
# Said in place of a number of messages: one of the groups was closed by an error.
ENDED_BY_ERROR: Final = -1 << 63


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Defer Ctrl-C in this thread to the end of the block; a second one is not deferred."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        # Python interrupts no other thread.
        yield
        return
    came: list[tuple[Any, ...]] = []

    def defer(*args: Any) -> None:
        if came:
            came.clear()
            handler(*args)
        came.append(args)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        handler(*came[0])


class SmallExchange(Operation):
    """An operation finished with its header; it returns every rank's data, of one length."""

    def __init__(self, context: Context, op: str | None = None, data: bytes = b"") -> None:
        super().__init__(context)
        self.signature = Signature(self.name, op)
        self._data = np.frombuffer(data, np.uint8)

    def pack(self, room: int) -> Bytes:
        return self._data

    def result(self, agreement: Agreement) -> Any:
        count = len(self._data)
        return [agreement.payload(rank, count).tobytes() for rank in range(self.group.size)]


class Barrier(Operation):
    """See `Communicator.barrier`."""

    name, code = "barrier", 7

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.signature = Signature(self.name)


class Split(SmallExchange):
    """See `Communicator.split`."""

    name, code = "split", 10

    def __init__(self, context: Context, color: int | None, key: int) -> None:
        super().__init__(context, data=_pack(color, key))


class _AllOf(SmallExchange):
    """Finds the hidden duplicates that all ranks can let go: each tells which it can."""

    def __init__(self, context: Context, op: str | None, mask: int) -> None:
        super().__init__(context, op, mask.to_bytes(_MOST // 8, "little"))

    def result(self, agreement: Any) -> Any:
        masks = [int.from_bytes(reply, "little") for reply in super().result(agreement)]
        return functools.reduce(operator.and_, masks)


def _mask(bits: Iterable[bool]) -> int:
    return sum(1 << place for place, bit in enumerate(itertools.islice(bits, _MOST)) if bit)


def _at_rest(group: Group) -> int:
    """Return which hidden duplicates have nothing under way on this rank."""
    return _mask(
        made.closed is None and made.at_rest() and not made.unmatched for made, _ in group.hidden
    )


class Dup(_AllOf):
    """See `Communicator.dup`; what the ranks compare are the new options, and `settings`."""

    name, code = "dup", 11

    def __init__(
        self, context: Context, options: dict[str, Any], chosen: list[Options], settings: str = ""
    ) -> None:
        chosen.append(replace(context.group.options, **options))
        unused = _mask(user() is None for _, user in context.group.hidden)
        super().__init__(context, f"{chosen[-1]!r}{settings}", unused & _at_rest(context.group))


class Confirm(SmallExchange):
    """Tells all ranks that this one is about to make its part of a new group.

    The others wait for it inside MPI then, where no error reaches them: so a rank that has no
    memory for it raises here.
    """

    name = "new communicator"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        try:
            mmap.mmap(-1, _NEEDED, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError as error:
            raise MemoryError(
                f"a new communicator may need {_NEEDED >> 20} MiB, which this rank does not have"
            ) from error


class CountMessages(SmallExchange):
    """Tells all ranks how many messages each has sent more than received."""

    def __init__(self, context: Context, number: int) -> None:
        super().__init__(context, data=number.to_bytes(8, "little", signed=True))

    def result(self, agreement: Any) -> Any:
        replies = super().result(agreement)
        return [int.from_bytes(reply, "little", signed=True) for reply in replies]


class Hidden(_AllOf):
    """See `Communicator.free`: what it takes along."""

    name = "free"

    def __init__(self, context: Context) -> None:
        super().__init__(context, None, _at_rest(context.group))


class Free(CountMessages):
    """See `Communicator.free`."""

    name, code = "free", 12


class Finalize(CountMessages):
    """See `arraycomm.finalize`."""

    name, code = "finalize", 17


def split(runner: Runner, color: int | None, key: int) -> Runner | None:
    """Return the runner of this rank's new group, or None if it passes no color."""
    replies = runner.call(Split, color, key)
    members = [_COLOR_AND_KEY.unpack(reply) for reply in replies]
    return _open(runner, "split", members, runner.group.options)


def split_by_node(runner: Runner) -> Runner:
    """Return the runner of the ranks on this rank's node."""
    made = split(runner, runner.group.transport.nodes()[runner.group.rank], 0)
    assert made is not None
    return made


def dup(
    runner: Runner, options: dict[str, Any], operation: OperationClass[...] = Dup, *arguments: Any
) -> Runner:
    """Return the runner of a group of the same ranks, with these options instead of the old ones.

    `operation` is how the ranks agree on that; it gets further `arguments`.
    """
    chosen: list[Options] = []
    _let_go(runner.group, runner.call(operation, options, chosen, *arguments))
    made = _open(runner, "dup", [(True, 0, 0)] * runner.group.size, chosen[0])
    assert made is not None
    runner.statistics.include(made.statistics)
    made.original = runner
    return made


def hide(shared: Runner, made: Runner, used: object) -> None:
    """Let a duplicate be freed with the group it was made of, or once no rank has its user."""
    shared.group.hidden.append((made.group, weakref.ref(used)))


def _let_go(group: Group, mask: int) -> None:
    """Free hidden duplicates of which every rank has said that it can; collective."""
    chosen = [pair for place, pair in enumerate(group.hidden) if mask >> place & 1]
    for pair in chosen:
        group.hidden.remove(pair)
        _release(pair[0])


def _release(group: Group) -> None:
    """Free the transport of a group on which no rank has anything under way; collective."""
    for hook in group.on_free:
        hook()
    _end(group)
    group.transport.free()


def _end(group: Group) -> None:
    if group in group.related:
        group.end(CommunicatorClosedError("it was freed"))
        group.related.remove(group)


def free(runner: Runner) -> None:
    """See `Communicator.free`."""
    group = runner.group
    if group.closed is not None:
        # It was freed before, or an error ended it: then the end of the program takes care of it.
        return
    lost = sum(runner.call(Free, group.unmatched))
    while group.hidden:
        _let_go(group, runner.call(Hidden))
        for made, _ in group.hidden[:_MOST]:
            # An error has put its ranks out of step: then the end of the program takes care of it.
            _end(made)
        del group.hidden[:_MOST]
    # Every rank has started its messages by now, and the group is needed until they are there.
    group.engine.drain()
    group.engine.outcomes.free()
    if lost > 0:
        for hook in group.on_free:
            hook()
        _end(group)
        warn_of_messages("free", lost)
    else:
        _release(group)
    if runner.original is not None:
        runner.original.statistics.take_over(runner.statistics)


def shrink(runner: Runner) -> Runner:
    """See `Communicator.shrink`."""
    group = runner.group
    transport = group.transport.shrink()
    if transport is None:
        raise BackendUnavailableError(
            f"shrink: the transport {group.backend!r}, as it was started, does not outlive the "
            "death of a process; start the program with Open MPI's mpiexec --with-ft ulfm"
        )
    made = Group(transport, group.options, f"{group.name}/shrunk")
    for member in list(group.related):
        member.close(CommunicatorClosedError("shrink() has replaced it"))
        # Revoked: nothing of it is under way any more.
        member.unfinished = False
    return Runner(made, runner.placements.for_survivors(made))


def warn_of_messages(operation: str, lost: int) -> None:
    """Warn of messages that wait for a receive that nobody makes.

    Their transport is not freed: MPI could hand them to the receives of one made later in its
    place.
    """
    warnings.warn(
        f"{operation}: {lost} of the messages that were sent have never been received",
        RuntimeWarning,
        stacklevel=user_level(),
    )


def _pack(color: Any, key: Any) -> bytes:
    try:
        number = 0 if color is None else operator.index(color)
        return _COLOR_AND_KEY.pack(color is not None, number, operator.index(key))
    except (TypeError, struct.error):
        raise TypeError(
            f"color must be an integer or None, and key an integer; got {color!r}, {key!r}"
        ) from None


def _open(
    runner: Runner, kind: str, replies: list[tuple[bool, int, int]], options: Options
) -> Runner | None:
    """Make this rank's new group from what every rank said: (takes part, color, key)."""
    group = runner.group
    takes_part, color, _ = replies[group.rank]
    colors = sorted({color for taking, color, _ in replies if taking})
    members = [r for r, (taking, other, _) in enumerate(replies) if taking and other == color]
    members.sort(key=lambda rank: (replies[rank][2], rank))
    group.made += 1
    name = f"{group.name}/{kind}-{group.made}"
    number = colors.index(color) if takes_part else None
    key = members.index(group.rank) if takes_part else 0
    with interrupts_deferred():
        # Nothing can interrupt MPI's part in this, so no rank goes there unless all will.
        runner.call(Confirm)
        with group.turn():
            transport = group.transport.split(number, members)
        made = (
            None if transport is None else _child(group, Group(transport, options, name), members)
        )
    device_link = None
    if options.reproducible == group.options.reproducible:
        with group.turn():
            splitting = runner.placements.split(number, key)
            device_link = group.engine.run(group.guarded(splitting))
    if made is None:
        return None
    placements: Placements = runner.placements.child(made, device_link)
    return Runner(made, placements)


def _child(group: Group, made: Group, members: list[int]) -> Group:
    """Let a group be of the family of the one from whose `members` it was made; return it."""
    made.backend, made.tracer = group.backend, group.tracer
    made.related = group.related
    made.family_ranks = [group.family_ranks[rank] for rank in members]
    made.watchdog.deadlocks.reports = group.watchdog.deadlocks.reports
    group.related.append(made)
    return made
