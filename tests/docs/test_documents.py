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
# On two ranks as well, in one job.
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
    here = [path for path, modules in QUICKSTARTS.items() if all(map(find_spec, modules))]
    with TemporaryDirectory() as directory:
        paths = map(str, [*documents, *here])
        # Alone, the documents compile models; and all share what is imported.
        job = run_python(
            *COMMAND, *paths, ranks=ranks, cwd=Path(directory), timeout=480, compiles=ranks is None
        )
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


class Learned:
    """What a quickstart printed, by rank."""

    def __init__(self, text: str) -> None:
        self.losses = self._values(r"epoch (\d+): loss (\S+)", text)
        self.digests = self._values(r"(parameters) (\w+)", text)

    @staticmethod
    def _values(pattern: str, text: str) -> dict[int, dict[str, str]]:
        values: dict[int, dict[str, str]] = {}
        for rank, name, value in re.findall(rf"\[(\d+)/\d+\] {pattern}", text):
            values.setdefault(int(rank), {})[name] = value
        return values

    def assert_enough(self, ranks: int) -> None:
        assert sorted(self.losses) == list(range(ranks))
        for losses in self.losses.values():
            assert float(losses["100"]) < LEARNED


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_code_of_a_document_runs(document: Path) -> None:
    _output_of(document)


@pytest.mark.parametrize("program", QUICKSTARTS, ids=name_of)
def test_one_process_learns(program: Path) -> None:
    _skip_without(QUICKSTARTS[program])
    Learned(_output_of(program)).assert_enough(ranks=1)


@needs_mpiexec
@pytest.mark.parametrize("document", ON_RANKS, ids=name_of)
def test_the_code_of_a_document_runs_on_two_ranks(document: Path) -> None:
    _output_of(document, ranks=2)
    assert _report(ON_RANKS, 2).endswith("<the job ended with 0>"), _report(ON_RANKS, 2)


@needs_mpiexec
@pytest.mark.parametrize("program", QUICKSTARTS, ids=name_of)
def test_two_ranks_learn_and_end_with_the_same_parameters(program: Path) -> None:
    _skip_without(QUICKSTARTS[program])
    learned = Learned(_output_of(program, ranks=2))
    learned.assert_enough(ranks=2)
    losses = [values["100"] for values in learned.losses.values()]
    assert len(set(losses)) > 1, "ranks have data of their own"
    digests = [values["parameters"] for values in learned.digests.values()]
    assert digests == digests[:1] * 2
