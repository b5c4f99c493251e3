"""The launcher of this process: the ancestor that started it as a rank of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

# The processes that start ranks on their node, by the names that the kernel cuts to 15 letters.
_LAUNCHERS: Final = frozenset(
    (
        *("prterun", "prted", "orterun", "orted", "mpirun", "mpiexec"),
        *("mpiexec.hydra", "hydra_pmi_proxy", "hydra_bstrap_pr", "slurmstepd"),
    )
)


class Ancestor(NamedTuple):
    """A process that this one descends from, and its name."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}, process {self.pid}"


def find_launcher(pid: int) -> Ancestor | None:
    """Return the closest ancestor of a process that is a launcher, which may be itself."""
    while pid > 1:
        found = _process(pid)
        if found is None or found[0] in _LAUNCHERS:
            return None if found is None else Ancestor(pid, found[0])
        pid = found[1]
    return None


def children_of(pid: int) -> list[int]:
    """Return the processes that another one has started, as far as they can be seen."""
    everyone = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [child for child in everyone if (found := _process(child)) and found[1] == pid]


def _process(pid: int) -> tuple[str, int] | None:
    """Return the name of a process, and its parent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name stands in parentheses, and may itself contain some.
    name, rest = stat[stat.index("(") + 1 :].rsplit(")", 1)
    return name, int(rest.split()[1])
