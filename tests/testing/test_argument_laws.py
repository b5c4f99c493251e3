"""Every argument of every public call has a law."""

from __future__ import annotations

import pytest

from tests.support.argument_laws import PAGE, ROOT, laws, page

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


def test_the_page_has_the_laws_of_today() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.support.argument_laws"
