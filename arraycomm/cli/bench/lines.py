"""One line of the benchmark: who takes part, whose result is right, and how long each takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol, TypeVar

from arraycomm.cli.bench.contenders import REFERENCES, TITLES, Contender, Field, UnsupportedError
from arraycomm.cli.bench.timing import measure, ratio

# One line of the results, as it is stored.
Line = dict[str, Any]


class Measurable(Protocol):
    """What is reduced in one line: an array, or a tree of them."""

    dtype_name: str
    nbytes: int

    def verify(self, contender: Contender) -> str:
        """Return what is wrong with a contender's answer on this rank, or an empty string."""


AnyCase = TypeVar("AnyCase", bound=Measurable)
Maker = Callable[[str, str, AnyCase, Field], Contender]


def measured(
    field: Field, case: Measurable, mode: str, entries: Sequence[Entry], **limits: Any
) -> Line:
    """Time the contenders of a line, and return the line; collective."""
    ready = [entry for entry in entries if entry.contender is not None]
    calls = [entry.contender.call for entry in ready if entry.contender is not None]
    agreed, samples = measure(calls, meeting=field, **limits)
    for entry, count, row in zip(ready, agreed.calls, samples, strict=True):
        entry.calls, entry.samples = count, row
    return {
        "mode": mode,
        "dtype": case.dtype_name,
        "nbytes": case.nbytes,
        "repetitions": agreed.repetitions,
        "contenders": [entry.as_dict(entries) for entry in entries],
    }


class Entry:
    """One contender's part in one line.

    `status` is "ok", "unsupported" (it cannot do this), "wrong" (its result was wrong) or "error"
    (it raised). Unless it is "ok", `reason` says more, and the contender is not timed.
    """

    def __init__(self, key: str, framework: str) -> None:
        self.key, self.framework = key, framework
        self.contender: Contender | None = None
        self.status, self.reason = "ok", ""
        self.calls = 0
        self.samples: list[float] = []

    def as_dict(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Return this entry as the results store it."""
        stored: dict[str, Any] = {
            "key": self.key,
            "name": TITLES[self.key],
            "framework": self.framework,
            "status": self.status,
        }
        if self.status != "ok":
            return {**stored, "reason": self.reason}
        ratios = {
            other.key: ratio(self.samples, other.samples)
            for other in entries
            if other.framework == self.framework and other.key in REFERENCES and other.samples
        }
        own = self.samples
        numbers = {"median": median(own), "min": min(own), "max": max(own)}
        samples = [float(f"{seconds:.4g}") for seconds in own]
        return {**stored, "calls": self.calls, **numbers, "ratios": ratios, "samples": samples}


def enter(field: Field, case: AnyCase, key: str, framework: str, maker: Maker[AnyCase]) -> Entry:
    """Make a contender and verify its result; collective."""
    entry = Entry(key, framework)
    try:
        contender = maker(key, framework, case, field)
    except UnsupportedError as unsupported:
        entry.status, entry.reason = "unsupported", str(unsupported)
        return entry
    verify(field, case, contender, entry)
    return entry


def verify(field: Field, case: Measurable, contender: Contender, entry: Entry) -> None:
    """Admit a contender if its result is right on every rank; collective."""
    status, reason = "wrong", ""
    try:
        reason = case.verify(contender)
    except Exception as error:
        status, reason = "error", f"{type(error).__name__}: {error}"
    replies = field.mpi.allgather((status, reason))
    rank = next((rank for rank, (_, reason) in enumerate(replies) if reason), None)
    if rank is None:
        entry.contender = contender
        return
    entry.status, entry.reason = replies[rank][0], f"rank {rank}: {replies[rank][1]}"
