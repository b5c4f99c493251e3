"""Ranks whose builds of arraycomm differ are told so; which build it is, its sources decide."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import arraycomm
from arraycomm._native import build, compiled
from tests.session.launching import LIMIT
from tests.support.launched import start_numbered
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")
ON_MPI = [needs_mpiexec, pytest.mark.each_mpi, pytest.mark.at_night("Open MPI")]

PACKAGE = Path(arraycomm.__path__[0])
ADAPTERS = Path(find_spec("arraycomm.adapters").submodule_search_locations[0])
# Adds a blank to a source, or makes it, and says what the build is then.
BUILDS = """
import json, sys
from pathlib import Path
from arraycomm._native.build import build, seen

said = [build()]
for path in map(Path, sys.argv[1:]):
    before = seen()
    assert seen() == before
    text = path.read_text() if path.exists() else None
    path.write_text(f"{text or ''} ")
    said.append(build())
    assert (seen() != before) == (said[-1] != said[0]), path
    path.unlink() if text is None else path.write_text(text)
print(json.dumps([digests for _, *digests in said]))
"""
# Each rank imports its own copy, and some without the part in C.
WORLD = """
import os, sys
names = "ARRAYCOMM_PROCESS_ID", "PMI_RANK", "OMPI_COMM_WORLD_RANK"
rank = next(os.environ[name] for name in names if name in os.environ)
sys.path.insert(0, f"{sys.argv[1]}/{rank}")
if rank in sys.argv[2:]:
    os.environ["ARRAYCOMM_NATIVE"] = "0"
import numpy as np, arraycomm as ac
assert ac.__path__[0].startswith(sys.path[0])
try:
    comm = ac.init(timeout=30)
    said = comm.bcast(np.arange(4, dtype=np.float32) if comm.rank == 0 else None).tolist()
except ac.MismatchError as error:
    said = error
sys.stdout.write(f"{said}\\n")
"""
RIGHT = "[0.0, 1.0, 2.0, 3.0]\n"


def copy(place: Path, adapters: str = "arraycomm/adapters") -> Path:
    """Copy what is imported here, with the adapters where a wheel, or a checkout, has them."""
    # With what Python has compiled: it would compile all of it anew for each rank.
    shutil.copytree(PACKAGE, place / "arraycomm", ignore=shutil.ignore_patterns("adapters"))
    shutil.copytree(ADAPTERS, place / adapters)
    return place


def change(source: Path) -> None:
    source.write_text(f"{source.read_text()}\n")


def builds_of(place: Path, *changed: str) -> list[list[str]]:
    """Return the digests of a copy, and what they become if each of these files is changed alone."""
    command = [sys.executable, "-c", BUILDS, *(str(place / name) for name in changed)]
    environment = {**os.environ, "PYTHONPATH": str(place)}
    return json.loads(subprocess.check_output(command, env=environment, cwd="/"))


def test_every_source_counts() -> None:
    def names(root: Path, within: str = "") -> set[str]:
        found = [
            path.relative_to(root) for path in root.rglob("*") if path.suffix in (".py", ".cu")
        ]
        apart = {"__pycache__", "adapters", "pytest_start"}
        return {f"{within}{path.as_posix()}" for path in found if not apart & set(path.parts)}

    assert set(build._code()) == names(PACKAGE) | names(ADAPTERS, "adapters/")
    assert {"_dtypes.py", "testing/__init__.py", "adapters/torch/__init__.py"} < set(build._code())


def test_what_is_changed_shows_and_where_it_lies_does_not(tmp_path: Path) -> None:
    wheel, checkout = copy(tmp_path / "wheel"), copy(tmp_path / "checkout", "adapters")
    # Where it is installed it is a package of its own.
    shutil.rmtree(wheel / "arraycomm" / "testing" / "pytest_start")
    # By which the adapters beside are found.
    (checkout / "setup.py").touch()
    (checkout / "arraycomm" / ".ipynb_checkpoints").mkdir()
    code, sources, nothing = {0}, {2}, set[int]()
    changed = {
        **dict.fromkeys((f"arraycomm/{name}.py" for name in ("_dtypes", "__init__", "new")), code),
        **dict.fromkeys(("adapters/scipy.py", "adapters/torch/new.py"), code),
        **dict.fromkeys(("arraycomm/_training/batches/data.py", "arraycomm/_cuda/folds.cu"), code),
        **dict.fromkeys((f"arraycomm/_native/{name}" for name in ("kernels.h", "new.c")), sources),
        **dict.fromkeys(("arraycomm/.ipynb_checkpoints/_dtypes.py", "arraycomm/a.log"), nothing),
    }
    first, *others = builds_of(checkout, *changed)
    assert builds_of(wheel) == [first]
    for (path, fields), other in zip(changed.items(), others, strict=True):
        assert {n for n in range(3) if other[n] != first[n]} == fields, path


def test_archive_counts_as_a_whole(tmp_path: Path) -> None:
    one = copy(tmp_path / "one")
    archives = [shutil.make_archive(str(tmp_path / "one"), "zip", one)]
    change(one / "arraycomm" / "_dtypes.py")
    archives.append(shutil.make_archive(str(tmp_path / "other"), "zip", one))
    (first,), (other,) = (builds_of(Path(archive)) for archive in archives)
    assert first[0] != other[0]


@pytest.mark.parametrize("link", ["processes", pytest.param("mpi", marks=ON_MPI)])
@pytest.mark.parametrize(
    ("changed", "ranks", "in_python"),
    [
        ("_dtypes.py", "1", ""),
        ("adapters/scipy.py", "1", ""),
        ("_native/kernels.h", "1", "01"),
        ("_native/segment.c", "01", ""),
        ("_native/segment.c", "01", "01"),
        ("", "", "1"),
    ],
)
def test_ranks_whose_builds_differ_are_told_so_and_others_work(
    tmp_path: Path, link: str, changed: str, ranks: str, in_python: str
) -> None:
    """A part in C that was built from other sources than those beside it differs, if it is used."""
    if changed.startswith("_native") and not (compiled and (PACKAGE / changed).exists()):
        pytest.skip("needs the part in C, and its sources")
    for rank in "01":
        copied = copy(tmp_path / rank)
        if rank in ranks:
            change(copied / "arraycomm" / changed)
    words = ("-c", WORLD, str(tmp_path), *in_python)
    on_mpi = link == "mpi"
    done = run_python(*words, ranks=2, timeout=LIMIT) if on_mpi else start_numbered(2, *words)[0]
    said = done.stdout
    if ranks in ("", in_python):
        assert said == 2 * RIGHT, said
        return
    rule = "init: ranks run different versions of arraycomm, or a C part of other sources: rank 0: "
    remedy = "; install the same version for all ranks, build the C part again (pip install -e .) or set ARRAYCOMM_NATIVE=0, and start the program again\n"
    assert said.count(rule) == said.count(remedy) == 2, said
    assert all(said.count(f"in {tmp_path}/{rank}/arraycomm (code ") == 2 for rank in "01"), said
    assert (", whose sources there are " in said) == changed.startswith("_native")
    assert said.count("C part none") == 2 * len(in_python if compiled else "01")
