"""How processes of one node come together without MPI, once they can tell one another texts."""

from __future__ import annotations

import json
import socket
from contextlib import closing
from dataclasses import replace

from arraycomm._errors import BackendUnavailableError
from arraycomm._exit.exit import refuse_forked_child, watch_exit
from arraycomm._launch.places import host, namespaces
from arraycomm._native.build import seen
from arraycomm._protocol.mismatch import by_ranks
from arraycomm._start.arguments import Arguments, Tell, agree, refuse_different
from arraycomm._start.joining import join
from arraycomm._start.numbering import Numbering, without_mpi
from arraycomm._start.opened import Opened, open_root
from arraycomm._transports.processes.transport import ProcessesTransport, meet, memory_bytes


def open_by_numbers(found: Numbering, arguments: Arguments) -> Opened:
    """Open a group over the processes that the environment numbers; collective."""
    refuse_forked_child("init")
    with closing(join(found)) as meeting:
        return open_on_node(meeting.tell, found.rank, found.size, arguments)


def open_on_node(tell: Tell, rank: int, size: int, arguments: Arguments) -> Opened:
    """Open a group over the processes that `tell` one another texts; collective.

    If the arguments of a rank are wrong, it raises, and all others raise `PeerError`.
    """
    refuse_forked_child("init")
    watch_exit()
    refuse_different(seen(), tell)
    options, request = agree(lambda: replace(arguments, backend="auto").checked(rank, size), tell)
    memory, lives = meet(tell, rank, size)
    if memory is None:
        raise BackendUnavailableError(
            f"init: the ranks are not able to map the same memory: {_why_apart(tell, size)}"
        )
    return open_root(ProcessesTransport(memory, rank, size, lives), options, request)


def _why_apart(tell: Tell, size: int) -> str:
    """Say why the ranks share no memory, all of which ask, and what to do."""
    where = json.dumps([host(), socket.gethostname(), namespaces()])
    hosts, names, spaces = zip(*map(json.loads, tell("place", where)), strict=True)
    if len(set(hosts)) > 1:
        return f"they are on several hosts ({by_ranks(names)}); {without_mpi(size)}"
    own = [kind for kind in spaces[0] if any(of.get(kind) != spaces[0][kind] for of in spaces)]
    if own:
        return (
            f"they do not have the same {', '.join(own)}, as in containers; let these share "
            "/dev/shm, for example with: docker run --ipc=host, and run as one user"
        )
    return (
        f"there is no room for {memory_bytes(size) / (1 << 20):.3g} MiB in memory, in /dev/shm and "
        "where temporary files go, or the system forbids it (ulimit -f, ulimit -n); make room"
    )
