"""How a world begins and ends: programs in processes of their own, so that a hang is a failure."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import lru_cache

import pytest

from tests.session import alone, worlds
from tests.session.launching import CONTROLS, HEAD, LIMIT, MESSAGES, launch
from tests.support.launched import Report
from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")


@lru_cache
def _alone() -> Report:
    return Report(run_python("-m", "tests.session.alone", timeout=LIMIT), ranks=1)


@lru_cache
def _worlds(control: str) -> Report:
    arguments = ("-m", "tests.session.worlds", control)
    return Report(run_python(*arguments, ranks=worlds.RANKS, timeout=LIMIT), worlds.RANKS)


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


@needs_mpiexec
class TestEndingWell:
    """Programs whose end has something left to do, each in a job of its own."""

    @pytest.mark.parametrize("control", CONTROLS)
    def test_requests_that_nobody_waited_for_are_completed_for_the_last_rank_too(
        self, control
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
        done = launch(program, control, ranks)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("end") == ranks
        assert "never waited for" in done.stderr

    @pytest.mark.parametrize(
        ("calls", "errors"),
        [
            (
                "comm.dup().iallreduce(np.ones(3 + comm.rank)), comm.iallreduce(np.ones(3), failing)",
                ["MismatchError: ranks of one", "ZeroDivisionError: div"],
            ),
            ("comm.irecv(1) if comm.rank == 0 else None", ["PeerError: rank 1 has reached the end"]),
        ],
    )  # fmt: skip
    def test_errors_that_nobody_waited_for_are_printed_and_fail_the_job(
        self, calls, errors
    ) -> None:
        done = launch(f"""
            comm, failing = ac.init(), ac.op(lambda a, b: 1 / 0)
            kept = {calls}
            time.sleep(0.3)
        """)
        assert done.returncode != 0
        for said in ("request made at <string>:", "failed, and nobody waited for it:", *errors):
            assert said in done.stderr

    def test_errors_that_a_program_has_handled_leave_its_status(self) -> None:
        """Also that of a request that nobody waits for, if another one's is the same."""
        program = """
            comm = ac.init()
            other = comm.dup()
            requests = [other.iallreduce(np.ones(3 + comm.rank)) for _ in range(2)]
            try:
                requests[0].wait()
            except ac.MismatchError:
                print(f"seen {comm.allreduce(1)}", flush=True)
            for broken in (comm.dup(), comm):
                try:
                    broken.allreduce(np.ones(3 + comm.rank))
                except ac.MismatchError:
                    print("handled", flush=True)
            if comm.rank == 0:
                ac.finalize()
            sys.exit(3)
        """
        done = launch(program, "messages")
        assert done.returncode == 3, done.stderr
        assert done.stdout.count("seen 2") == 2
        assert done.stdout.count("handled") == 4

    def test_handled_mismatch_with_finalize_on_one_rank_ends_well(self) -> None:
        done = launch("""
            comm = ac.init()
            try:
                ac.finalize() if comm.rank == 0 else comm.allreduce(1)
            except ac.MismatchError:
                print("handled", flush=True)
        """)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("handled") == 2

    @pytest.mark.each_mpi
    def test_program_may_initialize_and_finalize_mpi_itself(self) -> None:
        done = launch(f"""
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
            {MESSAGES}
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
        """)
        assert done.returncode == 0, done.stderr
        for said, times in {
            "mpi4py.rc.initialize is off": 2,
            "the program has finalized MPI": 8,
            "was called with timeout=": 2,
        }.items():
            assert done.stdout.count(said) == times, done.stdout

    def test_different_versions_are_told_to_all(self) -> None:
        done = launch(
            """
            from mpi4py import MPI
            from arraycomm._start import arguments, over_mpi

            last = MPI.COMM_WORLD.rank == 2
            own = over_mpi.seen, arguments.build
            if last:
                over_mpi.seen = lambda: "other"
                arguments.build = lambda: ("0.2.0", "other", "", "")
            for start in (ac.init, lambda: ac.Communicator.from_mpi(MPI.COMM_WORLD)):
                try:
                    start()
                except ac.MismatchError as error:
                    sys.stdout.write(f"{error}\\n")
            over_mpi.seen, arguments.build = own
            assert ac.init().allreduce(1) == 3
        """,
            ranks=3,
        )
        assert done.returncode == 0, done.stderr
        said = "versions of arraycomm, or a C part of other sources: ranks 0, 1: "
        assert done.stdout.count(said) == 6, done.stdout
        assert (
            done.stdout.count("rank 2: 0.2.0 (code other, C part none); install the same version")
            == 6
        ), done.stdout

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
