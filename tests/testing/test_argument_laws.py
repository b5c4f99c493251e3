"""Every argument of every public call has a law, and every failure a test."""

from __future__ import annotations

import pytest

from tests.support.argument_laws import PAGE, ROOT, failures, files, laws, page

pytestmark = pytest.mark.skipif(not (ROOT / "arraycomm").is_dir(), reason="needs the source")


def test_every_argument_of_a_public_call_is_passed_by_a_law() -> None:
    found = laws()
    assert len(found) > 60
    assert [
        f"{name}({parameter}=)"
        for name, passed in found.items()
        for parameter, named in passed.items()
        if not named
    ] == []


def test_every_row_of_what_can_go_wrong_is_shown_by_a_test() -> None:
    found, unused = failures()
    assert len(found) > 35
    assert [row for row, names in found.items() if not names] == []
    assert {name for names in found.values() for name in names} - set(files()) == set()
    assert unused == set()


def test_the_page_has_the_laws_of_today() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.support.argument_laws"
