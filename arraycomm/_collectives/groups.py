"""How communicators are made from others, and freed."""

from __future__ import annotations

import operator
import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from arraycomm._collectives.operation import Call, agreement_only
from arraycomm._errors import BackendUnavailableError, CommunicatorClosedError

if TYPE_CHECKING:
    from arraycomm._communicator import Communicator, Options

_COLOR_AND_KEY: Final = struct.Struct("<?qq")


def split(comm: Communicator, color: int | None, key: int) -> Communicator | None:
    """See `Communicator.split`."""

    def prepare(comm: Communicator) -> Call:
        return agreement_only("split", data=_pack(color, key))

    said = [_COLOR_AND_KEY.unpack(data) for data in comm._call("split", prepare)]
    return _open(comm, "split", said, comm._options)


def split_by_node(comm: Communicator) -> Communicator:
    """See `Communicator.split_by_node`."""
    made = split(comm, comm._link.nodes()[comm.rank], 0)
    assert made is not None
    return made


def dup(
    comm: Communicator, options: dict[str, Any], check: Callable[[], str] = lambda: ""
) -> Communicator:
    """Return a communicator of the same ranks, with these options where they are to differ.

    Where `check` raises on one rank, it raises there and tells the other ranks; what it returns has
    to be the same on all.
    """
    chosen: list[Options] = []

    def prepare(comm: Communicator) -> Call:
        settings = check()
        chosen.append(replace(comm._options, **options))
        return agreement_only("dup", f"{chosen[0]!r}{settings}")

    comm._call("dup", prepare)
    made = _open(comm, "dup", [(True, 0, 0)] * comm.size, chosen[0])
    assert made is not None
    made._original = comm
    comm._duplicates.append(made)
    return made


def free(comm: Communicator) -> None:
    """See `Communicator.free`."""
    if comm._closed is not None:
        # It was freed before, or an error ended it: then the end of the program takes care of it.
        return
    lost = sum(tell_unmatched(comm, "free", comm._unmatched))
    # Every rank has started its messages by now, and the group is needed until they are there.
    comm._engine.drain()
    comm._devices.close()
    comm._forget_short()
    comm._closed = CommunicatorClosedError("it was freed")
    comm._related.remove(comm)
    if lost > 0:
        warn_of_messages("free", lost)
    else:
        comm._link.free()
    if comm._original is not None:
        comm._original._take_over_stats(comm)


def shrink(comm: Communicator) -> Communicator:
    """See `Communicator.shrink`."""
    from arraycomm._session import replace_root

    link = comm._link.shrink()
    if link is None:
        raise BackendUnavailableError(
            f"shrink: the transport {comm.backend!r}, as it was started, does not outlive the death "
            "of a process; start the program with Open MPI's mpiexec --with-ft ulfm"
        )
    made = type(comm)(link, comm._options, f"{comm._name}/shrunk")
    made._devices.device_request = comm._devices.device_request
    for member in list(comm._related):
        member._close(CommunicatorClosedError("shrink() has replaced it"))
        # Revoked: nothing of it is under way any more.
        member._unfinished = False
    replace_root(comm, made)
    return made


def tell_unmatched(comm: Communicator, operation: str, number: int) -> list[int]:
    """Tell all ranks how many messages this one has sent more than received; return everyone's."""
    data = number.to_bytes(8, "little", signed=True)
    said = comm._call(operation, lambda _: agreement_only(operation, data=data))
    return [int.from_bytes(other, "little", signed=True) for other in said]


def warn_of_messages(operation: str, lost: int) -> None:
    """Warn of messages that wait where nobody receives them.

    Their transport is not freed: MPI could hand them to the receives of one made later in its place.
    """
    warnings.warn(
        f"{operation}: {lost} of the messages that were sent have never been received",
        RuntimeWarning,
        stacklevel=4,
    )


def _pack(color: Any, key: Any) -> bytes:
    try:
        number = 0 if color is None else operator.index(color)
        return _COLOR_AND_KEY.pack(color is not None, number, operator.index(key))
    except (TypeError, struct.error):
        raise TypeError(
            f"split: color must be an integer or None, and key an integer; got {color!r}, {key!r}"
        ) from None


def _open(
    comm: Communicator, kind: str, said: list[tuple[bool, int, int]], options: Options
) -> Communicator | None:
    """Make this rank's new communicator from what every rank said: (takes part, color, key)."""
    takes_part, color, _ = said[comm.rank]
    colors = sorted({color for taking, color, _ in said if taking})
    members = [r for r, (taking, other, _) in enumerate(said) if taking and other == color]
    members.sort(key=lambda rank: (said[rank][2], rank))
    comm._made += 1
    name = f"{comm._name}/{kind}-{comm._made}"
    with comm._turn():
        group = colors.index(color) if takes_part else None
        link = comm._link.split(group, members)
        key = members.index(comm.rank) if takes_part else 0
        device_link = None
        if options.reproducible == comm._options.reproducible:
            device_link = comm._engine.run(comm._guarded(comm._devices.split(group, key)))
    if link is None:
        return None
    made = type(comm)(link, options, name)
    made._devices.adopt(comm._devices, device_link)
    made._related = comm._related
    comm._related.append(made)
    return made
