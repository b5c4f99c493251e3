"""The benchmark of adapters: every loop takes the step of one process, and wrong steps are seen."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import arraycomm as ac
from arraycomm.cli.bench import adapters
from arraycomm.cli.bench import arguments as bench
from arraycomm.cli.bench.loops import WORKLOADS
from arraycomm.testing import run
from tests.support.launcher import needs_mpiexec, run_python

JAX = "JAX, optax.sgd"


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_only_adapters_whose_packages_are_installed_take_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapters, "installed", lambda name: name not in ("torch", "optax"))
    names = bench.requested_loops(parse("adapters"))
    assert set(WORKLOADS) - set(names) == {
        name for name, work in WORKLOADS.items() if {"torch", "optax"} & set(work.needs)
    }
    assert "NumPy, SGD" in names
    assert not bench.requested_loops(parse("latency"))


class Together:
    """What loops need of a field, over ranks that are threads."""

    def __init__(self, comm: ac.Communicator) -> None:
        self.comm, self.mpi = comm, self
        self.rank, self.size = comm.rank, comm.size

    def Allreduce(self, _: Any, array: Any) -> None:  # noqa: N802 - the name in mpi4py
        self.comm.allreduce(array, out=array)


# Programs that JAX compiles need a process a rank.
@pytest.mark.parametrize("name", sorted(WORKLOADS.keys() - {JAX}))
def test_every_loop_takes_the_step_of_one_process(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in WORKLOADS[name].needs:
        pytest.importorskip(package)
    monkeypatch.setattr(adapters, "share_cores", lambda field: None)

    def complaints(comm: ac.Communicator) -> list[str]:
        field: Any = Together(comm)
        case = adapters.LoopCase(name, field, (5, 4, 3))
        made = (adapters.make_loop(key, "any", case, field) for key in adapters.KEYS)
        return [case.verify(contender) for contender in made]

    assert run(2, complaints) == [[""] * len(adapters.KEYS)] * 2


# The second time, gradients are scaled by the wrong number.
PROGRAM = """
import sys
import arraycomm
from arraycomm.cli import main
from arraycomm.cli.bench import adapters
adapters.LoopCase.__init__.__defaults__ = ((5, 4, 3),)
names = adapters.available()
adapters.available = lambda: [name for name in names if name in sys.argv[1:]]
words = ["bench", "adapters", "--repeats", "1", "--seconds", "0.01", "--json"]
status = main([*words, "right.json"])
arraycomm.finalize()
sys.argv[1:] = ["NumPy, SGD"]
distributed = arraycomm.DistributedOptimizer
arraycomm.DistributedOptimizer = lambda optimizer, comm: distributed(optimizer, comm=comm, op="sum")
sys.exit(status or 2 * (main([*words, "wrong.json"]) != 1))
"""


@needs_mpiexec
def test_right_steps_are_timed_and_wrong_ones_are_seen(tmp_path: Path) -> None:
    done = run_python("-c", PROGRAM, "NumPy, SGD", JAX, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    right, [wrong] = (
        json.loads((tmp_path / name).read_text("utf-8"))["lines"]
        for name in ("right.json", "wrong.json")
    )
    assert {line["model"] for line in right} == {"NumPy, SGD", JAX} & set(adapters.available())
    for line in right:
        assert line["nbytes"] == 4 * (5 * 4 + 4 + 4 * 3 + 3)
        assert [e["status"] for e in line["contenders"]] == ["ok"] * len(adapters.KEYS)
        assert line["contenders"][0]["ratios"].keys() == {"alone", "leafwise"}
    assert [e["status"] for e in wrong["contenders"]] == ["wrong", "ok", "ok"]
    assert "from that of one process" in wrong["contenders"][0]["reason"]
