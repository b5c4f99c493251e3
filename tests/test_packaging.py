"""What an installation of arraycomm holds, and what importing it costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import pytest

import arraycomm as ac
import arraycomm.testing

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
EXTRAS = {
    "cuda12",
    "cuda13",
    "demo",
    "dist",
    "docs",
    "jax",
    "keras",
    "lint",
    "mlx",
    "mpich",
    "openmpi",
    "plot",
    "scipy",
    "sklearn",
    "test",
    "test-jax",
    "testing",
    "thinc",
    "torch",
}
FOREIGN = {"cupy", "jax", "keras", "matplotlib", "mpi4py", "mlx", "tensorflow", "torch"}


def modules_after(statement: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter holds after `statement`."""
    listing = f"{statement}; import sys; print(*{{m.partition('.')[0] for m in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-c", listing], capture_output=True, text=True, check=True, timeout=120
    )
    return set(run.stdout.split())


def test_importing_arraycomm_imports_no_framework_and_no_mpi() -> None:
    assert modules_after("import arraycomm") & FOREIGN == set()


def test_importing_the_testing_tools_imports_no_framework_and_no_mpi() -> None:
    assert modules_after("import arraycomm.testing") & FOREIGN == set()


def test_a_world_of_one_process_needs_no_mpi() -> None:
    assert "mpi4py" not in modules_after("import arraycomm; arraycomm.init(backend='self')")


def test_the_installed_version_is_the_projects() -> None:
    assert metadata.version("arraycomm") == PROJECT["project"]["version"]


def test_the_readme_of_the_wheel_has_whole_addresses_only() -> None:
    if (ROOT / "arraycomm").is_dir():
        pytest.skip("an editable installation may be of an earlier README")
    about = metadata.metadata("arraycomm")
    text = about["Description"] or about.get_payload()
    assert re.search(r"\]\(https://", text)
    assert not re.search(r'\]\((?!https://|#)|src="(?!https://)', text)


def test_the_installed_extras_are_these() -> None:
    assert set(metadata.metadata("arraycomm").get_all("Provides-Extra") or ()) == EXTRAS


def test_no_framework_is_required() -> None:
    required = [line for line in metadata.requires("arraycomm") or () if "extra ==" not in line]
    names = {line.split(">")[0].strip().replace("-", "_") for line in required}
    assert names == {"array_api_compat", "ml_dtypes", "mpi4py", "numpy", "optree"}


def test_the_command_runs_the_command_line_interface() -> None:
    (command,) = metadata.entry_points(group="console_scripts", name="arraycomm")
    assert command.value == "arraycomm.cli:main"


def test_pytest_finds_the_plugin() -> None:
    (plugin,) = metadata.entry_points(group="pytest11", name="arraycomm")
    assert plugin.value == "arraycomm_pytest"


def test_the_package_says_that_it_is_typed() -> None:
    assert files("arraycomm").joinpath("py.typed").is_file()


def test_every_package_of_the_checkout_is_declared() -> None:
    if not (ROOT / "arraycomm").is_dir():
        pytest.skip("there is no checkout here, only its tests")
    roots = {ROOT / path: name for name, path in SETUPTOOLS["package-dir"].items()}
    found = set()
    for directory in {module.parent for root in roots for module in root.rglob("*.py")}:
        # A package of another name may lie in one.
        root = next(path for path in (directory, *directory.parents) if path in roots)
        found.add(".".join((roots[root], *directory.relative_to(root).parts)))
    assert found == set(SETUPTOOLS["packages"])


def test_every_declared_package_can_be_imported_first() -> None:
    # Each in a copy of one process, which has imported what they need.
    program = """
import importlib, os, sys, numpy, optree, array_api_compat
for package in sys.argv[1:]:
    if os.fork() == 0:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as lacking:  # of an adapter without its framework
            assert package.startswith(f"arraycomm.adapters.{lacking.name}")
        os._exit(0)
    if os.wait()[1]:
        sys.exit(package)
"""
    command = [sys.executable, "-c", program, *SETUPTOOLS["packages"]]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr


def test_the_public_names_are_these_and_sorted() -> None:
    assert ac.__all__ == [
        "ANY_SOURCE",
        "ANY_TAG",
        "ArrayCommError",
        "BackendUnavailableError",
        "CommTimeoutError",
        "Communicator",
        "CommunicatorClosedError",
        "Compression",
        "ConcurrentUseError",
        "DeadlockError",
        "DistributedDataContainer",
        "DistributedOptimizer",
        "ErrorFeedback",
        "Join",
        "MismatchError",
        "NotInitializedError",
        "PeerError",
        "Plan",
        "Request",
        "Status",
        "TransportError",
        "allreduce_gradients",
        "allreduce_tree",
        "borrow",
        "exchange",
        "explain",
        "finalize",
        "init",
        "is_initialized",
        "join",
        "mean_metrics",
        "op",
        "println",
        "raise_on_difference",
        "raise_on_nan",
        "raise_together",
        "synchronize",
        "waitall",
        "world",
    ]


def test_the_public_names_of_the_testing_tools_are_these() -> None:
    assert arraycomm.testing.__all__ == [
        "ArrayCase",
        "RankValues",
        "Schedule",
        "conformance",
        "given",
        "per_rank",
        "run",
        "strategies",
    ]


def test_program_that_is_saved_beside_the_sources_has_the_adapters(tmp_path: Path) -> None:
    """Such a program imports the sources, where the adapters have a directory of their own."""
    if not (ROOT / "arraycomm").is_dir():
        pytest.skip("needs the sources")
    for name in ("arraycomm", "adapters", "setup.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "hello.py").write_text(
        "import arraycomm as ac, arraycomm.adapters\n"
        "ac.init()\n"
        "print(arraycomm.adapters.__file__, ac.DistributedOptimizer(lambda params, grads: params))\n"
    )
    hello = [
        sys.executable,
        "-c",
        "import runpy, sys; sys.path[:] = sys.argv[1:]; runpy.run_path('hello.py')",
    ]
    # Without the finder of an editable installation.
    paths = [path for path in sys.path if "arraycomm" not in path]
    off = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
    hello[2] = off + hello[2]
    done = subprocess.run(
        [*hello, str(tmp_path), *paths], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.startswith(str(tmp_path / "adapters" / "__init__.py")), done.stderr


def test_wheel_without_a_compiler_is_for_any_platform() -> None:
    pytest.importorskip("setuptools")
    command = [sys.executable, "-c", "import setup; print(setup.native_part())"]
    done = subprocess.run(
        command,
        env={**os.environ, "CC": "/no/compiler"},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout == "{}\n"
    assert (
        "arraycomm: built without its native part, since C cannot be compiled here" in done.stderr
    )
