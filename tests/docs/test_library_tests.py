"""The example of docs/library-tests.md is what the page shows, and fails as it says."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launched import WITHOUT_PLUGINS
from tests.support.launcher import needs_mpiexec, run_python

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "library-tests.md").read_text(encoding="utf-8")


def test_the_code_on_the_page_is_that_of_the_example() -> None:
    files = [DOCS / "examples" / name for name in ("mean_of_means.py", "test_mean_of_means.py")]
    whole = "".join(path.read_text(encoding="utf-8") for path in files)
    parts = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert parts
    for part in parts:
        assert part in whole


def test_the_counter_example_is_the_one_on_the_page(tmp_path: Path) -> None:
    for name in ("mean_of_means.py", "test_mean_of_means.py"):
        (tmp_path / name).write_bytes((DOCS / "examples" / name).read_bytes())
    alone = (*WITHOUT_PLUGINS, "-q", "--rootdir", ".", "-c", "/dev/null")
    job = run_python("-m", "pytest", *alone, "test_mean_of_means.py", cwd=tmp_path, timeout=120)
    [shown] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    said = iter(job.stdout.splitlines())
    for line in shown.splitlines():
        assert line in said, f"{line!r} is not in what follows in\n{job.stdout}\n{job.stderr}"
    assert "1 failed, 1 passed" in job.stdout


# Those that import both frameworks, or test themselves, take longest.
AT_NIGHT = ("researcher.py", "test_library_author.py", "test_quality.py")
FIRST_HOUR = [
    pytest.param(path, id=path.name, marks=[pytest.mark.at_night] * (path.name in AT_NIGHT))
    for path in sorted((DOCS / "examples" / "first_hour").glob("*.py"))
]


@needs_mpiexec
@pytest.mark.parametrize("path", FIRST_HOUR)
def test_a_program_of_the_first_hour_ends_well(tmp_path: Path, path: Path) -> None:
    imported = re.findall(r"(?m)^(?:from|import) (?!lib)(\w+)", path.read_text("utf-8"))
    if not all(map(find_spec, imported)):
        pytest.skip("needs a framework that is not here")
    suite = ("-m", "pytest", *WITHOUT_PLUGINS, "--rootdir", ".", "-c", "/dev/null")
    job = run_python("-P", *suite * ("test_" in path.name), str(path), ranks=2, cwd=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
