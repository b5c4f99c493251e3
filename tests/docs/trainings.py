"""Run the training programs of the documents: `python trainings.py DIRECTORY`, alone or on ranks.

Each is run in one go. On ranks it is run in two as well, with a break in the middle; alone, with
mixed precision, and from the checkpoint on that ranks have left in the directory.
"""

from __future__ import annotations

import runpy
import shutil
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import arraycomm as ac

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
EPOCHS = 2


class Program(NamedTuple):
    """A program with its names of full and of mixed precision."""

    path: Path
    full: str
    mixed: str


PROGRAMS = {
    "sklearn": Program(EXAMPLES / "train_numpy.py", "float64", "float16"),
    "torch": Program(EXAMPLES / "train_torch.py", "float32", "float16"),
    "optax": Program(EXAMPLES / "train_jax.py", "float32", "bfloat16"),
}


def run_all(program: Program, directory: Path) -> None:
    path, full, mixed = program
    comm = ac.init()
    main = runpy.run_path(str(path))["main"]
    # What JAX compiles for an optimizer, it compiles for each anew.
    names = main.__globals__
    if "make_optimizer" in names:
        names["make_optimizer"] = cache(names["make_optimizer"])

    def checkpoint_of(run: str) -> Path:
        return directory / f"{path.stem}-{comm.size}-{run}"

    def train(run: str, *arguments: str) -> None:
        checkpoint = checkpoint_of(run.removesuffix(" resumed"))
        if comm.rank == 0:
            print(f"<{path.stem}: {run}>", flush=True)
        main(["--epochs", str(EPOCHS), "--checkpoint", str(checkpoint), *arguments])
        comm.barrier()

    train("whole", "--precision", full)
    if comm.size == 1:
        shutil.copy(directory / f"{path.stem}-middle", checkpoint_of("other"))
        train("other resumed", "--precision", full)
        train("mixed", "--precision", mixed)
        return
    train("broken", "--precision", full, "--stop-after", "1")
    if comm.rank == 0:
        shutil.copy(checkpoint_of("broken"), directory / f"{path.stem}-middle")
    train("broken resumed", "--precision", full)


if __name__ == "__main__":
    for module, program in PROGRAMS.items():
        if find_spec(module):
            run_all(program, Path(sys.argv[1]))
