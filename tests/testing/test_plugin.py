"""The pytest plugin, as a user runs it: on threads, and under mpiexec; each run holds many tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest

from arraycomm.testing.pytest_plugin.selection import without_rank
from tests.support.launched import ROOT, run_pytest
from tests.support.launcher import SETTINGS, needs_mpiexec, run_python

SUITE = str(Path(__file__).with_name("plugin_suite.py"))
# Not by its entry point, which another checkout may have installed.
PLUGIN = ("-p", "no:arraycomm", "-p", "arraycomm_pytest", "--noconftest")
# For files without laws.
PLAIN = (*PLUGIN, "-p", "no:hypothesispytest")
# The ranks of MPICH keep all cores busy for as long as they are stuck.
STUCK_RANKS = pytest.mark.at_night("MPICH")
# In a directory of its own; without what takes long to import.
ELSEWHERE = ("-c", "/dev/null", "--color=no", "-p", "no:xdist", "-p", "no:jaxtyping", *PLUGIN[:-1])
ON_RANKS = [needs_mpiexec, pytest.mark.each_mpi, pytest.mark.at_night("Open MPI")]
ON_OPEN_MPI = [pytest.mark.each_mpi, STUCK_RANKS]
KINDS = [pytest.param(None, id="threads"), pytest.param(3, id="mpiexec", marks=ON_RANKS)]


class Report:
    """What a run of the suite has printed, and its JUnit file."""

    def __init__(self, job: subprocess.CompletedProcess[str], junit: str) -> None:
        self.job, self.junit = job, junit

    def outcomes(self, letter: str) -> list[str]:
        """Return the tests of the summary lines that begin with a word."""
        return re.findall(rf"^{letter}\S* \S+::(\S+)", self.job.stdout, re.MULTILINE)

    def section(self, test: str) -> str:
        """Return what the report says about one failed test."""
        heading = rf"\n_+ (?:ERROR at \w+ of )?(?:\w+\.)?{test}(?: \[[^\n]*\])? _+\n"
        found = re.search(rf"{heading}(.*?)\n(?:_{{3,}} |={{10}})", self.job.stdout, re.DOTALL)
        assert found, self.job.stdout + self.job.stderr
        return found[0]


@lru_cache
def _run(ranks: int | None) -> Report:
    with TemporaryDirectory() as directory:
        junit = Path(directory, "junit.xml")
        options = ["-rA", "-o", "junit_family=xunit1", "--hypothesis-seed=7"]
        options += [f"--junitxml={junit}", f"--basetemp={directory}/temp"]
        options += ["--ranks=3"] if ranks is None else []
        job = run_pytest(*PLUGIN, *options, SUITE, ranks=ranks)
        assert job.returncode == 1, job.stdout + job.stderr
        return Report(job, junit.read_text(encoding="utf-8"))


FAILED = {
    "test_fails_on_one_rank": ("ValueError: planted", "rank 1 of 3"),
    "test_fails_on_every_rank": ("assert 3 == 99", ""),
    "test_subtest_fails_on_one_rank": ("contains 1 failed subtest", ""),
    "test_async": ("async def functions ", ""),
    "test_mismatch": ("MismatchError: ranks of one communicator", ""),
    "test_leaves_out_a_call": ("PeerError: rank 0 has reached the end", "of 3"),
    "test_leaves_out_a_call_with_a_fixture": ("Error: ", "of 3"),
    "test_passes_unexpectedly": ("XPASS", ""),
    "test_fixture_fails_on_one_rank": ("OSError: a fixture of one rank", "rank 1 of 3"),
    "test_end_of_a_fixture_fails_on_one_rank": ("OSError: the end of a fixture", "rank 1 of 3"),
    "test_others_are_in_init_when_a_rank_fails": ("LookupError: before init", "rank 1 of 3"),
    "test_world_is_closed_by_a_failure": ("LookupError: of one process", "rank 1 of 3"),
    "test_hangs_on_one_rank": ("CommTimeoutError: ", "of 3"),
    "test_law_of_plain_mpi4py": ("x=25,", "rank 1 of 2"),
    "test_message_that_nobody_receives": ("x=6,", "rank 1 of 2"),
    "test_law": ("AssertionError: broken law", "rank 1 of 2"),
    "test_another_error_on_one_rank": ("TypeError: not expected", "rank 1 of 3"),
    "test_examples_of_each_rank": ("use arraycomm.testing.given", ""),
    "test_method_of_a_test_case": ("write the test as a function", ""),
    "test_fixture_without_comm_fails_on_one_rank": ("OSError: a fixture without comm", ""),
    "test_message_is_left": ("received 3 messages that were sent: call recv()", ""),
    "test_request_that_nobody_waits_for_fails": ("PeerError: rank 1 has reached the end", ""),
    "test_waits_for_a_message_of_a_rank_that_fails": ("ValueError: before it", "rank 1 of 3"),
    # Only processes have these.
    "test_interrupted_in_a_test_case": ("CommTimeoutError: rank ", "of 3"),
    "runTest": ("each rank has drawn examples of its own", ""),
    "test_request_is_left": ("a request of ranks 0–2 has not ended: call wait()", ""),
    "test_waits_in_the_world_for_a_rank_that_fails": ("ValueError: before it", "rank 1 of 3"),
    "test_waits_for_a_message_of_a_rank_that_has_ended": ("PeerError: rank 1 has reached", ""),
}
OF_PROCESSES = {
    *("test_others_are_in_init_when_a_rank_fails", "test_world_is_closed_by_a_failure"),
    *("test_law_of_plain_mpi4py", "runTest"),
    *("test_message_that_nobody_receives", *(name for name in FAILED if "test_waits_in" in name)),
    *(
        "test_request_is_left",
        "test_interrupted_in_a_test_case",
        "test_waits_for_a_message_of_a_rank_that_has_ended",
    ),
}


@pytest.mark.parametrize("ranks", KINDS)
def test_one_failing_test_fails_alone_and_is_reported_once_with_its_rank(ranks) -> None:
    report = _run(ranks)
    failed = {*report.outcomes("FAILED"), *report.outcomes("ERROR")}
    assert failed == set(FAILED) - (OF_PROCESSES if ranks is None else set())
    passed = {"test_after_a_failure", "test_usual_count", "test_last", "test_expects_an_error"}
    passed |= {"test_law_on_ranks_of_the_marker"}
    passed |= set() if ranks is None else {"test_communicators_were_given_back"}
    assert passed <= set(report.outcomes("PASSED"))
    assert report.outcomes("XFAIL") == ["test_expected_to_fail_on_one_rank"]
    for name in failed:
        error, rank = FAILED[name]
        said = report.section(name)
        assert error in said
        assert rank in said.splitlines()[1]
        # It fits a screen, but for what Hypothesis shows of a flaky test.
        assert len(said.splitlines()) <= 32 or name == "runTest", name
        found = re.findall(
            rf"^_+ (?:ERROR at \w+ of )?(?:\w+\.)?{name}\b", report.job.stdout, re.MULTILINE
        )
        assert len(found) == 1 + ("subtest" in name)
    assert report.job.stdout.count("short test summary info") == 1


@pytest.mark.parametrize("ranks", KINDS)
def test_subtests_and_warnings_of_other_ranks_are_reported(ranks) -> None:
    out = _run(ranks).job.stdout
    heading = r"_ test_subtest_fails_on_one_rank (?:\[rank 1 of 3\] )?\(number='?6'?\) _"
    assert len(re.findall(heading, out)) == 1
    assert len(re.findall("^E +AssertionError: only one of them", out, re.MULTILINE)) == 1
    label = "" if ranks is None else "[rank 1 of 3] "
    assert out.count(f"UserWarning: {label}said on one\n") == 1
    assert ranks is None or out.count("UserWarning: said on every rank\n") == 1


@pytest.mark.parametrize("ranks", KINDS)
def test_stacks_of_a_failure_and_of_a_hang_are_those_of_the_user(ranks) -> None:
    said = _run(ranks).section("test_fails_on_one_rank")
    assert '>           raise ValueError("planted")' in said
    assert "said by 1" in said
    assert re.search(r"ranks? 0.*raised arraycomm.PeerError: rank 1 failed", said)
    sources = re.findall(r"^(\S+):\d+: ", said, re.MULTILINE)
    assert sources == ["tests/testing/plugin_suite.py"]
    if ranks is not None:
        said = _run(ranks).section("test_others_are_in_init_when_a_rank_fails")
        assert "ranks 0, 2 raised arraycomm.PeerError: init: rank 1 does not come" in said
    hanging = _run(ranks).section("test_hangs_on_one_rank")
    assert hanging.count("in test_hangs_on_one_rank") >= 2
    assert "time.sleep(60.0 if LAUNCHED else 0.01)" in hanging
    assert "comm.barrier()" in hanging


@pytest.mark.parametrize("ranks", KINDS)
def test_ranks_of_the_marker(ranks) -> None:
    passed = [name for name in _run(ranks).outcomes("PASSED") if name.startswith("test_counts")]
    most = 7 if ranks is None else 3
    counts = [count for count in (1, 2, 7) if count <= most]
    assert passed == [f"test_counts[{count}-ranks-{x}]" for count in counts for x in (5, 6)]
    out = _run(ranks).job.stdout
    assert ("needs 7 ranks; mpiexec has started 3" in out) == (ranks is not None)
    assert "needs the 5 ranks of an mpiexec, since it does not take comm" in out
    assert "[rank 2 of 3] not here" in out


@pytest.mark.parametrize("ranks", KINDS)
def test_junit_has_each_test_once(ranks) -> None:
    suite = ET.fromstring(_run(ranks).junit)[0]
    names = [case.get("name") for case in suite.iter("testcase") if case.get("name")]
    assert names.count("test_fails_on_one_rank") == 1
    (failure,) = suite.findall("testcase[@name='test_fails_on_one_rank']/failure")
    assert failure.get("message") == "[rank 1 of 3] ValueError: planted"


def _drawn(ranks: int | None) -> list[str | None]:
    suite = ET.fromstring(_run(ranks).junit)[0]
    found = suite.findall("testcase[@name='test_seed']/properties/property")
    return [value.get("value") for value in found]


@needs_mpiexec
def test_seed_of_the_command_line_decides_what_all_ranks_get() -> None:
    assert len(_drawn(3)) == 5
    assert _drawn(3) == _drawn(None)


DIFFERENT = """
import os
import pytest

RANK = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])

@pytest.mark.parametrize("x", range(2 + RANK))
def test_x(x):
    pass
"""


@needs_mpiexec
@pytest.mark.each_mpi
def test_rank_that_collects_other_tests_ends_the_run_on_all(tmp_path) -> None:
    file = tmp_path / "test_different.py"
    file.write_text(DIFFERENT, encoding="utf-8")
    job = run_pytest(*PLAIN, str(file), ranks=2)
    assert job.returncode == pytest.ExitCode.USAGE_ERROR
    assert job.stderr.count("the ranks have collected different tests") == 1
    assert "only rank 1: " in job.stderr
    assert "test_x[2]" in job.stderr


ORDER = """
import pytest

def test_beta():
    pass

def test_alpha(comm):
    assert comm.rank != 1

def test_gamma(comm):
    raise AssertionError
"""
# The warning is that of pytest if two of its processes remove the same directory.
PROFILES = """
import warnings
import pytest
from hypothesis import settings

settings.register_profile("seven", max_examples=7)

def pytest_sessionfinish():
    warnings.warn(pytest.PytestWarning("(rm_rf) error removing /tmp/pytest-of-me"), stacklevel=1)
"""
LAWS = """
from hypothesis import Phase, settings
from hypothesis import strategies as st
from arraycomm.testing import given

@settings(phases=[Phase.reuse, Phase.generate])
@given(x=st.integers(0, 10**6))
def test_finds(comm, x):
    if comm.rank == 0:
        print("draws", x)
    assert comm.rank != 1 or x < 1234
"""
COUNT = """
from hypothesis import strategies as st
from arraycomm.testing import given

@given(x=st.integers())
def test_counts(comm, x):
    comm.barrier()
"""
EXIT = """
import pytest

def test_exit(comm):
    if comm.rank == 1:
        pytest.exit("enough", returncode=7)
    comm.barrier()
"""
RUNS = """
import sys
import pytest
from mpi4py import MPI

options = sys.argv[1:]
for more in (
    ["test_order.py", "--sw"],
    ["test_order.py", "--ff", "-x"],
    ["test_exit.py"],
    ["test_order.py", "--setup-only"],
    ["no_such_file.py"],
    ["test_laws.py"],
    ["test_laws.py", "test_count.py", "--hypothesis-profile=seven", "--hypothesis-show-statistics"],
):
    # Rank 0 alone prints, so that each status comes before what the next run prints.
    statuses = MPI.COMM_WORLD.gather(int(pytest.main([*options, *more])))
    for status in statuses or ():
        print("ends with", status)
"""


@lru_cache
def _several_runs() -> list[str]:
    """What several runs with one cache, in one job, have printed."""
    with TemporaryDirectory() as folder:
        files = {"conftest.py": PROFILES, "test_order.py": ORDER, "test_laws.py": LAWS}
        files |= {"test_count.py": COUNT, "test_exit.py": EXIT}
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        # Here the cache is part of what is tested.
        command = [*ELSEWHERE, f"--rootdir={folder}", "-o", "cache_dir=cache"]
        remover = "-Werror:(rm_rf)"
        words = ["test_order.py", "-k", "alpha or beta", "--sw"]
        alone = run_python("-m", "pytest", *command, *words, cwd=Path(folder))
        job = run_python("-c", RUNS, *command, remover, ranks=2, cwd=Path(folder))
    assert job.stderr.count("ERROR: file or directory not found: no_such_file.py") == 1
    return [alone.stdout, *job.stdout.split("test session starts")[1:]]


@needs_mpiexec
def test_last_failed_and_stepwise_and_the_first_failure_end_all_ranks() -> None:
    alone, stepwise, first_failed, *_ = _several_runs()
    assert "1 failed, 1 passed, 1 deselected" in alone
    assert "stepwise: skipping 1 already passed items" in stepwise
    assert "Interrupted: Test failed, continuing from this test next run" in stepwise
    assert stepwise.count("ends with 2") == 2
    assert "run-last-failure: rerun previous 1 failure first" in first_failed
    assert "stopping after 1 failures" in first_failed
    assert first_failed.count("ends with 1") == 2
    assert "test_gamma" not in stepwise + first_failed


@needs_mpiexec
def test_run_that_ends_early_ends_on_all_ranks_with_its_reason() -> None:
    _, _, _, ended, only_setup, no_file, *_ = _several_runs()
    assert "rank 1 has ended it in the end of test_exit.py::test_exit: Exit: enough" in ended
    assert ended.count("ends with 7") == 2
    assert "SETUP    F comm" in only_setup
    assert only_setup.count("ends with 0") == 2
    assert no_file.count("ends with 4") == 2


@needs_mpiexec
def test_profile_and_database_are_those_of_rank_0() -> None:
    *_, first, second = _several_runs()
    found = re.findall(r"^draws (\d+)", first, re.MULTILINE)
    again = re.findall(r"^draws (\d+)", second, re.MULTILINE)
    assert found[0] != found[-1] == again[0]
    # It counts where tests are imported: the first file was, before.
    assert "Stopped because settings.max_examples=7\n" in second.split("test_counts:")[1]


MODULE = """
import numpy as np
import arraycomm as ac
world = ac.init()
part = world.dup()
split = world.split(0)

def works(*comms):
    for comm in comms:
        assert comm.allreduce(1) == comm.size == ac.world().size

def test_first(): works(world, part, split)
def test_wrong_on_every_rank():
    works(part)
    assert world.size == 17
def test_after(): works(world, part, split)
def test_wrong_on_one(): assert world.rank != 1
def test_world_after(): works(world, world.dup())
def test_mismatch(): world.allreduce(np.ones(2 + world.rank))
def test_world_after_mismatch(): works(world, ac.world())
"""


@needs_mpiexec
@pytest.mark.each_mpi
def test_communicators_of_a_module_go_on_after_a_failure(tmp_path) -> None:
    """Those made from the world do if all ranks have failed in one place; the world always does."""
    file = tmp_path / "test_module.py"
    file.write_text(MODULE, encoding="utf-8")
    job = run_pytest(*PLAIN, "--mpiexec=2", "-rfE", str(file))
    failed = re.findall(r"^FAILED \S*::(\w+)", job.stdout, re.MULTILINE)
    assert failed == ["test_wrong_on_every_rank", "test_wrong_on_one", "test_mismatch"], job.stdout
    assert "was never waited for" not in job.stdout + job.stderr


def _cases(junit: Path) -> dict[str | None, list[str]]:
    """Return what the cases of a JUnit file hold."""
    cases = ET.parse(junit).iter("testcase")
    return {case.get("name"): [found.tag for found in case] for case in cases}


CRASH = """
import os

def test_fine(comm):
    pass

def test_fails(comm):
    assert comm.size == 3, "an ordinary failure"

def test_crashes(comm):
    comm.barrier()
    if comm.rank == 1:
        os._exit(3)
    comm.barrier()

def test_never(comm):
    pass
"""


@needs_mpiexec
@pytest.mark.each_mpi
def test_rank_that_dies_is_reported_with_its_test(tmp_path) -> None:
    file = tmp_path / "test_crash.py"
    file.write_text(CRASH, encoding="utf-8")
    junit = tmp_path / "reports" / "junit.xml"
    job = run_pytest(*PLAIN, "--mpiexec=2", f"--junitxml={junit}", str(file))
    assert job.returncode not in (0, None)
    # What was found before is shown and written, also under a launcher that forwards nothing more.
    assert "AssertionError: an ordinary failure" in job.stderr
    assert "1 passed or skipped, 1 failed, 2 not run or not ended" in job.stderr
    assert re.search(r"  \S*test_crash.py::test_never\n", job.stderr)
    assert _cases(junit) == {
        "test_fine": [],
        "test_fails": ["failure"],
        "test_crashes": ["error"],
        "test_never": ["skipped"],
    }
    assert re.search(
        r"rank 1 \(process \d+\) died in \S*test_crash.py::test_crashes \(call\)", job.stderr
    )


STUCK = """
def test_stuck(comm):
    from mpi4py import MPI

    if comm.rank == 1:
        MPI.COMM_WORLD.recv(source=0, tag=77)
    comm.barrier()

def test_never():
    pass
"""


@needs_mpiexec
@pytest.mark.each_mpi
@STUCK_RANKS
def test_rank_stuck_outside_python_ends_the_run_with_its_stack(tmp_path) -> None:
    file = tmp_path / "test_stuck.py"
    file.write_text(STUCK, encoding="utf-8")
    job = run_pytest(*PLAIN, "--ranks-timeout=3", str(file), ranks=3)
    assert job.returncode not in (0, None)
    assert "rank 1 did not end the test within 3 s" in job.stdout
    assert re.search(r"line 6, in test_stuck\n\s+MPI.COMM_WORLD.recv", job.stdout)
    assert "1 failed" in job.stdout


ALONE = """
import os
from mpi4py import MPI

def test_fails_while_others_are_in_mpi():
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("of one rank")
    MPI.COMM_WORLD.barrier()
"""


@needs_mpiexec
@pytest.mark.each_mpi
@STUCK_RANKS
def test_failure_of_one_rank_is_shown_if_the_others_are_stuck_in_mpi(tmp_path) -> None:
    """Rank 0 among them, which has no report any more."""
    file, junit = tmp_path / "test_alone.py", tmp_path / "junit.xml"
    file.write_text(ALONE, encoding="utf-8")
    options = ("--ranks-timeout=2", f"--junitxml={junit}")
    job = run_pytest(*PLAIN, *options, str(file), ranks=3)
    assert job.returncode not in (0, None)
    assert job.stderr.count('raise ValueError("of one rank")') == 1
    for rank in (0, 2):
        assert f"rank {rank} is here:" in job.stderr
    (case,) = ET.parse(junit).iter("testcase")
    assert [found.get("message") for found in case] == ["[rank 1] ValueError: of one rank"]


HOOKS = """
import os

RANK = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
WAY = os.environ["WAY"]

def fail_on_rank_1(way):
    if RANK == "1" and way == WAY:
        raise RuntimeError(f"in {way}")

def pytest_configure(): fail_on_rank_1("configure")
def pytest_sessionstart(): fail_on_rank_1("sessionstart")
def pytest_runtest_logreport(): fail_on_rank_1("logreport")

fail_on_rank_1("import")
"""
WAITS = """
def test_one(comm): comm.barrier()
def test_two(comm): comm.recv((comm.rank + 1) % comm.size)
"""


@needs_mpiexec
@pytest.mark.each_mpi
@STUCK_RANKS
@pytest.mark.parametrize(
    ("way", "plugin", "status"),
    [
        ("import", "conftest", 4),
        # That rank's own is another one, and the launcher's may be that of any, or all their bits.
        ("import", "plugin", None),
        ("sessionstart", "conftest", 3),
        ("logreport", "plugin", 3),
    ],
)
def test_error_of_a_plugin_on_one_rank_ends_all(way, plugin, status, tmp_path, monkeypatch) -> None:
    (tmp_path / "test_waits.py").write_text(WAITS, encoding="utf-8")
    (tmp_path / f"{plugin}.py").write_text(HOOKS, encoding="utf-8")
    monkeypatch.setenv("WAY", way)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    command = ["-m", "pytest", *ELSEWHERE, "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    command += ["-p", "plugin"] if plugin == "plugin" else []
    job = run_python(*command, "test_waits.py", ranks=3, cwd=tmp_path)
    assert job.returncode == status or (status is None and job.returncode), job.stdout + job.stderr
    assert f"in {way}" in job.stdout + job.stderr
    # Unless the launcher has killed the rank that made it.
    assert status is None or not [*tmp_path.glob("arraycomm-pytest-*")]


ENDS = """
import os

def test_before(comm): pass
def test_exits(comm):
    comm.barrier()
    os._exit(0)
def test_fails(comm): assert comm.size == 99
"""


@needs_mpiexec
@pytest.mark.parametrize("per", [None, "file", pytest.param("test", marks=ON_OPEN_MPI)])
def test_job_that_ends_takes_nothing_else_with_it(per, tmp_path) -> None:
    """Each file, or each test, in a job of its own; a job that says nothing has not ended well."""
    (tmp_path / "test_ends.py").write_text(ENDS, encoding="utf-8")
    (tmp_path / "test_other.py").write_text("def test_other(comm): pass", encoding="utf-8")
    options = [] if per is None else [f"--mpiexec-per={per}", f"--junitxml={tmp_path}/junit.xml"]
    files = [f"{tmp_path}/test_ends.py", f"{tmp_path}/test_other.py"]
    job = run_pytest(*PLAIN, "--mpiexec=2", *options, *files[: 1 if per is None else 2])
    assert job.returncode == 1, job.stdout + job.stderr
    if per is None:
        return
    assert "2 failed, 2 passed" in job.stdout
    assert job.stdout.count("the job ended with status 1 in this test:") == 1
    ends = {"test_before": [], "test_exits": ["failure"]}
    ends |= {"test_fails": ["failure"], "test_other": []}
    assert _cases(tmp_path / "junit.xml") == ends


HALVES = """
def pytest_collection_modifyitems(items):
    del items[(len(items) + 1) // 2 :]
"""


@needs_mpiexec
def test_job_that_leaves_out_a_test_fails_it(tmp_path, monkeypatch) -> None:
    """A hook that halves the tests halves those of each job again; paths may be an ini file's."""
    # It is a launcher's only process, as in a shell of srun.
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    tests = (f"def test_{number}(comm): pass" for number in range(4))
    (tmp_path / "test_part.py").write_text("\n".join(tests), encoding="utf-8")
    (tmp_path / "conftest.py").write_text(HALVES, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = test_part.py\n", encoding="utf-8")
    options = ("-m", "pytest", "--color=no", "--mpiexec=2", "--mpiexec-per=file")
    job = run_python(*options, "-p", "no:arraycomm", "-p", "arraycomm_pytest", cwd=tmp_path)
    assert "1 failed, 1 passed in" in job.stdout, job.stdout + job.stderr
    assert "test_1 - the job of this test has left it out" in job.stdout


WAITING = """
import os, time

def test_fails(comm): assert comm.size == 99, "before the signal"
def test_waits(comm):
    open(f"{os.path.dirname(__file__)}/pid-{comm.rank}-{os.getpid()}", "w").close()
    if comm.rank:
        comm.barrier()
    time.sleep(300)
"""


@needs_mpiexec
@pytest.mark.each_mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_ends_the_ranks_and_loses_no_failure(number, tmp_path) -> None:
    file = tmp_path / "test_waiting.py"
    file.write_text(WAITING, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", *PLAIN, "-p", "no:cacheprovider", "--color=no"]
    with (
        (tmp_path / "out").open("w") as out,
        subprocess.Popen(
            [*command, "--mpiexec=2", str(file)],
            cwd=ROOT,
            env=os.environ | SETTINGS,
            stdout=out,
            stderr=out,
        ) as job,
    ):
        deadline = time.monotonic() + 100
        while len(pids := [int(path.name.split("-")[2]) for path in tmp_path.glob("pid-*")]) < 2:
            assert time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.1)
        job.send_signal(number)
        status = job.wait(100)
    assert (
        status == {signal.SIGINT: 2, signal.SIGTERM: 128 + number, signal.SIGKILL: -number}[number]
    )
    assert number != signal.SIGINT or "\nFAILED " in (tmp_path / "out").read_text()
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    # What prints it after SIGTERM is a process of its own.
    while "before the signal" not in (tmp_path / "out").read_text():
        assert time.monotonic() < deadline, (tmp_path / "out").read_text()
        time.sleep(0.1)


def test_names_with_the_rank_are_those_of_rank_0() -> None:
    names = ["a.py::test_x[1] [Rank 1]", "a.py::test_rank1", "a.py::test_y[Rank 1]"]
    items = {name: SimpleNamespace(nodeid=name, _nodeid=name) for name in names}
    found = without_rank(items, 1)
    assert list(found) == ["a.py::test_x[1] [Rank 0]", "a.py::test_rank1", "a.py::test_y[Rank 0]"]
    assert [item._nodeid for item in items.values()] == list(found)


REFUSED = """
import os
import pytest

print(pytest.main(["-p", "no:arraycomm", "-p", "arraycomm_pytest", "--ranks=0"]))
os.environ["PMI_SIZE"] = "2"
print(pytest.main(["-p", "no:arraycomm", "-p", "arraycomm_pytest", "-n", "2"]))

class Reruns:
    def pytest_addoption(self, parser):
        parser.addoption("--reruns", type=int)

arguments = ["-p", "no:arraycomm", "-p", "arraycomm_pytest", "--reruns=2"]
print(pytest.main(arguments, plugins=[Reruns()]))
"""


def test_what_cannot_be_is_refused(tmp_path) -> None:
    pytest.importorskip("xdist")
    job = run_python("-c", REFUSED, cwd=tmp_path)
    assert job.stdout.split() == 3 * [str(pytest.ExitCode.USAGE_ERROR)]
    assert "--ranks must be at least 1; got 0" in job.stderr
    assert "pytest-xdist cannot be used under mpiexec" in job.stderr
    assert "--reruns cannot be used under mpiexec" in job.stderr


# As pytest-randomly and pytest-rerunfailures begin.
OTHERS = """
import random

def pytest_addoption(parser):
    parser.addoption("--randomly-seed", type=int)
    parser.addoption("--reruns", type=int)

def pytest_configure(config):
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures")
    config.option.randomly_seed = random.Random().getrandbits(32)
"""
SEEDED = """
import pytest

def test_seed(comm, request):
    assert len(set(comm.allgather_object(request.config.option.randomly_seed))) == 1
"""
AGAIN = "@pytest.mark.flaky(reruns=2)\ndef test_again(comm): pass\n"


@needs_mpiexec
def test_ranks_have_one_seed_and_none_runs_a_test_again(tmp_path) -> None:
    (tmp_path / "others.py").write_text(OTHERS)
    (tmp_path / "test_it.py").write_text(SEEDED + AGAIN)
    command = ("-m", "pytest", *ELSEWHERE, "-p", "others", "test_it.py")
    assert (
        "1 passed, 1 deselected"
        in run_python(*command, "-m", "not flaky", ranks=2, cwd=tmp_path).stdout
    )
    said = run_python(*command, ranks=2, cwd=tmp_path).stderr
    assert "the marker flaky of test_it.py::test_again cannot be used under mpiexec" in said


COVERED = """
def test_covered(comm):
    if comm.rank == 1:
        comm.size
    else:
        comm.rank
"""
LATE = """
import os
import time
import pytest

@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop():
    yield
    if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
        time.sleep(0.5)
    return True
"""


@needs_mpiexec
def test_coverage_is_that_of_all_ranks(tmp_path) -> None:
    """By pytest-cov, and by coverage, whose files are combined."""
    coverage = pytest.importorskip("coverage")
    pytest.importorskip("pytest_cov")
    file = tmp_path / "test_covered.py"
    options = [*ELSEWHERE, "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    file.write_text(COVERED, encoding="utf-8")
    command = ["-m", "coverage", "run", "--parallel-mode", "--include=test_*", "-m", "pytest"]
    assert run_python(*command, *options, file.name, ranks=2, cwd=tmp_path).returncode == 0
    data = coverage.Coverage(data_file=tmp_path / ".coverage")
    data.combine([str(tmp_path)])
    assert data.analysis2(str(file))[3] == []
    (tmp_path / ".coverage").unlink(missing_ok=True)

    # Rank 1 saves last.
    (tmp_path / "conftest.py").write_text(LATE, encoding="utf-8")
    wanted = ["--cov=.", "--cov-report=term", "--cov-fail-under=100", file.name]
    job = run_python("-m", "pytest", *options, *wanted, ranks=2, cwd=tmp_path)
    assert job.returncode == 0, job.stdout + job.stderr
    assert len(re.findall(r"^test_covered.py .* 100%$", job.stdout, re.MULTILINE)) == 1
    assert {path.name for path in tmp_path.glob(".coverage*")} == {".coverage"}


def test_plugin_imports_little_if_it_is_not_used(tmp_path) -> None:
    file = tmp_path / "test_plain.py"
    file.write_text(
        "import sys\ndef test_plain():\n"
        "    assert {'numpy', 'mpi4py', 'hypothesis', 'jax', 'arraycomm'}.isdisjoint(sys.modules)",
        encoding="utf-8",
    )
    options = (*ELSEWHERE, "-p", "no:hypothesispytest", "-p", "no:cacheprovider")
    job = run_python("-m", "pytest", *options, str(file), cwd=tmp_path)
    assert job.returncode == 0, job.stdout


@needs_mpiexec
def test_report_in_the_documentation_is_what_pytest_prints(tmp_path) -> None:
    document = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    parts = re.findall(r"test_average.py -->\n```\w+\n(.*?)```", document, re.DOTALL)
    code, shown = parts
    (tmp_path / "test_average.py").write_text(code, encoding="utf-8")
    command = ("-m", "pytest", "-q", *ELSEWHERE, "-p", "no:cacheprovider")
    job = run_python(*command, "test_average.py", ranks=3, cwd=tmp_path)
    assert re.sub(r"in \S+s", "", job.stdout) == re.sub(r"in \S+s", "", shown)


def test_ranks_run_tests_where_the_kernel_has_no_pidfds(monkeypatch) -> None:
    from arraycomm.testing.pytest_plugin.progress import Progress

    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    job = SimpleNamespace(rank=0, near={0: os.getpid()}, exchange=lambda _, made: [made])
    progress = Progress(job)
    progress.plan(["test"], "")
    assert not progress.is_stuck()
    progress.end()
