"""The part of the pytest plugin that pytest imports at every start: options, marker, fixture.

It stands outside the package, whose import takes NumPy's time, and imports the rest of the plugin
only if a test takes `comm`, or if an MPI launcher has started this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from importlib import import_module
from typing import Any, Final

import pytest

_PARTS: Final = "arraycomm.testing.pytest_plugin"
# One of these is set in every process that an MPI launcher has started.
_LAUNCHED: Final = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_RANKS: Final = pytest.StashKey[Any]()
# Set by the pytest that starts a job: where rank 0 writes which process it is, and that it has come
# to its end. Taken away, so that what a test starts does not write there.
JOB, PID, ENDED = "ARRAYCOMM_PYTEST_JOB", "pid", "ended"
_JOB: Final = os.environ.pop(JOB, "")

_MARKER: Final = (
    "ranks(*counts, timeout=None): run the test once on each of these numbers of ranks; the test, "
    "and each wait for another rank, may take `timeout` seconds"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("arraycomm", "tests on several ranks")
    group.addoption(
        "--ranks",
        type=int,
        metavar="N",
        help="how many ranks the tests that take `comm` run on if they do not say it (threads: 2; "
        "under mpiexec: all)",
    )
    group.addoption(
        "--mpiexec",
        type=int,
        metavar="N",
        help="run these tests under mpiexec, with N ranks, each a process",
    )
    group.addoption(
        "--mpiexec-per",
        choices=("file", "test"),
        help="with --mpiexec: run each file, or each test, in a job of its own, so that one that "
        "has to end takes no other with it (default: all in one job)",
    )
    group.addoption(
        "--ranks-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long a test on ranks may take, and each of its waits for another rank "
        "(default: %(default)s)",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests() -> Generator[None, None, None]:
    """Let the other ranks know if this one cannot begin."""
    try:
        yield
    except BaseException:
        if any(name in os.environ for name in _LAUNCHED):
            import_module(f"{_PARTS}.start").end_before_others()
        raise


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)
    _tell_parent(config, PID)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the process that has started this job know that the run has come to its end."""
    _tell_parent(config, ENDED)


def _tell_parent(config: pytest.Config, name: str) -> None:
    if _JOB and _rank(config) == 0:
        with open(os.path.join(_JOB, name), "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))


def _rank(config: pytest.Config) -> int:
    return getattr(config.stash.get(_RANKS, None), "rank", 0)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Take up the other ranks under an MPI launcher; start one if that is asked for."""
    _check_options(config)
    if any(name in os.environ for name in _LAUNCHED):
        import_module(f"{_PARTS}.start").take_up_ranks(config, _RANKS)
    if _JOB and config.getoption("mpiexec_per") is not None:
        import_module(f"{_PARTS}.jobs").report_to_parent(config, _JOB, _rank(config))
    if _JOB or config.getoption("mpiexec") is None:
        return None
    status: int | None = import_module(f"{_PARTS}.launching").launch(config)
    return status


def _check_options(config: pytest.Config) -> None:
    for option, least in (("ranks", 1), ("mpiexec", 1), ("ranks_timeout", 1e-3)):
        given = config.getoption(option)
        if given is not None and given < least:
            name = option.replace("_", "-")
            raise pytest.UsageError(f"--{name} must be at least {least}; got {given}")
    if config.getoption("mpiexec_per") is not None and config.getoption("mpiexec") is None:
        raise pytest.UsageError("--mpiexec-per needs the number of ranks as well: --mpiexec N")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for each number of ranks that the marker gives."""
    if takes_comm(metafunc.definition):
        most = getattr(_ranks_of(metafunc.config), "size", sys.maxsize)
        import_module(f"{_PARTS}.counts").parametrize(metafunc, most)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test without `comm` if its marker asks for another number of ranks than there are.

    Fail one whose examples, or whose fixtures, would not be those of its ranks.
    """
    _refuse_foreign(item)
    marker = item.get_closest_marker("ranks")
    counts = () if marker is None else marker.args
    set_ranks = getattr(getattr(item, "obj", None), "set_ranks", None)
    if set_ranks is not None:
        # Also without a marker: classes may share the test.
        set_ranks(counts)
        return
    if not counts or takes_comm(item):
        return
    ranks = item.config.stash.get(_RANKS, None)
    size = getattr(ranks, "size", 1)
    if size not in counts:
        wanted = " or ".join(map(str, counts))
        pytest.skip(
            f"needs the {wanted} ranks of an mpiexec, since it does not take comm; got {size}"
        )


def _refuse_foreign(item: Any) -> None:
    function, way_out = getattr(item, "obj", None), ""
    if takes_comm(item) and getattr(function, "is_hypothesis_test", False):
        way_out = "hypothesis.given draws other examples on each rank: use arraycomm.testing.given"
    elif hasattr(getattr(item, "cls", None), "assertEqual"):
        code = getattr(function, "__code__", None)
        names = () if code is None else code.co_varnames[: code.co_argcount]
        on_threads = not hasattr(item.config.stash.get(_RANKS, None), "size")
        if "comm" in names or (takes_comm(item) and on_threads):
            way_out = (
                "methods of unittest.TestCase get no fixtures of ranks: write the test as a "
                "function, or in a class without a base"
            )
    if way_out:
        pytest.fail(f"comm: {way_out}", pytrace=False)


def takes_comm(item: Any) -> bool:
    """Return whether a test takes the fixture below, and not another one of the same name."""
    found = fixtures_of(item).get("comm")
    return found is not None and found[-1].func.__module__ == __name__


def fixtures_of(item: Any) -> dict[str, Any]:
    """Return a test's fixture definitions by name, the innermost last; none for other items."""
    info = getattr(item, "_fixtureinfo", None)
    return {} if info is None else dict(info.name2fixturedefs)


def _ranks_of(config: pytest.Config) -> Any:
    """Return what runs tests on ranks: threads, unless the ranks of a job have been taken up."""
    if _RANKS not in config.stash:
        ranks = import_module(f"{_PARTS}.on_threads").OnThreads(config)
        config.stash[_RANKS] = ranks
        config.pluginmanager.register(ranks, "arraycomm-ranks")
    return config.stash[_RANKS]


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The communicator of the ranks that this test runs on: a new one for each test.

    Without mpiexec each rank is a thread, which runs the test and those of its fixtures that take
    `comm`. Under mpiexec each rank is a process, which runs all of them.
    """
    yield from _ranks_of(request.config).communicator(request)
