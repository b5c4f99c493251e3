"""Errors of ranks that called different things, or of which one raised: who did what, where."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final, TypeVar

from arraycomm._errors import MismatchError, PeerError, TransportError
from arraycomm._protocol.details import CallDetail, Detail, Failure
from arraycomm._transports.notes import ENDED, FINALIZED, FINISHED, GAVE_UP

T = TypeVar("T")

# The setting that names the containers of a tree: a line for each, of its path and its type.
STRUCTURE: Final = "structure"
# The setting that says what containers hold besides leaves: a line for each part, of its path and
# its value.
STATIC: Final = "static"
# The setting that says which total a sum goes on from: the same lines of its leaves.
ONTO: Final = "onto"
# What comes before such a value.
VALUE: Final = "= "


def mismatch(details: Sequence[Detail]) -> MismatchError:
    """Return the error that shows what each rank called, ranks of one call together."""
    lines = by_ranks([_said(detail) for detail in details])
    difference = first_difference(details)
    if not difference and ": println" in lines:
        difference = "Every rank has to call println; ranks=0 lets rank 0 alone print"
    return MismatchError(
        f"ranks of one communicator called different things: {lines}"
        + (f". {difference}" if difference else "")
    )


def by_ranks(said: Sequence[str]) -> str:
    """Return what each rank said, ranks that said the same together."""
    groups = ranks_of(enumerate(said))
    return "; ".join(f"{name_ranks(ranks)}: {text}" for text, ranks in groups.items())


def ranks_of(said: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """Return the ranks of each of the things that ranks said."""
    groups: dict[T, list[int]] = {}
    for rank, each in said:
        groups.setdefault(each, []).append(rank)
    return groups


def _said(detail: Detail) -> str:
    if isinstance(detail, CallDetail):
        return f"{detail.call} at {detail.site}"
    return f"raised {detail.error}" if isinstance(detail, Failure) else "an unknown call"


def first_difference(details: Sequence[Detail]) -> str:
    """Name the first leaf in which the trees of two ranks differ, or return an empty string."""
    calls = [(r, detail) for r, detail in enumerate(details) if isinstance(detail, CallDetail)]
    if not calls or calls[0][0] != 0:
        return ""
    first = calls[0][1]
    for rank, other in calls[1:]:
        if first.leaves is None or other.leaves is None or first.leaves == other.leaves:
            continue
        for one, another in zip(first.leaves, other.leaves, strict=False):
            if one.path != another.path:
                return f"First difference: {one.path} on rank 0, {another.path} on rank {rank}"
            if one != another:
                return f"First difference: {one.path} is {one} on rank 0, {another} on rank {rank}"
        longer, shorter, where = first.leaves, other.leaves, 0
        if len(longer) < len(shorter):
            longer, shorter, where = shorter, longer, rank
        return f"First difference: {longer[len(shorter)].path} is on rank {where} only"
    for rank, other in calls[1:]:
        if other.settings != first.settings:
            containers = _other_container(first, other, rank)
            if containers:
                return containers
            return (
                f"First difference: {_settings(first)} on rank 0, {_settings(other)} on rank {rank}"
            )
    return ""


def _other_container(first: CallDetail, other: CallDetail, rank: int) -> str:
    """Name the first container of two trees whose types differ, or return an empty string."""
    ours, others = (_containers(call) for call in (first, other))
    for path in ours | others:
        one, another = ours.get(path), others.get(path)
        if one == another:
            continue
        if one and another:
            there = another.removeprefix(VALUE)
            return f"First difference: {path} is {_kind(one)} on rank 0, {there} on rank {rank}"
        where = 0 if one else rank
        return f"First difference: {path}, {_kind(one or another or '')}, is on rank {where} only"
    return ""


def _kind(said: str) -> str:
    return said.removeprefix(VALUE) if said.startswith(VALUE) else f"of type {said}"


def _containers(call: CallDetail) -> dict[str, str]:
    settings = dict(call.settings)
    texts = (str(settings.get(name) or "") for name in (STRUCTURE, STATIC, ONTO))
    lines = (line.rpartition(": ") for text in texts for line in text.splitlines())
    return {path: kind for path, _, kind in lines}


def _settings(call: CallDetail) -> str:
    said = [
        (name, value)
        for name, value in call.settings
        if value is not None and name not in (STRUCTURE, STATIC, ONTO)
    ]
    return ", ".join(f"{name}={value}" for name, value in said)


def peer_error(operation: str, details: Sequence[Detail]) -> PeerError | TransportError:
    """Return the error of the ranks that did not raise, from the details of one that did."""
    failures = [
        (rank, detail) for rank, detail in enumerate(details) if isinstance(detail, Failure)
    ]
    if not failures:
        return TransportError(
            f"{operation}: a rank raised, but did not say what; its message is malformed"
        )
    rank, failure = failures[0]
    error = PeerError(
        f"{operation}: rank {rank} raised instead of taking part; its traceback:\n"
        f"{failure.traceback}",
        rank=rank,
        traceback=failure.traceback,
    )
    error.in_step = True
    return error


def how_left(state: int) -> str:
    """Say how a rank left, by the state in its exit notice."""
    if state == FINALIZED:
        return "has finalized MPI"
    if state == ENDED:
        return "has reached the end of its program, or called sys.exit,"
    if state == GAVE_UP:
        return "has given up waiting"
    return "has reached the end of its program" if state == FINISHED else "failed"


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order, runs of three and more by their ends."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ]
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
