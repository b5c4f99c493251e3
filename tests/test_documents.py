"""The Python code in README.md and docs/ runs as it stands, each document in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher import needs_mpiexec, run_python

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def run_document(document: Path, directory: Path, ranks: int | None = None) -> None:
    pytest.importorskip("sybil")
    program = Path(__file__).with_name("run_document.py")
    # Safe path: the directory of the program holds packages with the names of others.
    job = run_python("-P", str(program), str(document), ranks=ranks, cwd=directory)
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_code_of_a_document_runs(document: Path, tmp_path: Path) -> None:
    run_document(document, tmp_path)


@needs_mpiexec
def test_the_code_of_the_readme_runs_on_three_ranks(tmp_path: Path) -> None:
    run_document(README, tmp_path, ranks=3)
