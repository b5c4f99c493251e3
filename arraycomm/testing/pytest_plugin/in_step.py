"""The hooks by which the ranks of a job run pytest in step.

After each test the ranks tell one another how it ended, and each makes the same reports of it, so
that each goes on to the same next test, or ends with the same status. Rank 0 writes the reports.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pytest
from _pytest.runner import runtestprotocol

from arraycomm._callsite import trim
from arraycomm._communicator import Communicator
from arraycomm._errors import CommTimeoutError
from arraycomm.testing._internals import (
    LastStep,
    communicator_over,
    completed_step,
    end_test,
    has_world,
    is_open,
    leave_world,
    left_behind,
    renew_world,
    revive_world,
    take_up_rest,
    world_is_closed,
)
from arraycomm.testing._ranks.interrupt import Interruption
from arraycomm.testing._ranks.rank_links import Left, can_take_up, fault_of
from arraycomm.testing._ranks.threads import SLACK
from arraycomm.testing.pytest_plugin import counts
from arraycomm.testing.pytest_plugin.job import END_OF_RUN, EndOfRun, Job
from arraycomm.testing.pytest_plugin.limits import GaveUp, Limit
from arraycomm.testing.pytest_plugin.outcomes import (
    Outcome,
    loaded,
    merged,
    outcome_of,
    parts_of_others,
    ranks_text,
    serialized,
    show_rank,
)
from arraycomm.testing.pytest_plugin.progress import Progress
from arraycomm.testing.pytest_plugin.quiet import (
    be_quiet,
    combine_on_rank_0,
    leave_terminal,
    share_directories,
)
from arraycomm.testing.pytest_plugin.running import TOGETHER, Running
from arraycomm.testing.pytest_plugin.selection import (
    Collected,
    difference,
    digest_of,
    names_of,
    refuse_reruns,
    without_rank,
)
from arraycomm.testing.pytest_plugin.warned import Warned
from arraycomm_pytest import fixtures_of, takes_comm

# Seconds in which the ranks come to the last step of a communicator if one of them is late.
_ENDING: Final = 5.0
_USAGE, _INTERNAL = pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR
# Seconds that a rank waits for rank 0 to end a job whose tests cannot go on.
_ABORTED: Final = 60.0

Phase = Generator[None, Any, Any]


@dataclass
class Ended:
    """How a rank has ended a test."""

    outcomes: list[Outcome]
    parts: list[Any]
    left: Left
    world_closed: bool
    is_away: bool


def _within_limit(when: str) -> Any:
    """Return the hook of a phase of the test, which it holds to the limit."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def phase(self: InStep, item: pytest.Item) -> Phase:
        __tracebackhide__ = True
        return (yield from self.limited(item, when))

    return phase


class InStep:
    """The part of the plugin that runs tests on the ranks of a job."""

    def __init__(self, config: pytest.Config, job: Job) -> None:
        self._config = config
        self._job = job
        self.rank, self.size = job.rank, job.size
        self._exchange = job.exchange
        self._usual = config.getoption("ranks") or job.size
        if self._usual > job.size:
            raise pytest.UsageError(
                f"--ranks {self._usual}: mpiexec has started {job.size} ranks; start as many, or "
                "leave --ranks out"
            )
        share_directories(config)
        if job.rank:
            be_quiet(config, job.rank)
        self._progress: Any = None
        self._limit: Any = None
        self._test: Running | None = None
        self._errors: dict[str, Any] = {}
        self._warned = Warned(config)
        config.pluginmanager.register(self._warned, "arraycomm-warnings")
        # What has ended the run on this rank before its time.
        self._why = ""
        # Whether the others know that it has ended.
        self._told = False
        # Why the tests cannot go on: a rank is stuck outside Python.
        self._stuck = False

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Let rank 0 write for all, once all plugins are configured."""
        if self.rank:
            leave_terminal(self._config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Begin to watch the ranks; let all of them have rank 0's seed of pytest-randomly."""
        option = self._config.option
        if hasattr(option, "randomly_seed"):
            option.randomly_seed = self._exchange("the seed", option.randomly_seed)[0]
            cache = getattr(self._config, "cache", None)
            if self.rank == 0 and cache is not None:
                cache.set("randomly_seed", option.randomly_seed)
        self._progress = Progress(self._job)
        self._limit = Limit(self._progress)

    # Collection

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what could not be collected, for the other ranks."""
        if report.failed:
            self._errors.setdefault(report.nodeid, serialized(self._config, report))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Phase:
        """Let rank 0 alone say what is wrong with the arguments."""
        try:
            return (yield)
        except pytest.UsageError as error:
            if self.rank:
                pytest.exit(str(error), int(_USAGE))
            raise

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Phase:
        """Run what rank 0 has chosen, in its order, if all ranks have collected the same tests."""
        before = dict(zip(names_of(items), items, strict=True))
        yield
        refuse_reruns(items)
        names = {id(item): name for name, item in before.items()}
        chosen = [names[id(item)] for item in items if id(item) in names]
        collected = Collected(digest_of(list(before)), self._errors, chosen)
        replies: list[Collected] = self._exchange("collection", collected)
        common = set(before)
        if self._report_errors(replies) or len({reply.digest for reply in replies}) > 1:
            before = without_rank(before, self.rank)
            everyones = self._exchange("what was collected", list(before))
            if not self._errors and len({*map(frozenset, everyones)}) > 1:
                raise pytest.UsageError(difference(everyones))
            common = set.intersection(*map(set, everyones))
        items[:] = [before[name] for name in replies[0].chosen if name in common]
        junit = getattr(self._config.option, "xmlpath", None)
        tests = [item.nodeid for item in items]
        self._progress.plan(tests, os.path.abspath(junit) if junit else "")

    def _report_errors(self, replies: list[Collected]) -> bool:
        """Report what other ranks could not collect; return whether there is anything."""
        for rank, reply in enumerate(replies):
            for nodeid, data in reply.errors.items():
                if nodeid not in self._errors:
                    report = loaded(self._config, data)
                    crash = getattr(report.longrepr, "reprcrash", None)
                    label = f"[rank {rank} of {self.size}]"
                    report.sections.append(("rank", label))
                    if crash is not None:
                        crash.message = f"{label} {crash.message}"
                    self._config.hook.pytest_collectreport(report=report)
        return bool(self._errors)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self) -> Phase:
        """Let rank 0 report the coverage of all ranks."""
        meet = partial(self._exchange, "the end of the tests", None)
        combine_on_rank_0(self._config, self.rank, meet)
        return (yield)

    # The phases of a test

    def communicator(self, request: pytest.FixtureRequest) -> Iterator[Communicator]:
        """Give this rank's communicator of the test."""
        test = self._test
        if test is None or not test.size:
            raise pytest.UsageError(
                f"comm: name it among the arguments of {request.node.name}; a test cannot ask for "
                "it by getfixturevalue, since the other ranks have to know of it before"
            )
        yield test.open()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: pytest.Item | None) -> bool:
        """Run a test on its ranks, and report it; the other ranks take part in the report alone."""
        size = self._size_of(item)
        if size and size not in self._job.links:
            self._exchange(f"the start of {item.nodeid}", size)
        link = self._job.links.of(size) if size else None
        if size and link is None:
            item.setup = item.runtest = _nothing
        self._test = test = Running(item, size, link, counts.timeout_of(item), self._job)
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, log=False, nextitem=nextitem)
        reports, self._test = self._agreed_reports(test), None
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _size_of(self, item: Any) -> int:
        if not takes_comm(item):
            return 0
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        size: int = parameters.get("comm", self._usual)
        # What the job does not have is skipped, and needs no communicator.
        return 0 if size > self.size else size

    pytest_runtest_setup = _within_limit("setup")
    pytest_runtest_call = _within_limit("call")
    pytest_runtest_teardown = _within_limit("teardown")

    def limited(self, item: Any, when: str) -> Phase:
        """Run a phase, and let the others know if it fails."""
        __tracebackhide__ = True
        test = self._test
        assert test is not None
        self._progress.note(f"{item.nodeid} ({when})")
        # `given` has limits of its own for each example.
        own = getattr(getattr(item, "obj", None), "has_own_limits", False)
        self._limit.begin(float("inf") if own else test.timeout + SLACK)
        try:
            try:
                result = yield
                # unittest does not raise what a method has raised.
                if caught := getattr(item, "_excinfo", None):
                    if isinstance(caught[0].value, Interruption):
                        raise caught.pop(0).value
                    self._end_by_error(test, caught[0].value)
                elif when == "call":
                    self._end_in_step(test)
            finally:
                self._limit.inside = False
        except Interruption as interruption:
            error = CommTimeoutError(
                f"rank {self.rank} did not end the {when} of the test within {test.timeout:g} "
                "s, and was interrupted"
            )
            error.place_in_test = 0  # type: ignore[attr-defined]
            test.end_communication(error)
            raise error.with_traceback(interruption.__traceback__) from None
        except BaseException as raised:
            self._end_by_error(test, raised)
            raise
        return result

    def _end_by_error(self, test: Running, raised: BaseException) -> None:
        trim(raised)
        function = getattr(test.item, "obj", None)
        draws = getattr(function, "is_hypothesis_test", False)
        # `arraycomm.testing.given` draws for all ranks, `hypothesis.given` for this one alone.
        if has_world() and draws and not hasattr(function, "set_ranks"):
            raised.add_note(
                "each rank has drawn examples of its own, which only a test that does not "
                "communicate may do: arraycomm.testing.given draws for all ranks; in place of a "
                "state machine, choose the steps in such a test, by its st.data()"
            )
        test.end_communication(raised)

    def _end_in_step(self, test: Running) -> None:
        """Hold a test that has passed here to what it does on the other ranks."""
        __tracebackhide__ = True
        if test.comm is None:
            return
        # Fixtures that take the communicator may use it at their end.
        fixtures = fixtures_of(test.item).values()
        if not is_open(test.comm) or all("comm" not in f[-1].argnames for f in fixtures):
            test.end_communication(None)
            return
        try:
            end_test(test.comm)
        except Exception as error:
            trim(error)
            error.place_in_test = 2  # type: ignore[attr-defined]
            raise

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep what happened on this rank in a phase of the test."""
        report = yield
        test = self._test
        # Inside a phase it is the report of a part of it.
        if test is not None and not self._limit.inside:
            step = 0 if test.comm is None else completed_step(test.comm)
            outcome = outcome_of(item, self.rank, report, call.excinfo, step)
            test.reports.append(report)
            test.outcomes.append(outcome)
            if report.failed:
                self._progress.report(report, outcome.order)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the failure of a subtest, which pytest reports while the test still runs."""
        self._progress.report(report)
        if self._test is not None and self._limit.inside and report.failed:
            self._test.parts.append(serialized(self._config, report))

    def _agreed_reports(self, test: Running) -> list[pytest.TestReport]:
        """Return the reports of a test, which are the same on every rank."""
        # Who waits for this rank in the world does not see that it has failed.
        tells = threading.Timer(TOGETHER, test.world.tell if test.world else _nothing)
        try:
            if test.world is not None:
                tells.start()
            self._limit.waiting = True
            left = self._leave(test)
            closed = test.world is not None or world_is_closed()
            ended = Ended(test.outcomes, test.parts, left, closed, test.is_away)
            everyone: list[Ended] = self._exchange(f"the end of {test.item.nodeid}", ended)
        except (GaveUp, pytest.exit.Exception) as error:
            # Another rank may have given up a moment earlier.
            if isinstance(error, pytest.exit.Exception) and GaveUp.__name__ not in str(error):
                raise
            return self._give_up(test)
        finally:
            tells.cancel()
            self._limit.end()
        self._start_anew(test, everyone)
        parts = [ended.parts for ended in everyone]
        outcomes = [ended.outcomes for ended in everyone]
        reports = merged(self._config, self.rank, test.reports, outcomes, parts)
        fault = fault_of([ended.left for ended in everyone[: test.size]])
        if fault and all(report.passed for report in reports):
            reports[-1].outcome, reports[-1].longrepr = "failed", fault
        return [*parts_of_others(self._config, self.rank, parts), *reports]

    def _leave(self, test: Running) -> Left:
        if test.comm is None:
            return Left()
        test.end_communication(None)
        assert test.last is not None
        # The others come when they have ended the test, or its limit has.
        in_step, clean = test.last.complete(_ENDING if test.is_late else test.timeout)
        return Left(in_step, clean, *left_behind(test.comm))

    def _start_anew(self, test: Running, everyone: list[Ended]) -> None:
        """Free the test's communicator, and replace what it has left closed."""
        if test.size:
            self._job.links.let_go(test.comm, test.size, [ended.left for ended in everyone])
        if any(ended.is_away for ended in everyone):
            self._job.come_again()
        if any(ended.world_closed for ended in everyone):
            world = test.world or leave_world("")
            together = world is not None and world.together(_ENDING)
            clean = world is None or world.complete(_ENDING)[1]
            groups = 0 if world is None else left_behind(world.comm)[3]
            replies = self._exchange("the end of the world", (together, clean, groups))
            togethers, cleans, counts_of_groups = zip(*replies, strict=True)
            if all(togethers):
                # All have failed in one place: what a module has made of the world lives on.
                revive_world()
            else:
                free = all(cleans)
                if not free and world is not None and can_take_up(counts_of_groups):
                    free = all(self._exchange("a world", take_up_rest(world.comm)))
                renew_world(free=free)

    def _give_up(self, test: Running) -> list[pytest.TestReport]:
        """Report a test that does not end on some rank, and end the run."""
        self._limit.end()
        self._stuck = True
        time.sleep(TOGETHER)
        ranks, crash, text = self._progress.stuck(test.item.nodeid)
        who = ranks_text(ranks) if ranks else "another rank"
        report = next(r for r in reversed(test.reports) if r.when != "teardown")
        report.outcome = "failed"
        report.longrepr = (
            f"{crash}{'; ' if crash else ''}{who} did not end the test within {test.timeout:g} s, "
            "and cannot be interrupted outside Python; the other ranks wait for it, and the run "
            f"ends.\n{text}"
        )
        own = next(outcome for outcome in reversed(test.outcomes) if outcome.when == report.when)
        report.sections.append((f"rank {self.rank}", own.text))
        if ranks:
            show_rank(report, f"[{who} of {self.size}]")
        test.item.session.shouldstop = f"{who} cannot be interrupted"
        return [report]

    # The end

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Keep why this rank ends the run, for the others."""
        self._why = excinfo.exconly(tryshort=True).removeprefix("_pytest.outcomes.")

    def pytest_internalerror(self, excrepr: Any, excinfo: pytest.ExceptionInfo[Any]) -> None:
        """Show what has ended the run of this rank, whose own terminal nobody sees."""
        self._why = excinfo.exconly(tryshort=True)
        if self.rank and self._progress is not None:
            self._progress.say(f"INTERNALERROR of pytest on rank {self.rank}:\n{excrepr}")

    def _tell_end(self, status: int) -> int:
        """Tell the other ranks, once, how this one ends its run; return the status of all."""
        if self._told or self._job.over or self._stuck:
            return status
        self._told = True
        if self._why:
            self._leave_run()
        end = EndOfRun(status, self._why, list(self._warned.recorded.values()))
        with suppress(pytest.exit.Exception):
            ends: list[EndOfRun] = self._exchange(END_OF_RUN, end)
            self._warned.show([other.warnings for other in ends])
            status = max(other.status for other in ends)
        return status

    def _leave_run(self) -> None:
        """End the waits of ranks that are in the same test, or already in the next one."""
        if self._test is not None:
            # No rank would forget it.
            self._test.is_away = True
            self._test.end_communication(RuntimeError(self._why))
            lasts = [self._test.last, self._test.world]
        else:
            comms = [communicator_over(link, 1.0) for link in self._job.links.kept()]
            lasts = [*(LastStep(comm, self._why) for comm in comms), leave_world(self._why)]
        for last in filter(None, lasts):
            last.complete(2 * TOGETHER)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Phase:
        """End with the same status on every rank; rank 0 gets the warnings of the others."""
        self._progress.note("the end of the run")
        session.exitstatus = self._tell_end(int(exitstatus))
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Leave once rank 0 has written all: some launchers end it when another rank has left."""
        if self._stuck:
            self._abort()
        # In place of the end of the session if this has not begun.
        error = sys.exc_info()[1]
        self._why = self._why or ("" if error is None else f"{type(error).__name__}: {error}")
        usage = isinstance(error, pytest.UsageError)
        self._tell_end(int(_USAGE if usage else _INTERNAL) if self._why else 0)
        with suppress(pytest.exit.Exception):
            self._exchange("the end of pytest", None)
        if self._progress is not None:
            self._progress.end()

    def _abort(self) -> None:
        if self.rank:
            time.sleep(_ABORTED)
        sys.stdout.flush()
        sys.stderr.flush()
        self._progress.end()
        self._job.abort()


def _nothing() -> None:
    """Take the place of a test on a rank that it does not run on."""
