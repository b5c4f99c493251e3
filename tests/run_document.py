"""Run the Python code of a document, from top to bottom: `python run_document.py PATH`.

A block that needs a framework which is not installed is left out, and so is a later block that uses
a name of a block left out. A block after the comment `<!-- skip: next "reason" -->` is not run.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from pathlib import Path
from unittest import SkipTest

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

FRAMEWORKS = {"cupy", "equinox", "flax", "jax", "mlx", "mpi4py", "optax", "sklearn", "torch"}


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


if __name__ == "__main__":
    run_examples(Path(sys.argv[1]))
