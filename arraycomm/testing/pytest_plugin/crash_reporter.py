"""A process beside the ranks of one node, which says what a rank was doing if it dies.

Most launchers end all ranks at once if one dies, so that none of them can say it. Rank 0 starts this
process, which imports only the standard library, and writes "end" into its standard input when the run is
over.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
from pathlib import Path
from typing import Final

# Bytes of the note of one rank.
SLOT: Final = 1024


def wait_for_death(watched: dict[int, int]) -> list[int]:
    """Return the ranks whose processes were the first to end; none if the run ended well.

    `watched` has the rank of each handle of a process.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    for handle in watched:
        poll.register(handle, select.POLLIN)
    ready = {handle for handle, _ in poll.poll()}
    if sys.stdin.fileno() in ready and os.read(sys.stdin.fileno(), 3) == b"end":
        return []
    return sorted(watched[handle] for handle in ready if handle in watched) or [0]


def notes_of(directory: Path, ranks: list[int]) -> list[str]:
    """Return what ranks have noted last."""
    notes = (directory / "notes").read_bytes()
    return [notes[rank * SLOT : (rank + 1) * SLOT].rstrip(b" \0").decode() for rank in ranks]


def main(directory: Path, near: dict[int, tuple[int, int]]) -> None:
    """Wait for the end of the run or of a rank, and say which it was; `near` has pids and handles."""
    dead = wait_for_death({handle: rank for rank, (_, handle) in near.items()})
    if not dead:
        return
    lines = [
        f"\narraycomm: rank {rank} (process {near[rank][0]}) died in {note}\n"
        for rank, note in zip(dead, notes_of(directory, dead), strict=True)
    ]
    sys.stderr.write("".join(lines))
    sys.stderr.flush()
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), {int(rank): pair for rank, pair in json.loads(sys.argv[2]).items()})
