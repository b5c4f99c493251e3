"""On how many ranks a test is to run, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from arraycomm._checks import check_at_least, check_seconds


def parametrize(metafunc: pytest.Metafunc, most: int) -> None:
    """Make a test for each number of ranks of the marker, if any; skip those above `most`."""
    values = []
    for count in _counts_of(metafunc.definition):
        reason = f"needs {count} ranks; mpiexec has started {most}"
        marks = [pytest.mark.skip(reason=reason)] if count > most else []
        values.append(pytest.param(count, id=f"{count}-ranks", marks=marks))
    if values:
        metafunc.parametrize("comm", values, indirect=True)


def _counts_of(node: pytest.Item) -> Sequence[int]:
    """Return the numbers of ranks of the closest marker; none if there is no marker or number."""
    marker = node.get_closest_marker("ranks")
    if marker is None:
        return ()
    unknown = set(marker.kwargs) - {"timeout"}
    try:
        check_seconds(marker.kwargs.get("timeout"))
        counts = [check_at_least(count, 1, "ranks") for count in marker.args]
        if unknown or len(set(counts)) < len(counts):
            raise ValueError
    except (TypeError, ValueError):
        raise pytest.UsageError(
            "ranks: the marker takes different numbers of ranks, each an int of at least 1, and "
            "timeout=seconds, more than 0, as in @pytest.mark.ranks(2, 4, timeout=10); "
            f"{node.nodeid} has {marker}"
        ) from None
    return counts


def timeout_of(node: pytest.Item) -> float:
    """Return the seconds that a test may take, and each of its waits."""
    for marker in node.iter_markers("ranks"):
        if marker.kwargs.get("timeout") is not None:
            return float(marker.kwargs["timeout"])
    return float(node.config.getoption("ranks_timeout"))
