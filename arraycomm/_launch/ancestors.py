"""The launcher of this process: the ancestor that started it as a rank of a job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from arraycomm._launch.places import proc_is_own

# The processes that start ranks on their node, by the names that the kernel cuts to 15 letters.
_LAUNCHERS: Final = frozenset(
    (
        *("prterun", "prted", "orterun", "orted", "mpirun", "mpiexec"),
        *("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr", "slurmstepd"),
    )
)


class Ancestor(NamedTuple):
    """A process that this one descends from: its name, its parent, and when it began.

    The last is empty once it has ended, and nobody has asked for its status.
    """

    pid: int
    name: str
    parent: int
    since: str

    def lives(self) -> bool:
        """Return whether it goes on; its number may go to another one."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        found = _process(self.pid)
        return found is None or found.since == self.since

    def __str__(self) -> str:
        return f"{self.name}, process {self.pid}"


def find_launcher(pid: int) -> Ancestor | None:
    """Return the closest ancestor of a process that is a launcher, which may be itself."""
    while pid > 1 and proc_is_own() and (found := _process(pid)):
        if found.name in _LAUNCHERS:
            return found
        pid = found.parent
    return None


def children_of(pid: int) -> list[int]:
    """Return the processes that another one has started, as far as they can be seen."""
    everyone = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [child for child in everyone if (found := _process(child)) and found.parent == pid]


def _process(pid: int) -> Ancestor | None:
    """Return what can be seen of a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses, and may itself contain some.
    name, rest = stat[stat.index("(") + 1 :].rsplit(")", 1)
    state, parent, *others = rest.split()
    return Ancestor(pid, name, int(parent), "" if state in "ZX" else others[17])
