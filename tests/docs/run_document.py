"""Run the Python code of documents, from top to bottom: `python run_document.py PATH ...`.

A document is a file of Markdown, or a program. They are run one after the other, each in a process of
its own, forked from one that has loaded the frameworks; below each stands how it ended. Under an MPI
launcher, whose processes cannot be forked, all run in the same process of each rank.

Under the comment `<!-- rows -->` stands a table of calls of another library and of arraycomm: each row
runs. Under a launcher both sides run, if the other library is here, and what both name has to be the same.

A block that needs a framework which is not installed is left out, and so is a later block that uses
a name of a block left out. A block after the comment `<!-- skip: next "reason" -->` is not run.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import copy
import gc
import importlib
import importlib.util
import os
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import SkipTest

from sybil import Document, Example, Region, Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

RANK = next((os.environ[n] for n in ("PMI_RANK", "OMPI_COMM_WORLD_RANK") if n in os.environ), "")
FRAMEWORKS = "cupy equinox flax jax keras mlx mpi4py optax orbax scipy sklearn thinc torch"

# What takes longest to import.
LOADED = ("torch", "jax", "optax", "hypothesis", "sklearn.linear_model")


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
        self._absent = {
            name for name in FRAMEWORKS.split() if importlib.util.find_spec(name) is None
        }
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


# Rows of calls. The first line of a table names the library whose calls stand on the left.
TABLE = re.compile(
    r"<!-- rows -->\n\| (?P<library>\S+) \| arraycomm .*\n\|.*\n(?P<rows>(?:\|.*\n)+)"
)
# The libraries whose side runs, and what their rows need beside the page's names.
BOTH_SIDES = {
    "mpi4py": "from mpi4py import MPI\nmpi = MPI.COMM_WORLD",
    "torch.distributed": """\
import os
import torch.distributed as dist
if not dist.is_initialized():
    dist.init_process_group("gloo", f"file://{os.getcwd()}/group", rank=rank, world_size=size)
""",
}
COMPARED = (int, float, list, dict)


class Row(NamedTuple):
    """The code of a row, and what the other library's needs first; None if that does not run."""

    setup: str | None
    theirs: str
    ours: str


def parse_rows(document: Document) -> Iterator[Region]:
    """Find the rows of a document's tables of calls."""
    for table in TABLE.finditer(document.text):
        for row in re.finditer(r"\|(.*?)\|(.*?)\|.*\n", table["rows"]):
            start = table.start("rows") + row.start()
            theirs, ours = ("\n".join(re.findall(r"`(.+?)`", cell)) for cell in row.groups())
            assert ours, row[0]
            setup = BOTH_SIDES.get(table["library"]) if RANK else None
            parsed = Row(setup, theirs, ours)
            yield Region(start, start + len(row[0]) - 1, parsed, run_row)


def run_row(example: Example) -> None:
    """Run a row; compare what both sides name, if both run."""
    setup, theirs, ours = example.parsed
    got = _names_after(ours, example.namespace)
    if setup is None:
        return
    expected = _names_after(f"{setup}\n{theirs}", example.namespace)
    for name in names_in(ast.parse(theirs), ast.Load) | names_in(ast.parse(theirs), ast.Store):
        mine, other = got.get(name), expected.get(name)
        # Where it is not the root, arraycomm returns None, and MPI leaves the memory as it was.
        if mine is not None and _is_compared(other):
            assert _plain(mine) == _plain(other), f"{theirs} | {ours}: {name}: {mine} | {other}"


def _names_after(source: str, namespace: dict[str, Any]) -> dict[str, Any]:
    shared = {"comm": namespace["comm"]}
    shared |= {name: value for name, value in namespace.items() if not _is_changed(value)}
    copies = {name: value for name, value in namespace.items() if name not in shared}
    names = {**shared, **copy.deepcopy(copies)}
    exec(source, names)
    return names


def _is_changed(value: Any) -> bool:
    marks = ("__array__", "parameters", "param_groups")  # an array, a module, an optimizer
    return isinstance(value, list) or any(hasattr(value, mark) for mark in marks)


def _is_compared(value: Any) -> bool:
    return hasattr(value, "__array__") or isinstance(value, COMPARED)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def run_examples(path: Path) -> None:
    """Run the code of the document at `path` in this process."""
    sybil = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser(), parse_rows], path=str(path.parent)
    )
    names = Names()
    for example in sybil.parse(path).examples():
        source = example.parsed.ours if isinstance(example.parsed, Row) else str(example.parsed)
        if not names.allow(source):
            continue
        with contextlib.suppress(SkipTest):
            example.evaluate()


def run(path: Path) -> None:
    """Run a document in this process."""
    if path.suffix == ".py":
        runpy.run_path(str(path), run_name="__main__")
    else:
        run_examples(path)


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
    if "hypothesis" in sys.modules:
        hypothesis = sys.modules["hypothesis"]
        # That laws of the documents hold, other tests show.
        hypothesis.settings.register_profile("few", max_examples=15)
        hypothesis.settings.load_profile("few")
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
            # The exit handlers belong to the program; to tear the frameworks down takes longer than most of them.
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"<{path} ended with {os.waitstatus_to_exitcode(status)}>", flush=True)


if __name__ == "__main__":
    (run_on_rank if RANK else run_apart)([Path(name) for name in sys.argv[1:]])
