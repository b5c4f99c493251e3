"""The benchmark of compiled programs: what takes part, and that wrong results are seen."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arraycomm.cli.bench import arguments as bench
from arraycomm.cli.bench import jitted
from arraycomm.cli.bench.contenders import TITLES
from arraycomm.cli.bench.report import tables
from arraycomm.cli.bench.shallow_water import Tiles
from tests.support.launcher import needs_mpiexec, run_python


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(words)


def test_compiled_programs_need_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jitted, "find_spec", lambda name: None if name == "optax" else name)
    said = bench.refusal(parse("jax"))
    assert said == "compiled programs need optax; pip install 'arraycomm[jax]'"
    assert bench.refusal(parse("latency")) == ""


def test_sizes_are_those_of_the_arguments() -> None:
    assert tuple(bench.requested_programs(parse("jax"))) == jitted.SIZES
    assert tuple(bench.requested_programs(parse("jax", "--sizes", "8"))) == (8,)
    assert not bench.requested_programs(parse("latency", "--sizes", "8"))


@pytest.mark.parametrize("size", [1, 2, 6, 7])
def test_tiles_are_beside_one_another(size: int) -> None:
    tiles = [Tiles(rank, size) for rank in range(size)]
    for rank, tile in enumerate(tiles):
        assert tile.beside(0, 0) == rank
        for down, right in ((1, 0), (0, 1)):
            assert tiles[tile.beside(down, right)].beside(-down, -right) == rank
    assert {tiles[0].beside(row, column) for row in range(size) for column in range(size)} == set(
        range(size)
    )


def test_every_contender_of_its_own_is_compared() -> None:
    keys = {"jit": 2.0, "jit-donated": 1.0, "optax": 3.0, "mpi4jax": 4.0}
    entries = [
        {
            "key": key,
            "name": TITLES[key],
            "framework": "jax",
            "status": "ok",
            "median": seconds * 1e-6,
            "samples": [seconds],
            "ratios": {"mpi4jax": seconds / 4},
        }
        for key, seconds in keys.items()
    ]
    line = {"mode": "jax", "dtype": "float32", "nbytes": 8, "model": "P", "contenders": entries}
    (table,) = tables([line], 2)
    assert table.title == "Compiled programs of float32, JAX arrays, 2 ranks: µs per call"
    assert table.header[0] == "program"
    assert table.header[-3:] == [
        "jit ÷ mpi4jax",
        "jit of a donated x ÷ mpi4jax",
        "optax ÷ mpi4jax",
    ]
    assert table.rows[0] == ["P", "2.00", "1.00", "3.00", "4.00", "0.50", "0.25", "0.75"]


# mpi4jax as it would be if it summed nothing: its reductions are wrong, its halos another library's.
PROGRAM = """
import sys, types
from arraycomm.cli import main
from arraycomm.cli.bench import shallow_water
shallow_water.WaterCase.__init__.__defaults__ = (4,)
other = types.ModuleType("mpi4jax")
other.allreduce = lambda x, op, comm: x
def sendrecv(x, like, source, dest, comm):
    from arraycomm.adapters import jax
    return jax.sendrecv(x, dest, source)
other.sendrecv = sendrecv
sys.modules["mpi4jax"] = other
words = ["--sizes", "8", "--repeats", "2", "--seconds", "0.01", "--json", "jax.json"]
sys.exit(main(["bench", "jax", *words]))
"""


@needs_mpiexec
def test_compiled_programs_give_right_results_and_wrong_ones_are_seen(tmp_path: Path) -> None:
    pytest.importorskip("optax")
    done = run_python("-c", PROGRAM, ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads((tmp_path / "jax.json").read_text("utf-8"))
    small, water = results["lines"]
    assert (small["model"], small["nbytes"]) == ("allreduce of 8 B", 8)
    assert {e["key"]: e["status"] for e in small["contenders"]} == {
        "jit": "ok",
        "jit-donated": "ok",
        "optax": "ok",
        "mpi4jax": "wrong",
    }
    assert water["model"] == "10 steps of shallow water"
    assert {e["key"]: e["status"] for e in water["contenders"]} == {"jit": "ok", "mpi4jax": "ok"}
    assert np.isfinite(water["contenders"][0]["ratios"]["mpi4jax"])
