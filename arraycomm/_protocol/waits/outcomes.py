"""What became of requests: at the end, those that nobody has waited for are told of."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

from arraycomm._callsite import CallSite, describe_exception, user_level
from arraycomm._errors import CommunicatorClosedError


class Outcome:
    """How one request ended; it outlives the request, and holds none of its arrays."""

    __slots__ = ("_outcomes", "dropped", "error", "finished", "site")

    def __init__(self, outcomes: Outcomes | None = None, site: str | CallSite = "unknown") -> None:
        self._outcomes = outcomes
        self.site = site
        self.finished = False
        self.error: BaseException | None = None
        # Whether the program has no reference to the request any more.
        self.dropped = False
        if outcomes is not None:
            outcomes.open[self] = None

    def finish(self, error: BaseException | None) -> None:
        """Note how the request has ended."""
        self.finished, self.error = True, error
        if self.dropped and self._outcomes is not None:
            self._outcomes.lose(self)

    def drop(self) -> None:
        """Note that the program can wait for the request no more."""
        self.dropped = True
        if self.finished and self._outcomes is not None:
            self._outcomes.lose(self)

    def claim(self) -> None:
        """Forget the request: its caller knows how it ended."""
        if self._outcomes is not None:
            self._outcomes.open.pop(self, None)
            self._outcomes = None
        # Its traceback has the frames of a call, and with them the arrays.
        self.error = None


class Outcomes:
    """The requests of one group on this rank that nobody has waited for."""

    def __init__(self) -> None:
        # Of those whose callers do not know how they ended.
        self.open: dict[Outcome, None] = {}
        # Of those that ended well and that nobody can wait for any more, how many were made where.
        self._lost: Counter[str] = Counter()
        self._freed = False

    def lose(self, outcome: Outcome) -> None:
        """Note that a request has ended, and that nobody can wait for it any more."""
        if outcome not in self.open:
            return
        if outcome.error is None:
            self.open.pop(outcome)
            self._lost[str(outcome.site)] += 1
        if self._freed:
            # Nobody asks for a report any more.
            self._tell([outcome] if outcome.error is not None else [])

    def take(self, other: Outcomes) -> None:
        """Report those of another group, which is freed, as one's own."""
        for outcome in other.open:
            outcome._outcomes = self
        self.open |= other.open
        self._lost += other._lost
        other.open = {}

    def free(self) -> None:
        """Report the requests that nobody can wait for any more, and later ones at once."""
        self._freed = True
        self._tell([outcome for outcome in self.open if outcome.dropped])

    def report(self) -> bool:
        """Report all requests that nobody has waited for; return whether none has failed."""
        return self._tell(list(self.open))

    def errors(self) -> list[Outcome]:
        """Return the requests that have failed without anybody having seen it."""
        return _failed(self.open)

    def _tell(self, outcomes: Sequence[Outcome]) -> bool:
        """Print the errors of requests, and warn of those that have none."""
        for outcome in outcomes:
            self.open.pop(outcome, None)
        failed = _failed(outcomes)
        for outcome in failed:
            assert outcome.error is not None
            text = describe_exception(outcome.error)
            said = f"the request made at {outcome.site} failed, and nobody waited for it:\n{text}"
            # Programs without a console have no standard error.
            if sys.stderr is not None:
                sys.stderr.write(said)
        sites = self._lost + Counter(str(o.site) for o in outcomes if o.error is None)
        self._lost = Counter()
        for site, count in sites.items():
            made = "the request" if count == 1 else f"{count} requests"
            warnings.warn(
                f"{made} made at {site} {'was' if count == 1 else 'were'} never waited for; keep "
                "requests, and wait for each of them",
                RuntimeWarning,
                stacklevel=user_level(),
            )
        return not failed


def _failed(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return those with an error, but those that only came behind another one with an error."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    return [o for o in failed if not isinstance(o.error, CommunicatorClosedError)]
