"""Messages in the benchmark: each rank sends an array to the next one, and receives that of the one before."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm.cli.bench.contenders import Case, Contender, Field, pattern

KEYS: Final = ("message", "fresh-message", "mpi4py-message", "mpi4py-pickled")
SIZES: Final = (8, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 8 << 20)


class MessageCase(Case):
    """One array to send, and memory for the one that comes."""

    def __init__(self, nbytes: int, field: Field) -> None:
        super().__init__("float32", nbytes, field.rank, field.size)
        self.to, self.of = (field.rank + 1) % field.size, (field.rank - 1) % field.size
        self.expected: Array = pattern(self.of, self.count).astype(self.dtype)


def make_message(key: str, framework: str, case: MessageCase, field: Field) -> Contender:
    """Return what sends and receives."""
    x, y, to, of = case.x, case.y, case.to, case.of
    comm, mpi = field.comm, field.mpi

    def into() -> Any:
        return comm.sendrecv(x, to, of, out=y)

    def fresh() -> Any:
        return comm.sendrecv(x, to, of)

    def by_mpi() -> Any:
        mpi.Sendrecv(x, to, 0, y, of, 0)
        return y

    def pickled() -> Any:
        return mpi.sendrecv(x, to, 0, None, of, 0)

    call = dict(zip(KEYS, (into, fresh, by_mpi, pickled), strict=True))[key]
    return Contender(key, framework, call, lambda: np.array(call()))
