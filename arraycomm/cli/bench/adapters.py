"""Steps of training with each adapter in the benchmark, beside loops without arraycomm."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm.cli.bench.contenders import (
    Contender,
    Field,
    as_numpy,
    installed,
)
from arraycomm.cli.bench.loops import BATCH, WIDTHS, WORKLOADS, Data, Loop, Mean
from arraycomm.cli.bench.train import share_cores

KEYS: Final = ("adapter", "alone", "leafwise")
# A step changes parameters by less than 1; sums in another order change that by a few roundings.
_TOLERANCE: Final = 1e-5


def available() -> tuple[str, ...]:
    """Return the names of the workloads whose packages are installed."""
    return tuple(name for name, work in WORKLOADS.items() if all(map(installed, work.needs)))


class LoopCase:
    """What one adapter trains, and every rank's samples; each contender begins anew."""

    dtype_name = "float32"

    def __init__(self, name: str, field: Field, widths: Sequence[int] = WIDTHS) -> None:
        self.workload, self._rank, self._size = WORKLOADS[name], field.rank, field.size
        if "torch" in self.workload.needs:
            share_cores(field)
        self._widths = widths
        self.parameters = _parameters(widths)
        self.nbytes = sum(parameter.nbytes for parameter in self.parameters)

    def data(self, *, everyone: bool = False) -> Data:
        """Return this rank's samples, or those of all ranks."""
        generator, count = np.random.default_rng(1), self._size * BATCH
        x = generator.standard_normal((count, self._widths[0]), np.float32)
        labels = generator.integers(0, self._widths[-1], count)
        y = np.eye(self._widths[-1], dtype=np.float32)[labels]
        mine = slice(None) if everyone else slice(self._rank * BATCH, (self._rank + 1) * BATCH)
        return Data(x[mine], y[mine], self.parameters)

    @cached_property
    def _expected(self) -> Array:
        """The parameters after one step of one process on all samples."""
        return _after_a_step(self.workload.by_hand(self.data(everyone=True), None))

    def verify(self, contender: Contender) -> str:
        """Return what is wrong with a contender's first step on this rank, or an empty string."""
        answer = contender.answer()
        if contender.key == "alone" and self._size > 1:
            return ""
        furthest = float(np.abs(answer - self._expected).max())
        if furthest <= _TOLERANCE:
            return ""
        return (
            f"after one step a parameter is {furthest:.1e} from that of one process on all samples"
        )


def make_loop(key: str, framework: str, case: LoopCase, field: Field) -> Contender:
    """Return a contender: the loop with the adapter, without arraycomm, or by hand over mpi4py."""
    if key == "adapter":
        loop = case.workload.adapted(case.data(), field.comm)
    elif key == "alone":
        loop = case.workload.by_hand(case.data(), None)
    else:
        loop = case.workload.by_hand(case.data(), _mean_by_mpi4py(field))
    return Contender(key, framework, loop.step, lambda: _after_a_step(loop))


def _mean_by_mpi4py(field: Field) -> Mean:
    from mpi4py import MPI

    def mean(array: Any) -> None:
        field.mpi.Allreduce(MPI.IN_PLACE, array)
        array /= field.size

    return mean


def _after_a_step(loop: Loop) -> Array:
    loop.step()
    rows = [as_numpy(parameter).reshape(-1) for parameter in loop.parameters()]
    return np.concatenate(rows)


def _parameters(widths: Sequence[int]) -> list[Array]:
    """Return the weights and biases of a network, one layer after the other."""
    generator, made = np.random.default_rng(0), list[Array]()
    for inputs, outputs in pairwise(widths):
        weights = generator.standard_normal((inputs, outputs), np.float32)
        made += [weights * np.float32(inputs**-0.5), np.zeros(outputs, np.float32)]
    return made
