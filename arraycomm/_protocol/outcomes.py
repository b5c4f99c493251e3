"""What became of requests: at the end, those that nobody has waited for are told of."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import Counter

from arraycomm._callsite import user_level
from arraycomm._errors import CommunicatorClosedError


class Outcome:
    """How one request ended; it outlives the request, and holds none of its arrays."""

    __slots__ = ("dropped", "error", "finished", "site")

    def __init__(self, site: str) -> None:
        self.site = site
        self.finished = False
        self.error: BaseException | None = None
        # Whether the program has no reference to the request any more.
        self.dropped = False


class Outcomes:
    """The requests of one group on this rank that nobody has waited for."""

    def __init__(self) -> None:
        self._open: dict[Outcome, None] = {}
        # Of those that ended well and that nobody can wait for any more, how many were made where.
        self._lost: Counter[str] = Counter()

    def add(self, site: str) -> Outcome:
        """Return the outcome of a new request."""
        outcome = Outcome(site)
        self._open[outcome] = None
        return outcome

    def claim(self, outcome: Outcome) -> None:
        """Forget a request: its caller knows how it ended."""
        self._open.pop(outcome, None)

    def finish(self, outcome: Outcome, error: BaseException | None) -> None:
        """Note how a request has ended."""
        outcome.finished, outcome.error = True, error
        self._settle(outcome)

    def drop(self, outcome: Outcome) -> None:
        """Note that the program can wait for a request no more."""
        outcome.dropped = True
        self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        if outcome.finished and outcome.dropped and outcome.error is None and outcome in self._open:
            self._open.pop(outcome, None)
            self._lost[outcome.site] += 1

    def report(self) -> bool:
        """Print the errors that nobody has seen, and warn of requests; tell if there are no errors."""
        errors = self.errors()
        sites = self._lost + Counter(o.site for o in self._open if o.error is None)
        self._open, self._lost = {}, Counter()
        for outcome in errors:
            text = "".join(traceback.format_exception(outcome.error))
            sys.stderr.write(
                f"the request made at {outcome.site} failed, and nobody waited for it:\n{text}"
            )
        for site, count in sites.items():
            made = "the request" if count == 1 else f"{count} requests"
            warnings.warn(
                f"{made} made at {site} {'was' if count == 1 else 'were'} never waited for; keep "
                "requests, and wait for each of them",
                RuntimeWarning,
                stacklevel=user_level(),
            )
        return not errors

    def errors(self) -> list[Outcome]:
        """Return the requests that have failed without anybody having seen it.

        Those that came behind another one that failed are not among them.
        """
        failed = [outcome for outcome in self._open if outcome.error is not None]
        return [o for o in failed if not isinstance(o.error, CommunicatorClosedError)]
