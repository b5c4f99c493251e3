"""The training programs of the documents, on one rank and on two: the numbers are the same, also after a break."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.support.launcher import needs_mpiexec, run_python

PROGRAM = str(Path(__file__).with_name("trainings.py"))
# Losses are printed with six digits. Of float64 some hundred roundings are below. One of float32 is
# 6e-8, and the network learns for 30 steps from hundreds of them. Of float16, it is 5e-4, in every
# gradient: means over an epoch, in which they cancel out, differ by some of them. Of bfloat16 it is 4e-3, in
# every product, but parameters and sums are of float32.
SLACK = {"float64": 2e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 2e-2}
FULL = {"train_numpy": "float64", "train_torch": "float32", "train_jax": "float32"}
MIXED = {"train_numpy": "float16", "train_torch": "float16", "train_jax": "bfloat16"}
MODULES = {
    "train_numpy": ("sklearn", "tqdm"),
    "train_torch": ("sklearn", "tqdm", "torch"),
    "train_jax": ("sklearn", "tqdm", "jax", "optax"),
}


class Epoch(NamedTuple):
    loss: float
    rate: float
    validation_loss: float
    accuracy: float


@lru_cache
def runs() -> dict[tuple[str, int, str], dict[int, Epoch]]:
    """Return every run's epochs, by the program, the number of ranks and its name."""
    found = {}
    with TemporaryDirectory() as directory:
        for ranks in (2, 1):
            job = run_python("-P", PROGRAM, directory, ranks=ranks if ranks > 1 else None)
            assert job.returncode == 0, job.stdout + job.stderr
            for program, name, text in re.findall(
                r"<(\w+): ([\w ]+)>\n(.*?)(?=\n<|\Z)", job.stdout, re.DOTALL
            ):
                found[program, ranks, name] = parsed(text)
    return found


def parsed(text: str) -> dict[int, Epoch]:
    number = r"([-+.\w]+)"
    line = (
        rf"epoch (\d+): loss {number}, rate {number}, validation loss {number}, accuracy {number}"
    )
    return {int(epoch): Epoch(*map(float, rest)) for epoch, *rest in re.findall(line, text)}


def assert_close(got: dict[int, Epoch], want: dict[int, Epoch], slack: float) -> None:
    assert got.keys() == want.keys()
    for epoch, values in got.items():
        assert values.rate == want[epoch].rate
        for mine, theirs in zip(values, want[epoch], strict=True):
            assert mine == pytest.approx(theirs, rel=slack, abs=slack)


@needs_mpiexec
@pytest.mark.parametrize("program", FULL)
class TestTraining:
    @pytest.fixture(autouse=True)
    def _skip(self, program: str) -> None:
        if not all(map(find_spec, MODULES[program])):
            pytest.skip(f"needs {', '.join(MODULES[program])}")

    def test_two_ranks_learn_as_one(self, program: str) -> None:
        one, two = (runs()[program, ranks, "whole"] for ranks in (1, 2))
        assert sorted(one) == [1, 2]
        assert one[2].accuracy > 0.8
        assert_close(two, one, SLACK[FULL[program]])

    def test_with_mixed_precision_they_learn_the_same(self, program: str) -> None:
        whole, mixed = (runs()[program, 1, name] for name in ("whole", "mixed"))
        assert mixed != whole
        assert_close(mixed, whole, SLACK[MIXED[program]])

    def test_a_run_in_two_parts_is_the_run_in_one(self, program: str) -> None:
        whole, first, second = (
            runs()[program, 2, name] for name in ("whole", "broken", "broken resumed")
        )
        assert (sorted(first), sorted(second)) == ([1], [2])
        assert first | second == whole

    def test_one_rank_goes_on_where_two_have_ended(self, program: str) -> None:
        other, whole = (runs()[program, 1, name] for name in ("other resumed", "whole"))
        assert_close(other, {2: whole[2]}, SLACK[FULL[program]])
