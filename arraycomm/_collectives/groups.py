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
from functools import partial
from typing import Any, Final

import numpy as np

from arraycomm._calls.operation import NO_SHARE, Context, Operation, Share
from arraycomm._calls.placement import Placements
from arraycomm._calls.runner import OperationClass, Runner
from arraycomm._callsite import user_level
from arraycomm._checks import check_integer
from arraycomm._errors import BackendUnavailableError, CommunicatorClosedError
from arraycomm._protocol.agreement import Agreement
from arraycomm._protocol.group import Child, Group, Options
from arraycomm._protocol.header import Signature
from arraycomm._transports.base import Bytes

_COLOR_AND_KEY: Final = struct.Struct("<?qq")
# Bytes that MPI and what ranks share may take for a communicator.
_NEEDED: Final = 8 << 20
# How many groups made from one can go at once.
_MOST: Final = 512
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

    def __init__(self, context: Context, *_: None) -> None:
        super().__init__(context)
        self.signature = Signature(self.name)

    def share(self) -> Share:
        return NO_SHARE


class Split(SmallExchange):
    """See `Communicator.split`."""

    name, code = "split", 10

    def __init__(self, context: Context, color: int | None, key: int) -> None:
        super().__init__(context, data=_pack(color, key))


class _AllOf(SmallExchange):
    """Finds the groups made from this one that all ranks can let go: each tells which it can."""

    def __init__(self, context: Context, over: Iterable[bool]) -> None:
        mask = sum(1 << place for place, bit in enumerate(itertools.islice(over, _MOST)) if bit)
        super().__init__(context, None, mask.to_bytes(_MOST // 8, "little"))

    def result(self, agreement: Any) -> Any:
        masks = [int.from_bytes(reply, "little") for reply in super().result(agreement)]
        return functools.reduce(operator.and_, masks)


class Dup(SmallExchange):
    """See `Communicator.dup`; what the ranks compare are the new options, and `settings`."""

    name, code = "dup", 11

    def __init__(
        self, context: Context, options: dict[str, Any], chosen: list[Options], settings: str = ""
    ) -> None:
        chosen.append(replace(context.group.options, **options))
        super().__init__(context, f"{chosen[-1]!r}{settings}")


class Confirm(_AllOf):
    """Tells all ranks that this one is about to make its part of a new group.

    The others wait for it inside MPI then, where no error reaches them: so a rank that has no
    memory for it raises here.
    """

    name = "new communicator"

    def __init__(self, context: Context) -> None:
        super().__init__(context, (child.is_over() for child in context.group.children))
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
        children = context.group.children
        super().__init__(context, (child.is_over() or _goes_along(child) for child in children))


def _goes_along(child: Child) -> bool:
    made = child.group
    return child.hidden and made is not None and made.closed is None and made.may_go()


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
    runner.call(operation, options, chosen, *arguments)
    made = _open(runner, "dup", [(True, 0, 0)] * runner.group.size, chosen[0])
    assert made is not None
    runner.statistics.include(made.statistics)
    made.group.on_free.append(partial(runner.statistics.take_over, made.statistics))
    made.original = runner
    return made


def hide(shared: Runner, made: Runner, used: object) -> None:
    """Let a duplicate be freed with the group it was made of, or once no rank has its user."""
    for child in shared.group.children:
        if child.group is made.group:
            child.user, child.hidden = weakref.ref(used), True


def _let_go(group: Group, mask: int) -> None:
    """Free groups of which every rank has said that it can; collective."""
    chosen = [child for place, child in enumerate(group.children) if mask >> place & 1]
    group.children = [child for child in group.children if child not in chosen]
    for child in chosen:
        if child.group is not None:
            group.engine.outcomes.take(child.group.engine.outcomes)
        _release(child.group)


def _release(group: Group | None) -> None:
    """Free the transport of a group on which no rank has anything under way; collective.

    What was made from it goes along.
    """
    if group is None or group not in group.related:
        return
    for child in group.children:
        if child.is_over():
            _release(child.group)
    for hook in group.on_free:
        hook()
    _end(group)
    group.transport.free()
    group.transport.kept.clear()


def _end(group: Group) -> None:
    if group in group.related:
        if group.closed is None:
            group.end(CommunicatorClosedError("it was freed"))
        group.related.remove(group)


def free(runner: Runner) -> None:
    """See `Communicator.free`."""
    group = runner.group
    if group.closed is not None:
        # It was freed before, or an error ended it: then it goes when another one is made.
        return
    lost = sum(runner.call(Free, group.unmatched))
    while group.children:
        _let_go(group, runner.call(Hidden))
        for child in group.children[:_MOST]:
            if child.hidden and child.group is not None:
                # It is in use, or unfinished: then the end of the program takes care of it.
                _end(child.group)
        del group.children[:_MOST]
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
    wanted = "color must be an integer or None, and key an integer"
    given = [check_integer(each, wanted) for each in (0 if color is None else color, key)]
    try:
        return _COLOR_AND_KEY.pack(color is not None, *given)
    except struct.error:
        raise TypeError(f"{wanted}, of 64 bits; got {color!r}, {key!r}") from None


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
    for ended in group.related:
        ended.forget_frames()
    with interrupts_deferred():
        # Nothing can interrupt MPI's part in this, so no rank goes there unless all will.
        _let_go(group, runner.call(Confirm))
        with group.turn():
            transport = group.transport.split(number, members, group.wait)
        made = (
            None if transport is None else _child(group, Group(transport, options, name), members)
        )
    child = Child(made, lambda: True)
    group.children.append(child)
    device_link = None
    if options.reproducible == group.options.reproducible:
        with group.turn():
            splitting = runner.placements.split(number, key)
            device_link = group.engine.run(group.guarded(splitting))
    if made is None:
        return None
    placements: Placements = runner.placements.child(made, device_link)
    opened = Runner(made, placements)
    child.user = weakref.ref(opened)
    return opened


def _child(group: Group, made: Group, members: list[int]) -> Group:
    """Let a group be of the family of the one from whose `members` it was made; return it."""
    made.backend, made.tracer = group.backend, group.tracer
    made.related = group.related
    made.family_ranks = [group.family_ranks[rank] for rank in members]
    made.watchdog.deadlocks.reports = group.watchdog.deadlocks.reports
    group.related.append(made)
    return made
