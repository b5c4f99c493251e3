"""What messages and pages name exists: functions, options, variables of the environment, extras, commands, files.

The names of adapters are read, not imported: importing frameworks would take most of the time.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
import arraycomm.testing

ROOT = Path(__file__).parents[2]
if not (ROOT / "arraycomm").is_dir():
    pytest.skip("there is no checkout here, only its tests", allow_module_level=True)
ADAPTERS = {
    path.stem if path.parent.name == "adapters" else path.parent.name: path
    for path in [*(ROOT / "adapters").glob("[!_]*.py"), *(ROOT / "adapters").glob("*/__init__.py")]
}
SOURCES = [*sorted((ROOT / "arraycomm").rglob("*.py")), *sorted((ROOT / "adapters").rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]
# Whose methods messages mention without a module before them.
OWNERS = (
    *(ac.Communicator, ac.Request, ac.Plan, ac.Join, ac.DistributedDataContainer, ac.Compression),
    *(builtins, np.ndarray, np.ma.MaskedArray),
)
# Options and names of other programs and libraries, with the one that has them.
FOREIGN_OPTIONS = {
    "argparse": "--help",
    "Open MPI's mpiexec": "--with-ft --oversubscribe --hostfile --bind-to --map-by --mca --prtemca",
    "docker run": "--shm-size --rm --ipc --network",
    "torchrun": "--nproc-per-node --max-restarts",
    "pip": "--index-url --no-binary --no-deps --editable --no-cache-dir",
    "pytest": "--lf --ff --sw --junitxml --pdb --trace",
    "pytest-xdist": "--dist --tx",
    "pytest-cov": "--cov",
    "py-spy dump": "--pid",
    "coverage": "--parallel-mode",
    "mypy": "--strict",
    "Hypothesis": "--hypothesis-seed --hypothesis-profile --hypothesis-show-statistics",
    "Slurm, in a script": (
        "--job-name --nodes --ntasks-per-node --cpus-per-task --time --export --signal "
        "--gpus-per-node --gpus-per-task"
    ),
    "srun": "--cpu-bind --kill-on-bad-exit",
    "apptainer exec": "--bind --env --contain",
    "MPICH's configure": "--with-pmi",
    "launchers": "--version",
}
FOREIGN_CALLS = {
    "mpi4py": "MPI.Init_thread",
    "pandas": "data.to_numpy to_numpy",
    "Dask and polars": "data.compute data.collect",
    "scipy.sparse": "data.toarray",
    "mappings": "data.keys",
    "MLX": "mx.stop_gradient",
    "thinc": "model.finish_update",
    "optax": "optimizer.init gradient_transformation",
    "Keras": "apply",
    "torch optimizers": "optimizer.zero_grad",
    "sparse arrays of JAX": "todense",
    "the plugin": "pytest.mark.ranks ranks",
    "optimizers": "update step state_dict",
    "torch tensors": "backward detach x.detach dequantize int_repr to_dense to_padded_tensor",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FRAMEWORKS = {"jax", "jnp", "numpy", "optax", "pytest", "torch"}


@cache
def texts_of(source: Path, *, docstrings: bool = True) -> tuple[str, ...]:
    """Return the texts of a module that are sentences, with {} where a value is put in."""
    tree = ast.parse(source.read_text("utf-8"))
    left_out = set() if docstrings else _docstrings(tree)
    return tuple(text for text in _strings(tree, left_out) if " " in text)


def _docstrings(tree: ast.Module) -> set[int]:
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}


def _strings(tree: ast.Module, left_out: set[int]) -> Iterator[str]:
    parts = left_out | {
        id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        ):
            yield node.value


@cache
def code_of(page: Path) -> str:
    """Return what a page shows as code: its spans, and its blocks of commands."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^```(?:console|sh)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join([*re.findall(r"`([^`\n]+)`", prose), *blocks])


@cache
def public_names(adapter: str) -> frozenset[str]:
    """Return what an adapter says that it has."""
    tree = ast.parse(ADAPTERS[adapter].read_text("utf-8"))
    names = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return frozenset(*names)


@cache
def is_there(name: str) -> bool:
    """Return whether a name that begins with `arraycomm` exists."""
    root, *rest = name.split(".")
    if rest[:1] == ["adapters"]:
        # A name of a name, such as a method, is that of the reference page.
        return not rest[1:] or (
            rest[1] in ADAPTERS and (not rest[2:] or rest[2] in public_names(rest[1]))
        )
    found: Any = importlib.import_module(root)
    for index, attribute in enumerate(rest, 1):
        if not hasattr(found, attribute):
            try:
                importlib.import_module(".".join([root, *rest[:index]]))
            except ImportError:
                return False
        found = getattr(found, attribute)
    return True


def dotted_in(text: str) -> set[str]:
    names = re.findall(r"(?<![\w./@-])(?:ac|arraycomm)(?:\.[A-Za-z_]\w*)+", text)
    files = {name for name in names if name.endswith((".py", ".toml", ".json", ".svg"))}
    return {re.sub(r"^ac\b", "arraycomm", name) for name in names if name not in files}


def _words(foreign: dict[str, str]) -> set[str]:
    return {word for words in foreign.values() for word in words.split()}


def is_known_call(name: str) -> bool:
    root, _, last = name.rpartition(".")
    if name in _words(FOREIGN_CALLS) or root.split(".")[0] in FRAMEWORKS:
        return True
    owned = any(hasattr(owner, last) for owner in OWNERS) or last in ac.__all__
    return owned or any(last in public_names(adapter) for adapter in ADAPTERS) or last[:2] == "__"


@cache
def own_options() -> frozenset[str]:
    """Return the options that some parser of the package, of its studies or of its tests declares."""
    files = [*SOURCES, *(ROOT / "docs").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    declared = re.compile(r'\b(?:add|add_argument|addoption)\(\s*"(--[a-z-]+)"')
    return frozenset(option for f in files for option in declared.findall(f.read_text("utf-8")))


@cache
def own_variables() -> frozenset[str]:
    text = "".join(source.read_text("utf-8") for source in SOURCES)
    return frozenset(re.findall(r'"(ARRAYCOMM_[A-Z_]+)"', text))


def unknown_in(text: str) -> list[str]:
    """Return what a text names of arraycomm that does not exist."""
    options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
    extras = {
        e for found in re.findall(r"(?:arraycomm|'\.)\[([\w,]+)\]", text) for e in found.split(",")
    }
    variables = set(re.findall(r"\bARRAYCOMM_[A-Z_]+\b", text))
    return [
        *(name for name in dotted_in(text) if not is_there(name)),
        *(options - own_options() - _words(FOREIGN_OPTIONS)),
        *(extras - EXTRAS.keys()),
        *(variables - own_variables()),
    ]


def test_messages_name_what_there_is() -> None:
    assert {(s.name, n) for s in SOURCES for t in texts_of(s) for n in unknown_in(t)} == set()


def test_calls_in_messages_exist() -> None:
    unknown = {
        (source.name, name)
        for source in SOURCES
        for text in texts_of(source, docstrings=False)
        for name in re.findall(r"\b[A-Za-z_][\w.]*(?=\()", text)
        if not is_known_call(name)
    }
    assert unknown == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_what_there_is(page: Path) -> None:
    text = page.read_text("utf-8")
    references = re.findall(r"\]\[(arraycomm[\w.]*)\]", text)
    assert [name for name in references if not is_there(name)] == []
    assert unknown_in(code_of(page)) == []
    methods = re.findall(r"\bcomm\.([a-z_]\w*)\(", code_of(page))
    assert [name for name in methods if not hasattr(ac.Communicator, name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_and_targets_that_there_are(page: Path) -> None:
    code = code_of(page)
    paths = re.findall(r"(?<![\w./-])(?:adapters|arraycomm|docs|properties|tests)/[\w./-]+", code)
    assert [path for path in paths if not (ROOT / path.rstrip(".")).exists()] == []
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", code)) <= targets


def test_the_reference_has_every_public_name_with_an_anchor_and_the_overview_leads_there() -> None:
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(r"^::: arraycomm\.(\S+)", pages, re.MULTILINE))
    overview = (ROOT / "docs" / "api.md").read_text("utf-8")
    linked = set(re.findall(r"\]\[arraycomm\.(\S+?)\]", overview))
    linked |= set(re.findall(r"\[`arraycomm\.(\S+?)`\]\[\]", overview))
    methods = {f"Communicator.{name}" for name in dir(ac.Communicator) if name[0] != "_"}
    # What an adapter's `__all__` has stands on its page by itself.
    modules = {
        *(f"testing.{name}" for name in ac.testing.__all__),
        *(f"adapters.{a}" for a in ADAPTERS),
    }
    assert {*ac.__all__, *methods, *modules} - listed == {
        "Communicator.device",
        "Communicator.mpi_comm",
    }
    assert {*ac.__all__, *modules} <= linked
    assert {name for name in methods - linked if name[13] != "i"} == set()


def test_signatures_show_the_values_of_their_defaults() -> None:
    public = [getattr(ac, name) for name in ac.__all__]
    members = [value for _, value in inspect.getmembers(ac.Communicator, inspect.isfunction)]
    texts = [str(inspect.signature(f)) for f in [*public, *members] if inspect.isroutine(f)]
    assert not [text for text in texts if re.search(r"= (?:_|<|unset)", text)]
    assert "check: 'bool' = True" in str(inspect.signature(ac.init))


def test_a_name_that_does_not_exist_is_found() -> None:
    for text in (
        *("use ac.allredoce", "call arraycomm.adapters.torch.nosync", "set ARRAYCOMM_TIMEOUTS"),
        *("--rankz", "pip install 'arraycomm[mpic]'"),
    ):
        assert len(unknown_in(text)) == 1, text
