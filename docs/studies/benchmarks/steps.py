"""Training steps in torch, or programs that JAX has compiled, beside other libraries'; run by every rank of a job.

arraycomm run -n 2 -m docs.studies.benchmarks.steps train|jax SECONDS FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import arraycomm
from arraycomm.cli.bench.contenders import Case, Field
from arraycomm.cli.bench.lines import Line, enter, measured
from arraycomm.cli.bench.results import about, show, write
from arraycomm.cli.bench.tables import size_text
from docs.studies.benchmarks import programs, shallow_water, training


def _cases(mode: str, field: Field) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield what is timed: its name, the case, the contenders' keys, and what makes them."""
    if mode == "train":
        for name in training.MODELS:
            yield name, training.TrainCase(name, field), training.KEYS, training.make_for_training
        return
    for nbytes in programs.SIZES:
        case = Case("float32", nbytes, field.rank, field.size)
        yield f"allreduce of {size_text(nbytes)}", case, programs.KEYS, programs.make_jitted
    water = shallow_water.WaterCase(field), shallow_water.KEYS, shallow_water.make_water
    yield f"{shallow_water.STEPS} steps of shallow water", *water


def _lines(mode: str, field: Field, seconds: float) -> Iterator[Line]:
    framework = {"train": "torch", "jax": "jax"}[mode]
    for name, case, keys, make in _cases(mode, field):
        entries = [enter(field, case, key, framework, make) for key in keys]
        line = measured(field, case, mode, entries, repetitions=25, seconds=seconds)
        yield {**line, "model": name}


def main() -> None:
    mode, seconds, path = sys.argv[1:]
    field = Field(arraycomm.init("mpi"))
    results = {**about(field, sys.argv), "lines": list(_lines(mode, field, float(seconds)))}
    field.close()
    if field.rank == 0:
        show(results)
        write(Path(path), results)


if __name__ == "__main__":
    main()
