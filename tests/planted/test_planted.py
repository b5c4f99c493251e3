"""Every fault still fits the library; `make planted` says which law catches each."""

from __future__ import annotations

import ast
import json

import pytest

from tests.planted import mutants, page
from tests.planted.catalogue import FAULTS
from tests.planted.copies import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "arraycomm").is_dir(), reason="needs the source")


def test_every_fault_still_applies() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in {f.source(ROOT) for f in FAULTS}}
    for fault in FAULTS:
        # Each changes some lines, so the rest of its file need not be compiled.
        planted = fault.applied(texts[fault.source(ROOT)])
        assert fault.native or ast.parse(planted)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_every_room_of_the_package_has_changes_and_tests() -> None:
    rooms = {room.name for room in (ROOT / "arraycomm").iterdir() if room.is_dir()}
    rooms -= {"adapters", "__pycache__"}
    changed = {mutants.room_of(mutant.file) for mutant in mutants.mutants()}
    assert changed == set(mutants.TESTS)
    assert rooms - changed == set()
    for tests in mutants.TESTS.values():
        paths = tests.replace("; mpi", "").replace(";", "").split()
        assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_law_has_caught_a_fault() -> None:
    caught = json.loads(page.CAUGHT.read_text(encoding="utf-8"))
    assert sorted(set(page.laws()) - page.by_law(caught).keys()) == []


def test_the_page_tells_of_every_fault_that_it_was_caught() -> None:
    caught = json.loads(page.CAUGHT.read_text(encoding="utf-8"))
    assert list(caught) == [fault.name for fault in FAULTS]
    assert [name for name, errors in caught.items() if not errors] == []
    assert page.PAGE.read_text(encoding="utf-8") == page.page(caught)
