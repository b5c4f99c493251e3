"""`given`, on threads and under mpiexec: what fails, shrinks, and says so."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

import arraycomm as ac
from arraycomm.testing import RankValues, given, per_rank
from tests.support.launched import run_pytest
from tests.support.launcher import is_open_mpi, needs_mpiexec, run_python

PLANTED = str(Path(__file__).with_name("planted.py"))
FEW = hypothesis.settings(
    max_examples=40,
    deadline=None,
    database=None,
    derandomize=True,
    report_multiple_bugs=False,
    # Nobody reads what would be explained.
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
)

KINDS = [pytest.param(None, id="threads"), pytest.param(3, id="mpiexec", marks=needs_mpiexec)]
# Places of a failure between messages, which do not differ on processes.
ON_THREADS = (
    *("test_inside_a_collective", "test_between_collectives", "test_after_a_collective"),
    "test_one_call_more",
)
# What each kind leaves out: a fixture that fails on one rank needs processes, and a rank that is stuck
# outside Python ends a job of processes.
LEFT_OUT = {
    None: "not fixture_failed and not after_it and not in_step_again",
    3: " and ".join(f"not {name}" for name in ("outside", *ON_THREADS)),
}
# The tests after one that some ranks leave out.
IN_STEP_AGAIN = "fixture_failed or after_it or in_step_again"


@lru_cache
def _report(ranks: int | None, chosen: str = "") -> str:
    """The report of a run of the planted tests, or of those that are chosen."""
    options = ("-rA", "--hypothesis-show-statistics", "-k", chosen or LEFT_OUT[ranks])
    done = run_pytest(*options, PLANTED, ranks=ranks)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def _section(ranks: int | None, test: str) -> str:
    """What the report of rank 0 says about one test."""
    heading = rf"\n_+ (?:\w+\.)?{re.escape(test)} _+\n"
    found = re.search(rf"{heading}(.*?)\n(?:_{{20}}|={{20}})", _report(ranks), re.DOTALL)
    assert found, _report(ranks)
    return found[1]


MINIMAL = [
    ("test_before_a_collective", "ValueError: planted before", 1, 2, "x=101"),
    ("test_inside_a_collective", "TypeError: allreduce", 1, 2, "x=101"),
    ("test_between_collectives", "ValueError: planted between", 1, 2, "x=101"),
    ("test_after_a_collective", "AssertionError|assert", 1, 2, "x=101"),
    ("test_on_every_rank", "AssertionError|assert 101 <=", 0, 1, "x=101"),
    ("test_mismatch", "MismatchError: ranks of one communicator", 0, 2, "x=101"),
    ("test_one_call_more", "PeerError: rank 0 has reached the end", 1, 2, "x=101"),
    ("test_failure_in_a_part_of_the_ranks", "ValueError: planted in a part", 1, 2, "x=101"),
    ("test_requests_outstanding", "ValueError: planted under way", 1, 2, "x=1,"),
    ("test_deadlock", "CommTimeoutError: waited", 0, 2, "x=True"),
    ("test_stuck_in_python", "CommTimeoutError: waited", 0, 2, ""),
    ("test_as_many_ranks_as_there_are", "assert 3 < 3", 0, 3, ""),
]


@pytest.mark.parametrize("ranks", KINDS)
def test_failure_shrinks_to_the_smallest_example(ranks) -> None:
    for test, error, rank, count, value in MINIMAL:
        if ranks and test in ON_THREADS:
            continue
        said = _section(ranks, test)
        assert re.search(rf"^E .*({error})", said, re.MULTILINE), said
        assert f"raised on rank {rank} of {count}" in said
        assert re.search(rf"^E\s+ranks={count},", said, re.MULTILINE), said
        assert value in said
        assert "@reproduce_failure(" in said
        assert "found on " + ("threads" if ranks is None else "the processes of mpiexec") in said


@pytest.mark.parametrize("ranks", KINDS)
def test_one_call_less_shrinks_however_many_ways_it_fails(ranks) -> None:
    said = _section(ranks, "test_one_call_less")
    assert re.search(r"ranks=2,\n[E |]*x=1,", said), said


@pytest.mark.parametrize("ranks", KINDS)
def test_failures_are_shown_with_the_places_of_the_ranks(ranks) -> None:
    said = _section(ranks, "test_before_a_collective")
    assert 'raise ValueError("planted before")' in said
    assert re.search(r"^tests/testing/planted.py:\d+: ValueError", said, re.MULTILINE), said
    assert "rank 0 raised arraycomm.PeerError" in said
    said = _section(ranks, "test_deadlock")
    assert re.search(r"planted.py\D+\d+,? in test_deadlock", said), said
    assert "rank 1 raised arraycomm.CommTimeoutError: waited" in said
    said = _section(ranks, "test_stuck_in_python")
    assert "rank 1 did not end in time, and was interrupted here" in said
    assert "in test_stuck_in_python" in said
    said = _section(ranks, "test_error_that_cannot_be_sent")
    assert "UnheardOfError: quite unheard of" in said
    assert "raise _local_error()" in said


@pytest.mark.parametrize("ranks", KINDS)
def test_two_faults_are_told_apart(ranks) -> None:
    said = _section(ranks, "test_two_faults")
    assert "2 distinct failures" in said
    assert "KeyError: 'the first'" in said
    assert "IndexError: the second" in said
    assert "x=1," in said
    assert "x=20," in said


@pytest.mark.parametrize("ranks", KINDS)
def test_notes_targets_assumptions_and_events(ranks) -> None:
    said = _section(ranks, "test_notes_and_assumptions")
    assert "x=RankValues(102)" in said
    assert "mine is 102" in said
    assert "Highest target score" in said

    statistics = _report(ranks).split("Hypothesis Statistics")[1]
    for rank in range(2):
        assert f"100.00%, rank {rank} was here" in statistics


@pytest.mark.parametrize("ranks", KINDS)
def test_draws_are_shown_and_shrink(ranks) -> None:
    said = _section(ranks, "test_draws_in_step")
    for draw in ("Draw 1 (first): 101", "Draw 2 (mine): RankValues(0, 0)", "Draw 3: 0"):
        assert draw in said


@pytest.mark.parametrize("ranks", KINDS)
def test_explicit_examples_methods_fixtures_and_strides(ranks) -> None:
    said = _section(ranks, "test_explicit_examples")
    for text in ("x=7,", f"ranks={ranks or 4},", f"7 on {ranks or 4}"):
        assert text in said
    for limit in (10, 20):
        assert f"x={limit + 1}," in _section(ranks, f"test_method[{limit}]")
    said = _section(ranks, "test_negative_strides_arrive")
    for text in ("they are negative on every rank", "layout='negative'", "ranks=2,"):
        assert text in said


@pytest.mark.parametrize("ranks", KINDS)
def test_skips(ranks) -> None:
    assert "not here" in _report(ranks)
    assert "planted beside a skip" in _section(ranks, "test_failure_beside_a_skip")
    assert ("needs [64] ranks; there are 3" in _report(ranks)) == (ranks is not None)


@needs_mpiexec
@pytest.mark.each_mpi
def test_rank_stuck_outside_python_ends_the_job() -> None:
    done = run_pytest("-k", "outside", PLANTED, ranks=2, timeout=60)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "rank 1 did not end in time, and cannot be interrupted outside Python" in said
    assert "in test_stuck_outside_python" in said
    assert "The example was: test_stuck_outside_python(ranks=2)" in said


HOLDS = """
import ctypes
from arraycomm import init
from arraycomm.testing import given
from arraycomm.testing._ranks import lockstep as _lockstep
from arraycomm.testing._ranks.rank_groups import lockstep_over

# Wait in vain for shorter times than usual.
_lockstep.HOPELESS, _lockstep._LATER = 1.0, 2.0

def world():
    from mpi4py import MPI
    return MPI.COMM_WORLD

def test_of_several_groups():
    lockstep_over(init())
    lockstep_over(init().dup())

{given}
def test_holds_the_lock(comm):
    if comm.rank == 1:
        ctypes.PyDLL(None).sleep(1000)
    if {raises}:
        raise ValueError("no samples")
    comm.allreduce(1)
"""


@needs_mpiexec
@pytest.mark.parametrize(
    ("given", "raises"),
    [
        pytest.param("@given(ranks=3, timeout=0.5)", "comm.rank == 2", marks=pytest.mark.each_mpi),
        pytest.param(
            "@given(ranks=3, timeout=0.5, world=world)",
            "comm.rank != 1",
            marks=pytest.mark.at_night,
        ),
    ],
    ids=["arraycomm", "mpi4py"],
)
def test_rank_that_holds_the_lock_of_python_ends_the_job(
    given: str, raises: str, tmp_path: Path
) -> None:
    """It can neither be interrupted nor say where it is: the others do that for it, in whichever group of ranks."""
    file = tmp_path / "test_holds.py"
    file.write_text(HOLDS.format(given=given, raises=raises))
    done = run_pytest(str(file), ranks=3, timeout=100)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "rank 1 did not end the example in time, and cannot be interrupted" in said
    assert re.search(
        r'rank 1 is here:\n  File ".*test_holds.py", line \d+ in test_holds_the_lock', said
    )
    assert "ValueError: no samples" in said
    assert "The job ends. The example was: test_holds_the_lock(ranks=3)" in said


def test_thread_stuck_outside_python_is_left_behind_and_said() -> None:
    said = _section(None, "test_stuck_outside_python")
    assert "rank 1 did not end in time, and cannot be interrupted outside Python" in said
    assert "time.sleep(60)" in said


@needs_mpiexec
@pytest.mark.each_mpi
def test_ranks_that_run_different_tests_find_together_again() -> None:
    # The other tests run under one MPI only.
    report = _report(3, IN_STEP_AGAIN) if is_open_mpi() else _report(3)
    assert "ranks run different tests" in report
    assert re.search(r"PASSED .*test_in_step_again", report), report


def test_failure_is_found_again_first_and_reproduced_from_its_line() -> None:
    calls: list[tuple[int, int]] = []

    @hypothesis.settings(FEW, derandomize=False, database=InMemoryExampleDatabase())
    @given(x=st.integers(0, 10**6))
    def test(comm, x) -> None:
        calls.append((comm.size, x))
        assert comm.rank != 1 or x < 1234

    for _ in range(2):
        calls.clear()
        with pytest.raises(AssertionError) as caught:
            test()
    assert calls[0] == (2, 1234)
    [line] = [note for note in caught.value.__notes__ if "reproduce_failure" in note]
    version, blob = re.search(r"@reproduce_failure\('(.*)', (b'.*')\)", line).groups()
    again = hypothesis.reproduce_failure(version, eval(blob))(test)
    calls.clear()
    with pytest.raises(AssertionError):
        again()
    assert calls == [(2, 1234)] * 2


def test_seeds_and_settings_apply_on_either_side() -> None:
    def collect(decorate) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        @decorate
        def test(comm, x) -> None:
            if comm.rank == 0:
                seen.append((comm.size, x))

        test()
        return seen

    draw = given(x=st.integers())
    outer = collect(lambda test: FEW(hypothesis.seed(5)(draw(test))))
    inner = collect(lambda test: draw(FEW(hypothesis.seed(5)(test))))
    assert outer == inner
    assert len(outer) == FEW.max_examples


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        *(({}, {1, 2, 3, 4}), ({"ranks": 3}, {3}), ({"ranks": [2, 5]}, {2, 5})),
        ({"ranks": st.sampled_from([1, 6])}, {1, 6}),
    ],
)
def test_rank_counts_are_those_asked_for_or_up_to_four(asked, expected) -> None:
    seen: set[int] = set()

    @FEW
    @given(**asked)
    def test(comm) -> None:
        seen.add(comm.size)

    test()
    assert seen == expected


def test_each_rank_has_a_copy_of_its_own() -> None:
    @FEW
    @given(ranks=3, x=st.lists(st.integers(), min_size=1), y=per_rank(st.integers()))
    def test(comm, x, y) -> None:
        everyone = comm.allgather_object(y)
        assert everyone[comm.rank] == y
        x.append(comm.rank)
        comm.barrier()
        assert x[-1] == comm.rank

    test()


def test_target_counts_as_the_largest_of_all_ranks() -> None:
    @hypothesis.settings(max_examples=10, deadline=None, database=None)
    @hypothesis.example(ranks=3, x=RankValues(1, 5, 3))
    @given(x=per_rank(st.integers(0, 3)))
    def test(comm, x) -> None:
        hypothesis.target(float(x), label="here")
        hypothesis.target(float(comm.rank), label=f"of rank {comm.rank}")
        assert x < 5

    with pytest.raises(AssertionError):
        test()


def test_notes_that_differ_name_their_rank() -> None:
    @FEW
    @given(ranks=2)
    def test(comm) -> None:
        hypothesis.note("the same")
        hypothesis.note(f"different {comm.rank}")
        raise ValueError

    with pytest.raises(ValueError) as caught:
        test()
    for expected in ("[rank 0] different 0", "[rank 1] different 1"):
        assert expected in caught.value.__notes__


def test_draw_with_another_label_is_a_mismatch() -> None:
    @FEW
    @given(ranks=2, data=st.data())
    def test(comm, data) -> None:
        data.draw(st.integers(), label=f"of {comm.rank}")

    with pytest.raises(ac.MismatchError, match=r"draw\(of 0, .*draw\(of 1, "):
        test()


def test_draw_that_finds_nothing_ends_the_example_only() -> None:
    seen: list[int] = []

    @hypothesis.settings(FEW, suppress_health_check=list(hypothesis.HealthCheck))
    @given(ranks=2, data=st.data())
    def test(comm, data) -> None:
        first = data.draw(st.integers(0, 3))
        data.draw(st.integers().filter(lambda _: first % 2 == 0))
        comm.barrier()
        seen.append(first)

    test()
    assert seen
    assert not any(first % 2 for first in seen)


def test_value_that_cannot_be_sent_is_an_error_that_says_so() -> None:
    @FEW
    @given(x=st.just(lambda: 1))
    def test(comm, x) -> None: ...

    with pytest.raises(TypeError, match="cannot be sent to the other ranks"):
        test()


def test_function_without_comm_is_refused() -> None:
    with pytest.raises(TypeError, match="must have a parameter named comm"):

        @given()
        def test(x) -> None: ...


def test_keyboard_interrupt_in_a_rank_comes_through() -> None:
    @FEW
    @given(ranks=2)
    def test(comm) -> None:
        if comm.rank == 1:
            raise KeyboardInterrupt
        comm.barrier()

    with pytest.raises(KeyboardInterrupt):
        test()


WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = None
import arraycomm.testing
print(arraycomm.testing.run(2, lambda comm: comm.allreduce(1)))
for statement in sys.argv[1:]:
    try:
        exec(statement)
    except ImportError as error:
        print(error)
"""


def test_without_hypothesis_run_works_and_the_rest_says_how_to_install_it() -> None:
    statements = [
        "from arraycomm.testing import given",
        "from arraycomm.testing import strategies",
        "from arraycomm.testing.strategies import arrays",
        "from arraycomm.testing import per_rank",
        "from arraycomm.testing.conformance import Conformance",
    ]
    job = run_python("-c", WITHOUT_HYPOTHESIS, *statements)
    result, *errors = job.stdout.splitlines()
    assert result == "[2, 2]", job.stderr
    assert len(errors) == len(statements)
    for error in errors:
        assert error.startswith("arraycomm.testing.given")
        assert "pip install 'arraycomm[testing]'" in error
