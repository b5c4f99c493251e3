"""Hosts on one machine: network namespaces with an address and a name each, so that MPI takes them for nodes.

Needs root and `ip`. What is started on one host reaches another only over the network between them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.launcher import LAUNCHED, LAUNCHER, SETTINGS, UNSET, is_open_mpi

# In place of ssh: runs a command on the host of an address, and gives it the host's name.
_AGENT: Final = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
name={prefix}h${{1##*.}}; shift
exec ip netns exec "$name" unshare --uts sh -c 'hostname "$0" && exec sh -c "$1"' "$name" "$*"
"""
# How often a process has had hosts, and how often it may have them at the same time.
_made: Final = itertools.count()
_SETS: Final = 4
# UCX would find out that the hosts are one machine, and use its memory.
_NETWORK: Final = {"UCX_TLS": "tcp,self"}


class Hosts:
    """Hosts that are up.

    Parameters
    ----------
    count : int
        How many.
    folder : Path
        Where the program that stands in for ssh is kept.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        # Of this process, which may have hosts more than once, as others may.
        number = _SETS * os.getpid() + next(_made) % _SETS
        self._prefix = f"ac{number % 1_000_000}"
        self._network = f"10.{64 + number // 250 % 64}.{number % 250}"
        self._agent = folder / "agent"
        self._agent.write_text(_AGENT.format(prefix=self._prefix), encoding="utf-8")
        self._agent.chmod(self._agent.stat().st_mode | stat.S_IXUSR)

    def names(self) -> list[str]:
        """Return the names of the namespaces."""
        return [f"{self._prefix}h{number + 1}" for number in range(self.count)]

    def up(self) -> None:
        """Make the hosts, and a network between them."""
        bridge = f"{self._prefix}b"
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(self.names(), 1):
            outside = f"{self._prefix}v{number}"
            _ip("netns", "add", name)
            _ip("link", "add", outside, "type", "veth", "peer", "name", "e0", "netns", name)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{self._network}.{number}/24", "dev", "e0")
            _ip("-n", name, "link", "set", "e0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def down(self) -> None:
        """Remove the hosts, and what still runs there."""
        for number, name in enumerate(self.names()):
            self.kill(number)
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"{self._prefix}b")

    def received(self, number: int) -> int:
        """Return how many bytes a host has got over the network."""
        statistics = Path(f"/sys/class/net/{self._prefix}v{number + 1}/statistics")
        # What the host receives its link outside has sent.
        return int((statistics / "tx_bytes").read_text())

    def processes(self, number: int) -> list[int]:
        """Return the processes that run on a host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.names()[number]],
            capture_output=True,
            text=True,
            check=False,
        )
        return [int(word) for word in found.stdout.split()]

    def kill(self, number: int) -> None:
        """End all processes of a host at once."""
        for process in self.processes(number):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def connect(self, number: int, *, connected: bool = True) -> None:
        """Take a host from the network, or bring it back."""
        state = "up" if connected else "down"
        _ip("link", "set", f"{self._prefix}v{number + 1}", state)

    def start(self, each: int, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start the interpreter with these arguments on this many ranks of each host."""
        places = ",".join(f"{self._network}.{number + 1}:{each}" for number in range(self.count))
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names()[0]]
        ranks = ["-n", str(self.count * each), sys.executable, *arguments]
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", self.names()[0], *named),
                *(str(LAUNCHER), *self._options(), places, *ranks),
            ],
            env=kept | SETTINGS | _NETWORK | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _options(self) -> Sequence[str]:
        if is_open_mpi():
            subnet = f"{self._network}.0/24"
            # PMIx and PRRTE have settings of their own.
            return [
                *("--prtemca", "plm_ssh_agent", str(self._agent)),
                *("--prtemca", "prte_if_include", subnet, "--mca", "btl_tcp_if_include", subnet),
                *("--map-by", "slot:oversubscribe", "--host"),
            ]
        return ["-launcher", "ssh", "-launcher-exec", str(self._agent), "-hosts"]


@contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """Have hosts on this machine."""
    made = Hosts(count, folder)
    try:
        made.up()
        yield made
    finally:
        made.down()


@cache
def why_not() -> str:
    """Return why there can be no hosts here; empty if there can be."""
    if LAUNCHED or not LAUNCHER.exists():
        return "no mpiexec beside the interpreter or on PATH, or under one"
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return "hosts on one machine need root, ip and unshare"
    name = f"ac{os.getpid()}try"
    try:
        _ip("netns", "add", name)
        try:
            _ip("link", "add", f"{name}b"[-15:], "type", "bridge")
            _ip("link", "del", f"{name}b"[-15:])
        finally:
            _ip("netns", "del", name)
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no network namespaces can be made here: {error}"
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
