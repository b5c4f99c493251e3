"""The examples of the documentation, on three ranks and on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launcher import needs_mpiexec, run_python

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
QUICKSTARTS = {"quickstart_torch.py": ("torch",), "quickstart_jax.py": ("jax", "optax")}
# With the same parameters for every x, the best loss is the variance of x² over (0, 1): 4/45.
LEARNED = 4 / 45 / 5


class Output:
    """What an example printed, by rank."""

    def __init__(self, text: str) -> None:
        self.losses = self._values(r"epoch (\d+): loss (\S+)", text)
        self.digests = self._values(r"(parameters) (\w+)", text)

    @staticmethod
    def _values(pattern: str, text: str) -> dict[int, dict[str, str]]:
        values: dict[int, dict[str, str]] = {}
        for rank, name, value in re.findall(rf"\[(\d+)/\d+\] {pattern}", text):
            values.setdefault(int(rank), {})[name] = value
        return values


def run_example(name: str, ranks: int | None) -> Output:
    for module in QUICKSTARTS[name]:
        pytest.importorskip(module)
    job = run_python(str(EXAMPLES / name), ranks=ranks)
    assert job.returncode == 0, job.stdout + job.stderr
    return Output(job.stdout)


def assert_learned(output: Output, ranks: int) -> None:
    assert sorted(output.losses) == list(range(ranks))
    for losses in output.losses.values():
        assert float(losses["100"]) < LEARNED


@needs_mpiexec
@pytest.mark.parametrize("name", QUICKSTARTS)
def test_three_ranks_learn_and_end_with_the_same_parameters(name: str) -> None:
    output = run_example(name, ranks=3)
    assert_learned(output, ranks=3)
    losses = [values["100"] for values in output.losses.values()]
    assert len(set(losses)) > 1, "ranks have data of their own"
    digests = [values["parameters"] for values in output.digests.values()]
    assert digests == digests[:1] * 3


@pytest.mark.parametrize("name", QUICKSTARTS)
def test_one_process_learns(name: str) -> None:
    assert_learned(run_example(name, ranks=None), ranks=1)
