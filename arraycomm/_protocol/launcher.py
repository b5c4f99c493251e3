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
    """Return the closest ancestor of a process that is a launcher."""
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        # The name stands in parentheses, and may itself contain some.
        name, rest = stat[stat.index("(") + 1 :].rsplit(")", 1)
        if name in _LAUNCHERS:
            return Ancestor(pid, name)
        pid = int(rest.split()[1])
    return None
