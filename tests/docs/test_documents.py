"""The Python code in README.md and docs/ runs as it stands, each document in a process of its own."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.launcher import needs_mpiexec, run_python

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
# On two ranks as well, in one job with the programs that learn.
ON_RANKS = (README, ROOT / "docs" / "migration.md")
DOCUMENTS = [
    path
    for path in (README, *sorted((ROOT / "docs").rglob("*.md")))
    if "```python" in path.read_text(encoding="utf-8")
]
QUICKSTARTS = {
    ROOT / "docs" / "examples" / "quickstart_torch.py": ("torch",),
    ROOT / "docs" / "examples" / "quickstart_jax.py": ("jax", "optax"),
}
# Safe path: the directory of the program holds packages with the names of others.
COMMAND = ("-P", str(Path(__file__).with_name("run_document.py")))
# With the same parameters for every x, the best loss is the variance of x² over (0, 1): 4/45.
LEARNED = 4 / 45 / 5


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@lru_cache
def _report(documents: tuple[Path, ...], ranks: int | None) -> str:
    _skip_without(("sybil",))
    if ranks:
        here = [path for path, modules in QUICKSTARTS.items() if all(map(find_spec, modules))]
        documents = (*documents, *here)
    with TemporaryDirectory() as directory:
        paths = map(str, documents)
        # All share what is imported.
        job = run_python(*COMMAND, *paths, ranks=ranks, cwd=Path(directory), timeout=480)
    return f"{job.stdout}\n{job.stderr}\n<the job ended with {job.returncode}>"


def _output_of(document: Path, ranks: int | None = None) -> str:
    """Return what the code of a document has printed; fail unless it ended well."""
    report = _report(tuple(DOCUMENTS) if ranks is None else ON_RANKS, ranks)
    before, found, _ = report.partition(f"<{document} ended with 0>")
    assert found, report
    return re.split(r"<\S+ ended with -?\d+>\n", before)[-1]


def _skip_without(modules: tuple[str, ...]) -> None:
    # Not importorskip: nothing here needs the frameworks in this process.
    if not all(map(find_spec, modules)):
        pytest.skip(f"needs {', '.join(modules)}")


def _values(pattern: str, text: str) -> dict[int, str]:
    """Return what a quickstart printed, by rank."""
    found = re.findall(rf"\[(\d+)/\d+\] {pattern} (\S+)", text)
    return {int(rank): value for rank, value in found}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_code_of_a_document_runs(document: Path) -> None:
    _output_of(document)


@needs_mpiexec
@pytest.mark.parametrize("document", ON_RANKS, ids=name_of)
def test_the_code_of_a_document_runs_on_two_ranks(document: Path) -> None:
    _output_of(document, ranks=2)
    assert _report(ON_RANKS, 2).endswith("<the job ended with 0>"), _report(ON_RANKS, 2)


@needs_mpiexec
@pytest.mark.parametrize("program", QUICKSTARTS, ids=name_of)
def test_two_ranks_learn_and_end_with_the_same_parameters(program: Path) -> None:
    _skip_without(QUICKSTARTS[program])
    said = _output_of(program, ranks=2)
    losses, digests = _values("epoch 100: loss", said), _values("parameters", said)
    assert sorted(losses) == [0, 1]
    assert all(float(loss) < LEARNED for loss in losses.values())
    assert losses[0] != losses[1], "ranks have data of their own"
    assert digests[0] == digests[1]
