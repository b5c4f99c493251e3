"""Links of README.md and docs/ lead somewhere, the navigation has every page, and the README reads the same on an index."""

from __future__ import annotations

import ast
import re
import runpy
import tomllib
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.launcher import needs_mpiexec, run_python

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
LINK = re.compile(r'\]\((?P<link>[^)\s]+)\)|src="(?P<source>[^"]+)"')


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def prose_of(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )


@cache
def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose_of(page), flags=re.MULTILINE)
    return {_slug(heading) for heading in headings}


def _slug(heading: str) -> str:
    plain = re.sub(r"\[(.*?)\]\(.*?\)|[`*]", r"\1", heading)
    ascii_only = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def links_of(page: Path) -> Iterator[str]:
    for found in LINK.finditer(prose_of(page)):
        link = found["link"] or found["source"]
        if not link.startswith(("https://", "http://")):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors_of(target), f"{link}: no such heading"
        if page != README:
            assert target.is_relative_to(DOCS), f"{link}: not on the site"


def test_the_navigation_has_every_page_once() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = settings.partition("\nnav:")[2].partition("\nplugins:")[0]
    listed = re.findall(r"[\w/-]+\.md", navigation)
    assert sorted(listed) == sorted(
        page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")
    )


def test_the_changelog_leads_to_the_same_pages_on_the_site() -> None:
    """The page quotes the changelog, and has its references as the site needs them."""
    reference = re.compile(r"^\[([\w-]+)\]: (\S+)$", re.MULTILINE)
    there = dict(reference.findall((ROOT / "CHANGELOG.md").read_text("utf-8")))
    here = dict(reference.findall((DOCS / "changelog.md").read_text("utf-8")))
    assert there == {name: f"docs/{path}" for name, path in here.items()}
    assert [path for path in here.values() if not (DOCS / path.partition("#")[0]).is_file()] == []


def test_the_readme_of_an_index_links_to_the_site_and_the_repository() -> None:
    script = ROOT / "setup.py"
    if not script.exists():
        pytest.skip("there is no checkout here, only its tests")
    whole = runpy.run_path(str(script))["read_by_itself"](README.read_text("utf-8"), URLS)
    site, files = URLS["Documentation"], URLS["Source"]
    links = [found["link"] or found["source"] for found in LINK.finditer(whole)]
    assert len(links) == len(list(links_of(README)))
    for before, link in zip(links_of(README), links, strict=True):
        expected = before.removeprefix("docs/").replace(".md", ".html")
        assert link == (site + expected if before.startswith("docs/") else files + before)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_is_marked_as_python_and_so_runs(page: Path) -> None:
    blocks = re.findall(r"^```(\S*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} <= {"python", "console", "sh", "text"}
    assert not [code for language, code in blocks if language == "text" and _is_program(code)]


def _is_program(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


@needs_mpiexec
def test_the_readme_shows_what_three_ranks_print(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    (hello, failing), (printed,), (error,) = (
        [code for language, code in blocks if language == wanted][:count]
        for wanted, count in (("python", 2), ("console", 1), ("text", 1))
    )
    (tmp_path / "hello.py").write_text(hello, encoding="utf-8")
    (tmp_path / "train.py").write_text(failing, encoding="utf-8")
    both = "import runpy; runpy.run_path('hello.py'); runpy.run_path('train.py')"
    job = run_python("-m", "arraycomm", "run", "-n", "3", "-c", both, cwd=tmp_path)
    assert job.returncode != 0
    lines = [line.partition(" ")[2] for line in printed.partition("-n 3")[2].splitlines()[1:]]
    assert [line.partition(" ")[2] for line in job.stdout.splitlines()] == lines
    for line in error.splitlines()[1:]:
        assert line.strip() in job.stderr, job.stderr
    # None of the library.
    assert "_communicator.py" not in job.stderr


def test_each_page_has_a_description_of_its_own() -> None:
    """Search engines and previews show it."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "studies" not in page.parts]
    found = [
        re.match(r"---\n(?:title: .*\n)?description: (.{20,150})\n---\n", page.read_text("utf-8"))
        for page in pages
    ]
    assert [page.name for page, each in zip(pages, found, strict=True) if each is None] == []
    assert len({each[1] for each in found if each}) == len(pages)
