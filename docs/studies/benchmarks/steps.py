"""Training steps in torch, or programs that JAX has compiled, beside other libraries'; run by every rank of a job.

arraycomm run -n 2 -m docs.studies.benchmarks.steps train|jax SECONDS FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import arraycomm
from arraycomm.cli.bench.results import size_text
from docs.studies.benchmarks import programs, shallow_water, training
from docs.studies.benchmarks.cases import Case, Field, enter
from docs.studies.benchmarks.results import Line, about, as_text, heading, measured, write


def _cases(mode: str, field: Field) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is timed: its name, the case, and the ways."""
    if mode == "train":
        for name in training.MODELS:
            yield name, training.TrainCase(name, field), training.WAYS
        return
    for nbytes in programs.SIZES:
        case = Case("float32", [(nbytes // 4,)], field)
        yield f"allreduce of {size_text(nbytes)}", case, programs.WAYS
    case = shallow_water.WaterCase(field)
    yield f"{shallow_water.STEPS} steps of shallow water", case, shallow_water.WAYS


def _lines(mode: str, field: Field, seconds: float) -> Iterator[Line]:
    framework = {"train": "torch", "jax": "jax"}[mode]
    for name, case, ways in _cases(mode, field):
        entries = [enter(field, case, key, framework, way) for key, way in ways.items()]
        about_case = mode, case.dtype_name, case.nbytes
        line = measured(field, *about_case, entries, repetitions=25, seconds=seconds)
        yield {**line, "model": name}


def main() -> None:
    mode, seconds, path = sys.argv[1:]
    field = Field(arraycomm.init("mpi"))
    results = {**about(field, sys.argv), "lines": list(_lines(mode, field, float(seconds)))}
    field.close()
    if field.rank == 0:
        print(heading(results), *map(as_text, results["lines"]), sep="\n\n")
        write(Path(path), results)


if __name__ == "__main__":
    main()
