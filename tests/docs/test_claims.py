"""What README, the first page and the guides promise in words, beyond the code that they show: a test for each sentence.

`PROMISES` names, for each promise that other tests show, where: a heading or cell of the page, and those tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run
from docs.studies import variables
from tests.support.launcher import needs_mpiexec, run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
if not (ROOT / "arraycomm").is_dir():
    pytest.skip("there is no checkout here, only its tests", allow_module_level=True)
README = (ROOT / "README.md").read_text("utf-8")
INDEX = (DOCS / "index.md").read_text("utf-8")
SOURCES = [p for name in ("arraycomm", "adapters") for p in (ROOT / name).rglob("*.py")]
# What a page says in bold, and the tests that show it.
PROMISES = {
    "Any array": "arrays/test_dlpack.py arrays/test_results.py arrays/test_malformed.py",
    "One answer": "collectives/test_reproducible.py docs/test_semantics.py",
    "Training in three lines": "docs/test_trainings.py training/test_data_on_ranks.py",
    "Training.": "docs/test_trainings.py",
    "JAX": "adapters/test_jax_collectives.py",
    "Tests": "testing/test_given.py testing/test_plugin.py",
    "Tests without MPI.": "testing/test_run.py testing/test_given.py",
    "Tools": "cli/test_run.py cli/test_doctor.py cli/test_trace.py cli/test_bench.py",
    "Errors instead of hangs.": "protocol/test_errors.py protocol/test_missing_ranks.py",
    "You write a library": "docs/test_library_tests.py",
    "You mix frameworks": "arrays/test_exchange.py",
    "You have programs for mpi4py": "docs/test_documents.py",
    "You test code that communicates": "testing/test_run.py",
}


def test_every_promise_in_bold_has_its_tests() -> None:
    """A new one needs an entry, and an entry a file."""
    said = re.findall(r"^(?:\||-) ?\*\*(.+?)\*\*", README + INDEX, re.MULTILINE)
    said = [promise.rstrip(".") for promise in said]
    known = {name.rstrip(".") for name in PROMISES}
    assert [
        p for p in said if p not in known | {"Start", "Guides", "Help", "Reference", "Internals"}
    ] == []
    files = {file for shown in PROMISES.values() for file in shown.split()}
    assert [file for file in files if not (ROOT / "tests" / file).exists()] == []


def test_the_picture_of_the_readme_shows_what_its_words_say() -> None:
    """All bars, of two ranks under MPICH, are below 1."""
    table = (DOCS / "benchmarks.md").read_text("utf-8").partition("## On your machine")[0]
    bars = [
        float(row.split("|")[3].strip(" *"))
        for row in re.findall(r"^\| .*at.*\|$|^\| .*a tree.*\|$", table, re.MULTILINE)
    ]
    assert len(bars) >= 10
    assert max(bars) < 1
    assert "all are below 1" in README


def test_layouts_may_differ_between_ranks() -> None:
    def total(comm: ac.Communicator) -> object:
        x = np.arange(6.0).reshape(2, 3)
        return comm.allreduce([x, np.asfortranarray(x), np.repeat(x, 2, axis=1)[:, ::2]][comm.rank])

    assert all((np.asarray(got) == 3 * np.arange(6.0).reshape(2, 3)).all() for got in run(3, total))


def test_an_object_without_a_namespace_comes_back_as_numpy() -> None:
    class Owned:
        def __init__(self) -> None:
            self.__array_interface__ = np.ones(2).__array_interface__

    assert "NumPy's for an object" in INDEX
    assert type(run(1, lambda comm: comm.allreduce(Owned()))[0]) is np.ndarray


@needs_mpiexec
@pytest.mark.each_mpi
def test_mpi_io_and_a_window_go_with_it_in_one_program(tmp_path: Path) -> None:
    page = (DOCS / "from-mpi4py.md").read_text("utf-8")
    (tmp_path / "program.py").write_text(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0])
    job = run_python("-m", "arraycomm", "run", "-n", "3", "program.py", cwd=tmp_path)
    assert (job.returncode, job.stdout.count("rows and counter are right")) == (0, 3), job.stderr


def test_println_on_one_rank_is_told_how_to_print_on_one() -> None:
    def prints(comm: ac.Communicator) -> None:
        ac.println("here", comm=comm) if comm.rank == 0 else comm.barrier()

    with pytest.raises(ac.MismatchError, match=r"Every rank has to call println; ranks=0 lets"):
        run(2, prints)


# Environment variables


def test_the_table_of_variables_is_what_the_code_reads() -> None:
    texts = [source.read_text("utf-8") for source in (*SOURCES, ROOT / "setup.py")]
    read = {name for text in texts for name in re.findall(r'"(ARRAYCOMM_[A-Z_]+)"', text)}
    assert read == set(variables.VARIABLES)


def test_the_page_of_variables_has_the_table() -> None:
    page = variables.PAGE.read_text("utf-8")
    assert page == variables.written(page), "run: python -m docs.studies.variables"
    others = re.findall(r"`([A-Z][A-Z0-9_]{3,})`", page.partition("## Of others")[2])
    code = "".join(source.read_text("utf-8") for source in SOURCES)
    assert [name for name in others if name not in code and name not in ("WARN", "NAME")] == []


@pytest.mark.parametrize("name", ["ARRAYCOMM_TIMEOUT", "ARRAYCOMM_REPORT_AFTER"])
def test_the_defaults_of_the_table_are_those_of_init(name: str) -> None:
    program = "import inspect, arraycomm as ac; print(inspect.signature(ac.init))"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    argument = name.removeprefix("ARRAYCOMM_").lower()
    found = re.search(rf"{argument}: [^=]+= ([\d.]+)", said.stdout)
    assert found is not None
    assert float(found[1]) == float(variables.VARIABLES[name].default)


def test_the_optional_dependency_of_the_page_is_the_file_that_type_checkers_read() -> None:
    page = (DOCS / "embedding.md").read_text("utf-8")
    program = (DOCS / "examples" / "optional_dependency.py").read_text("utf-8")
    body = program.split('"""\n', 1)[1].partition("\n\nif __name__")[0].strip()
    assert body in page
    assert "optional_dependency.py" in (ROOT / "Makefile").read_text("utf-8")


@pytest.mark.parametrize("missing", [False, True])
def test_the_optional_dependency_may_be_missing(missing: bool, tmp_path: Path) -> None:
    program = DOCS / "examples" / "optional_dependency.py"
    isolated = ["-I", "-S"] if missing else []
    job = subprocess.run([sys.executable, *isolated, str(program)], cwd=tmp_path, check=False)
    assert job.returncode == 0
