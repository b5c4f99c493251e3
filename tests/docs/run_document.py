"""Run the Python code of documents, from top to bottom: `python run_document.py PATH ...`.

A document is a file of Markdown, or a program. They are run one after the other, each in a process of
its own, forked from one that has loaded the frameworks; below each stands how it ended. Under an MPI
launcher, whose processes cannot be forked, all run in the same process of each rank.

A block that needs a framework which is not installed is left out, and so is a later block that uses
a name of a block left out. A block after the comment `<!-- skip: next "reason" -->` is not run.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.util
import os
import runpy
import sys
import warnings
from pathlib import Path
from unittest import SkipTest

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

RANK = next((os.environ[n] for n in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if n in os.environ), "")
FRAMEWORKS = {
    "cupy",
    "equinox",
    "flax",
    "jax",
    "mlx",
    "mpi4py",
    "optax",
    "sklearn",
    "thinc",
    "torch",
}

# What takes longest to import; torch loads the last one with the first optimizer.
LOADED = ("torch", "jax", "jax.numpy", "optax", "hypothesis", "torch._dynamo")


def needed_module(dotted: str) -> str:
    """Return the top-level module that importing `dotted` needs; an adapter needs its framework."""
    return dotted.removeprefix("arraycomm.adapters.").partition(".")[0]


def imports_of(block: ast.Module) -> dict[str, str]:
    """Map the names that the imports in `block` bind to the top-level modules they need."""
    imports = {}
    for node in ast.walk(block):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imports[alias.asname or alias.name.partition(".")[0]] = needed_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imports[alias.asname or alias.name] = needed_module(f"{node.module}.{alias.name}")
    return imports


def names_in(block: ast.Module, context: type[ast.expr_context]) -> set[str]:
    """Return the names that `block`, its imports aside, binds (ast.Store) or uses (ast.Load)."""
    names = {
        n.id for n in ast.walk(block) if isinstance(n, ast.Name) and isinstance(n.ctx, context)
    }
    if context is ast.Store:
        definitions = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        names |= {node.name for node in ast.walk(block) if isinstance(node, definitions)}
    return names


class Names:
    """The names that the blocks so far have bound, and those that blocks left out would have."""

    def __init__(self) -> None:
        self._absent = {name for name in FRAMEWORKS if importlib.util.find_spec(name) is None}
        self._bound: set[str] = set()
        self._unbound: set[str] = set()

    def allow(self, source: str) -> bool:
        """Return whether the block `source` can run here, and note what it binds if it does."""
        try:
            block = ast.parse(source)
        except SyntaxError:  # a doctest or a comment of Sybil's, without names that matter here
            return True
        imports, assigned = imports_of(block), names_in(block, ast.Store)
        absent = {name for name, module in imports.items() if module in self._absent}
        if absent or names_in(block, ast.Load) & self._unbound:
            self._unbound |= absent | assigned | (imports.keys() - self._bound)
            return False
        self._bound |= assigned | imports.keys()
        self._unbound -= self._bound
        return True


def run_examples(path: Path) -> None:
    """Run the code of the document at `path` in this process."""
    sybil = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()], path=str(path.parent))
    names = Names()
    for example in sybil.parse(path).examples():
        if not names.allow(str(example.parsed)):
            continue
        with contextlib.suppress(SkipTest):
            example.evaluate()


def run_program(path: Path) -> None:
    """Run the program at `path` in this process."""
    runpy.run_path(str(path), run_name="__main__")


def run(path: Path) -> None:
    """Run a document in this process."""
    (run_program if path.suffix == ".py" else run_examples)(path)


def run_on_rank(paths: list[Path]) -> None:
    """Run documents in this process of an MPI job; the first that fails ends the job."""
    for path in paths:
        run(path)
        if RANK == "0":
            print(f"<{path} ended with 0>", flush=True)


def run_apart(paths: list[Path]) -> None:
    """Run documents, each in a process and a directory of its own."""
    for module in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # A process that ends would look through all of them once more.
    gc.freeze()
    # JAX warns of its threads, which it starts with the first array.
    warnings.filterwarnings("ignore", message="os.fork")
    for number, path in enumerate(paths):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            directory = Path(str(number))
            directory.mkdir()
            os.chdir(directory)
            os.dup2(1, 2)
            run(path)
            return
        _, status = os.waitpid(child, 0)
        print(f"<{path} ended with {os.waitstatus_to_exitcode(status)}>", flush=True)


if __name__ == "__main__":
    (run_on_rank if RANK else run_apart)([Path(name) for name in sys.argv[1:]])
