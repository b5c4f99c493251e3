"""What the structure in numbers sees of a package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import structure

MODULE = '''
"""Two
lines."""

class A:
    def f(self):
        """One
        more."""
        return self

class FastPath:
    pass

class Base(FastPath):
    pass

class Small(Base):
    pass

class Large(FastPath):
    pass
'''


def test_sizes_leave_docstrings_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(MODULE, encoding="utf-8")
    tree = {"arraycomm.module": ast.parse(MODULE)}
    found = {(kind, name): n for kind, name, n in structure.sizes({"arraycomm.module": path}, tree)}
    assert found["lines of a module", "module"] == MODULE.count("\n") - 4
    assert found["lines of a function", "module:f"] == 2
    assert found["methods of a class", "module:A"] == 1
    assert found["modules of a room", "."] == 1
    assert structure.kinds_of_prepared_calls(tree) == ["Large", "Small"]


@pytest.mark.parametrize(
    ("size", "larger", "said"),
    [
        (60, {}, []),
        (61, {}, ["lines of a function: m:f has 61, and may have 60"]),
        (70, {"m:f": 70}, []),
        (65, {"m:f": 70}, []),
        (71, {"m:f": 70}, ["lines of a function: m:f has 71, and may have 70"]),
        (60, {"m:f": 70}, ["m:f is no longer larger: take it out of LARGER"]),
    ],
)
def test_what_is_larger_may_shrink_and_not_grow(
    size: int, larger: dict[str, int], said: list[str]
) -> None:
    assert structure.too_large([("lines of a function", "m:f", size)], larger) == said


def test_circles_and_private_uses_are_found() -> None:
    first = ast.parse("import arraycomm.b\nx = other._kept\n")
    second = ast.parse("from arraycomm.a import x\n")
    trees = {"arraycomm.a": first, "arraycomm.b": second, "arraycomm.c": ast.parse("")}
    assert structure.circles(trees) == ["arraycomm.a", "arraycomm.b"]
    assert structure.foreign_private(trees) == ["arraycomm.a:2 other._kept"]
