"""Every rank runs the tests that rank 0 has chosen, in its order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import pytest

# Tests that an error names.
_NAMED = 3
# Where the versions of pytest keep an item's name that let a suite change it.
_KEPT = "_nodeid"

# Why reruns are refused.
NOT_AGAIN: Final = "a rank would run a test again that the other ranks do not; leave it out"


@dataclass
class Collected:
    """What a rank has collected."""

    # A digest of the ids of all tests, before any was left out.
    digest: bytes
    # Reports of what could not be collected, as pytest serializes them, by id.
    errors: dict[str, Any]
    # The ids of the tests to run; only rank 0's count.
    chosen: list[str]


def names_of(items: Sequence[pytest.Item]) -> list[str]:
    """Return a different name for each item, which it has on every rank."""
    seen: Counter[str] = Counter()
    names = []
    for item in items:
        seen[item.nodeid] += 1
        again = seen[item.nodeid]
        names.append(item.nodeid if again == 1 else f"{item.nodeid} (no. {again})")
    return names


def without_rank(items: Mapping[str, pytest.Item], rank: int) -> dict[str, pytest.Item]:
    """Return items by the names that they have on rank 0, if they name the rank; and rename them.

    Some suites write it at the end of each name, as "[Rank 2]".
    """
    own = re.compile(rf"(\Wranks?\W*){rank}(?=\D*$)", re.IGNORECASE)
    found = {}
    for name, item in items.items():
        plain = own.sub(r"\g<1>0", name)
        if plain != name and hasattr(item, _KEPT):
            setattr(item, _KEPT, own.sub(r"\g<1>0", item.nodeid))
        found[plain] = item
    return found


def digest_of(names: Sequence[str]) -> bytes:
    """Return a digest of names, whatever their order."""
    return blake2b("\n".join(sorted(names)).encode(), digest_size=16).digest()


def difference(collected: Sequence[Sequence[str]]) -> str:
    """Say which tests a rank has collected and rank 0 has not, or the other way round."""
    first = set(collected[0])
    for rank, names in enumerate(collected):
        more, fewer = sorted(set(names) - first), sorted(first - set(names))
        if more or fewer:
            parts = [
                f"only {who}: {_some(found)}"
                for who, found in ((f"rank {rank}", more), ("rank 0", fewer))
                if found
            ]
            return (
                "the ranks have collected different tests, and cannot run them in step: "
                f"{'; '.join(parts)}; parametrize with the same values on every rank, and "
                "leave the rank out of the names of tests"
            )
    return "the ranks have collected different tests"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def refuse_reruns(items: list[pytest.Item]) -> None:
    """Raise if a test's marker asks pytest-rerunfailures to run it again."""
    for item in items:
        marker = item.get_closest_marker("flaky")
        if marker is not None and hasattr(item.config.option, "reruns"):
            raise pytest.UsageError(
                f"the marker flaky of {item.nodeid} cannot be used under mpiexec: {NOT_AGAIN}, "
                "or the test: -m 'not flaky'"
            )
