"""Few rows of a crossed table, among which every pair of values that the table has still occurs."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row", bound=Sequence[Any])

# EVERY=1 runs the whole tables.
EVERY = bool(os.environ.get("EVERY"))


def pairwise(rows: Iterable[Row]) -> list[Row]:
    """Return some of the rows: what stands together in two columns of any row does in one of these.

    The same rows give the same choice, so that ranks that choose for themselves agree. Values are
    told apart by hash and equality.
    """
    table = list(rows)
    if EVERY:
        return table
    numbers: dict[Hashable, int] = {}
    pairs = [_pairs(row, numbers) for row in table]
    chosen, missing = [], (1 << len(numbers)) - 1
    while missing:
        best = max(range(len(table)), key=lambda place: (pairs[place] & missing).bit_count())
        chosen.append(best)
        missing &= ~pairs[best]
    return [table[place] for place in sorted(chosen)]


def _pairs(row: Sequence[Hashable], numbers: dict[Hashable, int]) -> int:
    """Return a bit for each pair of a row; `numbers` counts the pairs of the whole table."""
    bits = 0
    for pair in combinations(enumerate(row), 2):
        bits |= 1 << numbers.setdefault(pair, len(numbers))
    return bits


def thinned(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Keep of each test that has three parameters or more those calls that are pairwise different.

    Names that are parametrized together count as one parameter: each of its rows stays.
    """
    tables: dict[str, dict[Any, pytest.Item]] = {}
    for item in items:
        tables.setdefault(item.nodeid.partition("[")[0], {})[_values(item)] = item
    kept = {id(item) for table in tables.values() for item in _chosen(table)}
    return [item for item in items if id(item) in kept]


def _chosen(table: dict[Any, pytest.Item]) -> Iterable[pytest.Item]:
    row, item = next(iter(table.items()))
    if len(row) < 3 or item.get_closest_marker("every_combination"):
        return table.values()
    return [table[row] for row in pairwise(table)]


def _values(item: pytest.Item) -> tuple[Hashable, ...]:
    """Return what stands for the value of each of a test's parameters."""
    spec = getattr(item, "callspec", None)
    values = {} if spec is None else {name: _key(value) for name, value in spec.params.items()}
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [mark.replace(",", " ").split() if isinstance(mark, str) else mark for mark in marks]
    together = [tuple(values.pop(name) for name in group) for group in names]
    return (*together, *values.values())


def _key(value: Any) -> Hashable:
    """Tell values apart as a reader does: 1 is not True, and a dictionary is itself alone."""
    try:
        hash(value)
    except (TypeError, ValueError):
        return id(value)
    return type(value), value
