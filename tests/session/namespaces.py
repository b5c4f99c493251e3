"""What a rank in a container does: calls of all kinds, of which it prints that they were right, or the error."""

from __future__ import annotations

import os
import sys
from tempfile import TemporaryFile

import numpy as np

import arraycomm as ac

# Files that not every rank has, long enough to be taken for the memory of ranks.
DATA = [TemporaryFile() for _ in range(12) if os.environ.get("ARRAYCOMM_PROCESS_ID") == "1"]  # noqa: SIM115
for file in DATA:
    file.truncate(1 << 24)


def calls(comm: ac.Communicator) -> str:
    """Make small and large calls, in a group of all ranks that another rank makes too."""
    size, turned = comm.size, comm.size - 1 - comm.rank
    x = np.full(300_000, comm.rank + 1.0)
    assert comm.allreduce(comm.rank) == sum(range(size))
    assert (comm.allreduce(x) == sum(range(size + 1))).all()
    with comm.split(0, key=turned) as part:
        assert part.rank == turned
        # Long enough for MPI to take it from the other's memory.
        got = part.sendrecv(x, (turned + 1) % size, (turned - 1) % size)
        assert (got == size - (turned - 1) % size).all()
    return "right"


def main() -> None:
    """Print one line, in one piece."""
    if "begun" in sys.argv:
        from mpi4py import MPI

        assert MPI.Is_initialized()
    try:
        said = calls(ac.init(timeout=20))
    except ac.ArrayCommError as error:
        said = f"told: {error}"
    if any(os.fstat(file.fileno()).st_blocks for file in DATA):
        said = "wrong: a file of the program has been written"
    sys.stdout.write(f"{said}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
