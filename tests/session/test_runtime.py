"""How a world begins and ends: programs in processes of their own, so that a hang is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import lru_cache

import pytest

from tests.session import alone, worlds
from tests.support.launched import Report
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")

LIMIT = 60.0
HEAD = "import sys, time, numpy as np, arraycomm as ac\n"
MESSAGES = "from tests.support import internals; internals.refuse_shared_memory()\n"
CONTROLS = ["shared", pytest.param("messages", marks=pytest.mark.each_mpi)]


@lru_cache
def _alone() -> Report:
    return Report(run_python("-m", "tests.session.alone", timeout=LIMIT), ranks=1)


@lru_cache
def _worlds(control: str) -> Report:
    arguments = ("-m", "tests.session.worlds", control)
    return Report(run_python(*arguments, ranks=worlds.RANKS, timeout=LIMIT), worlds.RANKS)


def _launch(
    program: str, control: str = "shared", ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    """Run a program on some ranks, with the control channel in shared memory or by messages.

    Three take twice the time of two: they run where one of those that wait hears of it from another.
    """
    head = HEAD + MESSAGES * (control == "messages")
    return run_python("-c", head + textwrap.dedent(program), ranks=ranks, timeout=LIMIT)


class TestAlone:
    @pytest.mark.parametrize("check", [check.__name__ for check in alone.CHECKS])
    def test_check(self, check: str) -> None:
        _alone().assert_passed(check)

    def test_program_of_the_checks_ends_well(self) -> None:
        _alone().assert_ended_well()


@needs_mpiexec
@pytest.mark.parametrize("control", CONTROLS)
class TestWorlds:
    @pytest.mark.parametrize("check", [check.__name__ for check in worlds.CHECKS])
    def test_check(self, control: str, check: str) -> None:
        _worlds(control).assert_passed(check)

    def test_lines_of_all_ranks_are_in_order(self, control: str) -> None:
        lines = [line for line in _worlds(control).job.stdout.splitlines() if "hello" in line]
        ends = [line.split(" ", 1)[1] for line in lines]
        assert ends == [f"[{rank}/{worlds.RANKS}] hello" for rank in range(worlds.RANKS)]

    def test_closed_communicators_leave_the_status_as_it_is(self, control: str) -> None:
        _worlds(control).assert_ended_well()


# What comes before a rank raises, in what the others wait, and how many they are in all.
RAISING = {
    "at once": (3, "shared", "comm = ac.init()", "comm.allreduce(np.ones(3))"),
    "after data has moved": (
        3,
        "messages",
        "comm = ac.init(); comm.allreduce(np.ones(10**6))",
        "comm.allreduce(np.ones(3))",
    ),
    "with requests outstanding": (
        2,
        "shared",
        "comm = ac.init(); request = comm.iallreduce(np.ones(10**6))",
        "request.wait(); comm.barrier()",
    ),
    "on a duplicate that outlives the world": (
        2,
        "messages",
        "world = ac.init(); comm = world.dup(); world.free(); assert comm.allreduce(1) == comm.size",
        "comm.barrier()",
    ),
}


@needs_mpiexec
@pytest.mark.each_mpi
class TestFailing:
    """Programs that end with a status other than 0, each in a job of its own."""

    @pytest.mark.parametrize(("ranks", "control", "before", "waits"), RAISING.values(), ids=RAISING)
    def test_rank_that_raises_is_told_to_all(
        self, ranks: int, control: str, before: str, waits: str
    ) -> None:
        done = _launch(
            f"""
            {before}
            if comm.rank == 1:
                raise ValueError("on purpose")
            {waits}
            """,
            control,
            ranks,
        )
        assert done.returncode != 0
        assert done.stderr.count("PeerError: rank 1 failed") == ranks - 1, done.stderr
        # The rank's own, and one that each of the others was told.
        assert done.stderr.count("ValueError: on purpose") == ranks, done.stderr

    @pytest.mark.parametrize(
        ("ranks", "control", "leave", "said"),
        [
            (2, "shared", "sys.exit(3)", "reached the end of its program, or called sys.exit, and"),
            (3, "messages", "pass", "reached the end of its program, or called sys.exit, and"),
            (2, "shared", "from mpi4py import MPI; MPI.Finalize()", "finalized MPI and"),
        ],
    )
    def test_rank_that_leaves_early_is_told_to_all(
        self, ranks: int, control: str, leave: str, said: str
    ) -> None:
        done = _launch(
            f"""
            comm = ac.init()
            comm.barrier()
            if comm.rank == 1:
                {leave}
            else:
                comm.allreduce(np.ones(3))
            """,
            control,
            ranks,
        )
        assert done.returncode != 0
        told = done.stderr.count(f"PeerError: rank 1 has {said} takes part no more")
        assert told == ranks - 1, done.stderr

    @pytest.mark.parametrize(
        ("ranks", "control", "handled"), [(2, "shared", ()), (4, "messages", (0, 2))]
    )
    def test_uncaught_mismatch_is_printed_once_and_in_one_piece(
        self, ranks: int, control: str, handled: tuple[int, ...]
    ) -> None:
        """By the lowest rank that does not handle it. A launcher mixes what ranks write in pieces."""
        done = _launch(
            f"""
            class Pieces:
                def __getattr__(self, name):
                    return getattr(sys.__stderr__, name)
                def write(self, text):
                    sys.stdout.write(f"a piece of {{text.count(chr(10))}} lines\\n")
                    return sys.__stderr__.write(text)

            comm = ac.init()
            sys.stderr = Pieces()
            try:
                comm.allreduce(np.ones(5 + comm.rank))
            except ac.MismatchError:
                if comm.rank not in {handled}:
                    raise
            """,
            control,
            ranks,
        )
        lowest, *others = [rank for rank in range(ranks) if rank not in handled]
        assert done.returncode != 0
        assert done.stdout.count("a piece of 1 lines") == len(others), done.stdout
        assert done.stdout.count("a piece of") == 1 + len(others), done.stdout
        assert done.stderr.count("MismatchError: ranks of one communicator called") == 1
        for rank in others:
            line = f"rank {rank} of world: arraycomm.MismatchError, as printed by rank {lowest}\n"
            assert line in done.stderr, done.stderr

    def test_hook_of_the_user_is_called_with_an_uncaught_mismatch(self) -> None:
        done = _launch(
            """
            sys.excepthook = lambda kind, error, trace: print(f"mine: {error}", flush=True)
            comm = ac.init()
            comm.allreduce(np.ones(3 + comm.rank))
            """,
            "messages",
        )
        assert done.returncode != 0
        assert done.stdout.count("mine: ranks of one communicator called") == 2, done.stdout

    @pytest.mark.parametrize("wrong", ["device='cuda:0'", "timeout='soon'"])
    def test_wrong_argument_of_init_on_one_rank_ends_the_job(self, wrong: str) -> None:
        done = _launch(
            f"""
            from mpi4py import MPI
            ac.init({wrong}) if MPI.COMM_WORLD.rank == 1 else ac.init()
            """
        )
        assert done.returncode != 0
        assert "Error: " in done.stderr

    @pytest.mark.parametrize("last", ["", "ac.finalize()", "comm.free()"])
    def test_mismatch_on_a_device_that_nothing_followed_fails_the_job(self, last: str) -> None:
        """Host memory stands in for a device. The call does not wait for its header, and the program ends."""
        done = _launch(
            f"""
            from tests.support import internals
            from tests.support.device_standin import DeviceArray, devices

            class Done:
                def done(self):
                    return True

            def differ(comm):
                comm.allreduce(DeviceArray(np.ones(5)))
                link = internals.device_link(comm)
                link.alltoall = link.allgather = lambda *_: Done()
                comm.allreduce(DeviceArray(np.ones(5 + comm.rank)))

            with devices():
                comm = ac.init()
                part = comm.dup()
                differ(part)
                try:
                    part.barrier()
                except ac.MismatchError:
                    print("raised by the next call", flush=True)
                differ(comm)
                {last}
            """
        )
        assert done.returncode != 0
        whole = done.stderr.count("MismatchError: ranks of one communicator called")
        assert whole, done.stderr
        # By one that knows that the other has printed it.
        short = done.stderr.count("MismatchError, as printed by rank")
        assert whole + short == 2, done.stderr
        assert done.stdout.count("raised by the next call") == 2, done.stdout

    def test_exit_status_of_the_program_is_kept(self) -> None:
        done = _launch("ac.init().barrier(); sys.exit(3)")
        assert done.returncode == 3

    def test_timeout_names_the_missing_rank(self) -> None:
        done = _launch("""
            comm = ac.init().dup(timeout=2)
            comm.barrier()
            if comm.rank != 1:
                comm.allreduce(1.0)
            time.sleep(30)
        """)
        assert done.returncode != 0
        assert "CommTimeoutError" in done.stderr
        assert "rank 1 is missing: it was last seen in barrier" in done.stderr


@needs_mpiexec
class TestEndingWell:
    """Programs whose end has something left to do, each in a job of its own."""

    @pytest.mark.parametrize("control", CONTROLS)
    def test_requests_that_nobody_waited_for_are_completed_for_the_last_rank_too(
        self, control: str
    ) -> None:
        ranks = 2 if control == "shared" else 3
        program = """
            comm = ac.init()
            for count in (10, 10**6):
                comm.dup().iallreduce(np.ones(count))
                comm.iallreduce(np.ones(count))
            if comm.rank == comm.size - 1:
                time.sleep(1)
            print("end", flush=True)
        """
        done = _launch(program, control, ranks)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("end") == ranks
        assert "never waited for" in done.stderr

    @pytest.mark.parametrize(
        ("call", "error"),
        [
            ("comm.iallreduce(np.ones(3 + comm.rank))", "MismatchError: ranks of one"),
            ("comm.iallreduce(np.ones(3), ac.op(lambda a, b: 1 / 0))", "ZeroDivisionError: div"),
            ("comm.irecv(1) if comm.rank == 0 else None", "PeerError: rank 1 has reached the end"),
        ],
    )
    def test_errors_that_nobody_waited_for_are_printed_and_fail_the_job(
        self, call: str, error: str
    ) -> None:
        done = _launch(f"""
            comm = ac.init()
            kept = {call}
            time.sleep(0.3)
        """)
        assert done.returncode != 0
        assert "the request made at <string>:" in done.stderr
        assert "failed, and nobody waited for it:" in done.stderr
        assert error in done.stderr

    def test_error_that_a_program_has_waited_for_does_not_fail_the_job(self) -> None:
        done = _launch("""
            comm = ac.init()
            other = comm.dup()
            requests = [other.iallreduce(np.ones(3 + comm.rank)) for _ in range(2)]
            try:
                requests[0].wait()
            except ac.MismatchError:
                print(f"seen {comm.allreduce(1)}", flush=True)
        """)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("seen 2") == 2

    def test_handled_mismatch_with_finalize_on_one_rank_ends_well(self) -> None:
        done = _launch("""
            comm = ac.init()
            try:
                ac.finalize() if comm.rank == 0 else comm.allreduce(1)
            except ac.MismatchError:
                print("handled", flush=True)
        """)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("handled") == 2

    def test_finalize_on_one_rank_after_a_handled_mismatch_ends_well(self) -> None:
        program = """
            comm = ac.init()
            for broken in (comm.dup(), comm):
                try:
                    broken.allreduce(np.ones(3 + comm.rank))
                except ac.MismatchError:
                    print("handled", flush=True)
            if comm.rank == 0:
                ac.finalize()
        """
        done = _launch(program, "messages")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("handled") == 4

    @pytest.mark.parametrize("control", CONTROLS)
    def test_program_may_initialize_and_finalize_mpi_itself(self, control: str) -> None:
        done = _launch(
            f"""
            import mpi4py
            mpi4py.rc.initialize = False
            from mpi4py import MPI

            def fails(call):
                try:
                    call()
                except (ac.CommunicatorClosedError, ac.BackendUnavailableError, ValueError) as error:
                    sys.stdout.write(f"{{error}}\\n")
                    sys.stdout.flush()

            fails(ac.init)
            MPI.Init_thread()
            {MESSAGES if control == "messages" else ""}
            comm = ac.init()
            request = comm.iallreduce(np.ones(100_000))
            assert comm.allreduce(1) == 2
            MPI.Finalize()
            for call in (comm.dup, comm.barrier, lambda: comm.allreduce(np.ones(100_000))):
                fails(call)
            fails(lambda: ac.init(backend="mpi", timeout=5.0))
            assert request.wait()[0] == 2
            ac.finalize()
            fails(ac.init)
            """
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("mpi4py.rc.initialize is off") == 2, done.stdout
        assert done.stdout.count("the program has finalized MPI") == 8, done.stdout
        assert done.stdout.count("was called with timeout=") == 2, done.stdout

    def test_different_versions_are_told_to_all(self) -> None:
        done = _launch(
            """
            from mpi4py import MPI
            from arraycomm import _mpi_start

            last = MPI.COMM_WORLD.rank == 2
            own = _mpi_start.code_digest, _mpi_start._version
            if last:
                _mpi_start.code_digest, _mpi_start._version = lambda: "other", lambda: "9.9"
            for start in (ac.init, lambda: ac.Communicator.from_mpi(MPI.COMM_WORLD)):
                try:
                    start()
                except ac.MismatchError as error:
                    sys.stdout.write(f"{error}\\n")
            _mpi_start.code_digest, _mpi_start._version = own
            assert ac.init().allreduce(1) == 3
        """,
            ranks=3,
        )
        assert done.returncode == 0, done.stderr
        said = "init: ranks run different versions of arraycomm: ranks 0, 1: "
        assert done.stdout.count(said) == 6, done.stdout
        assert done.stdout.count("); rank 2: 9.9; install the same version") == 6, done.stdout

    def test_launcher_of_another_mpi_is_an_error(self) -> None:
        done = subprocess.run(
            [sys.executable, "-c", HEAD + "ac.init()"],
            env={k: v for k, v in os.environ.items() if not k.startswith("PMI")}
            | {"MPI_LOCALNRANKS": "2"},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 1
        assert "started 2 processes, but the MPI that was loaded" in done.stderr
        assert "sees 1" in done.stderr
