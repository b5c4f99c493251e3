"""How a world begins and ends: programs in processes of their own, so that a hang is a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time

import pytest

from tests.launcher import LAUNCHED, needs_mpiexec, run_python

LIMIT = 60.0
HEAD = "import sys, time, numpy as np, arraycomm as ac\n"


def _alone(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_COMM", "ARRAYCOMM"))
    }
    return subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=clean | environment,
        check=False,
    )


def _on_three(program: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", HEAD + textwrap.dedent(program), ranks=3, timeout=LIMIT)


def _messages(program: str) -> str:
    """The same program with the board that travels, as between nodes."""
    prelude = """
    import arraycomm._transports.mpi as mpi
    mpi._shared_memory = lambda *_: None
    """
    return textwrap.dedent(prelude) + textwrap.dedent(program)


class TestAlone:
    def test_one_process_needs_no_mpi(self) -> None:
        done = _alone("""
            comm = ac.init()
            assert (comm.backend, comm.rank, comm.size, comm.device) == ("self", 0, 1, "cpu")
            assert comm.mpi_comm is None
            assert comm.allreduce(np.arange(3.0), "mean").tolist() == [0, 1, 2]
            assert comm.split(3).dup().bcast_object("x") == "x"
            assert "mpi4py" not in sys.modules
        """)
        assert done.returncode == 0, done.stderr

    def test_init_is_idempotent_and_compares_what_is_passed(self) -> None:
        done = _alone("""
            assert not ac.is_initialized()
            try:
                ac.world()
            except ac.NotInitializedError as error:
                print(error)
            comm = ac.init(timeout=7)
            assert ac.init() is ac.init("auto", timeout=7) is ac.init("self") is ac.world() is comm
            for arguments in ({"timeout": 8}, {"check": False}, {"backend": "mpi"}):
                try:
                    ac.init(**arguments)
                except ValueError as error:
                    print(error)
            ac.finalize()
            assert not ac.is_initialized()
            assert ac.init(timeout=8).allreduce(1) == 1
            try:
                comm.barrier()
            except ac.CommunicatorClosedError as error:
                print(error)
        """)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert "call arraycomm.init() first" in lines[0]
        assert "timeout=7 before; got 8" in lines[1]
        assert "check=True before; got False" in lines[2]
        assert "backend 'self' before; got 'mpi'" in lines[3]
        assert "finalized" in lines[4]

    def test_environment_sets_the_defaults(self) -> None:
        program = "comm = ac.init(); print(comm._options.timeout, comm._options.check)"
        assert _alone(program).stdout.split() == ["1800.0", "True"]
        done = _alone(program, ARRAYCOMM_TIMEOUT="2.5", ARRAYCOMM_CHECK="0")
        assert done.stdout.split() == ["2.5", "False"]
        assert _alone(program, ARRAYCOMM_TIMEOUT="none").stdout.split() == ["None", "True"]
        assert "ARRAYCOMM_TIMEOUT must be" in _alone(program, ARRAYCOMM_TIMEOUT="soon").stderr

    def test_what_cannot_run_says_what_is_missing(self) -> None:
        for call, message in (
            ("ac.init('nccl')", "BackendUnavailableError: init: backend 'nccl' cannot be had: "),
            ("ac.init('threads')", "arraycomm.testing.run"),
            ("ac.init('gloo')", "backend must be one of auto, self, mpi"),
            ("ac.init(device='cuda:0')", "init: device 'cuda:0' cannot be had: "),
            ("ac.init(device=0)", "TypeError: init: device must be"),
        ):
            done = _alone(call)
            assert done.returncode == 1
            assert message in done.stderr

    def test_torchrun_is_told_what_to_do(self) -> None:
        done = _alone("ac.init()", TORCHELASTIC_RUN_ID="1", WORLD_SIZE="2", RANK="0")
        assert "torchrun started 2 processes" in done.stderr
        assert "mpiexec -n 2 python" in done.stderr

    def test_println_before_init_prints_at_once(self) -> None:
        assert _alone("ac.println('a', 1)").stdout == "a 1\n"

    def test_forked_child_is_refused(self) -> None:
        done = _alone("""
            import os
            comm = ac.init()
            from arraycomm import _session
            _session._state.roots.append(comm)
            _session._watch_exit()
            child = os.fork()
            if child == 0:
                try:
                    comm.barrier()
                except ac.CommunicatorClosedError as error:
                    print(error, flush=True)
                sys.exit(5)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 5
            comm.barrier()
        """)
        assert done.returncode == 0, done.stderr
        assert "a forked process cannot use" in done.stdout


@needs_mpiexec
class TestUnderMpiexec:
    def test_world_is_the_whole_job(self) -> None:
        done = _on_three("""
            comm = ac.init()
            assert comm.backend == "mpi" and comm.size == 3
            assert comm.mpi_comm.size == 3
            assert comm.allreduce(comm.rank) == 3
            assert (comm.local_rank, comm.local_size) == (comm.rank, 3)
            ac.println("hello")
        """)
        assert done.returncode == 0, done.stderr
        ends = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
        assert ends == [f"[{rank}/3] hello" for rank in range(3)]

    @pytest.mark.parametrize(
        ("wrong", "raised"),
        [
            ({"timeout": -1}, "ValueError: timeout must be positive"),
            ({"check": 1}, "TypeError: check must be True or False"),
            ({"device": 0}, "TypeError: init: device must be"),
        ],
    )
    def test_wrong_argument_to_from_mpi_on_one_rank_raises_on_all(self, wrong, raised) -> None:
        done = _on_three(f"""
            from mpi4py import MPI
            given = MPI.COMM_WORLD
            try:
                ac.Communicator.from_mpi(given, **({wrong!r} if given.rank == 1 else {{}}))
            except Exception as error:
                print(f"{{type(error).__name__}}: {{error}}")
            assert ac.Communicator.from_mpi(given).allreduce(1) == 3
        """)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(raised) == 3
        assert done.stdout.count("PeerError: init: rank 1 raised instead of taking part") == 2

    def test_from_mpi_leaves_the_world_and_the_given_communicator_alone(self) -> None:
        done = _on_three("""
            from mpi4py import MPI
            given = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank == 0)
            with ac.Communicator.from_mpi(given, timeout=30) as comm:
                assert comm.size == given.size
                assert comm.allreduce(1) == given.size
            assert not ac.is_initialized()
            assert given.allreduce(1) == given.size
            given.Free()
        """)
        assert done.returncode == 0, done.stderr

    def test_finalize_frees_and_init_begins_again(self) -> None:
        done = _on_three("""
            for _ in range(3):
                comm = ac.init()
                part = comm.split(comm.rank % 2).dup()
                assert comm.iallreduce(1).wait() == 3
                ac.finalize()
                assert not ac.is_initialized()
        """)
        assert done.returncode == 0, done.stderr

    @pytest.mark.parametrize("control", ["shared", "messages"])
    @pytest.mark.parametrize("before", ["", "comm.allreduce(np.ones(10**6))"])
    def test_rank_that_raises_is_told_to_all(self, control: str, before: str) -> None:
        program = f"""
            comm = ac.init()
            {before}
            if comm.rank == 1:
                raise ValueError("on purpose")
            comm.allreduce(np.ones(3))
        """
        done = _on_three(_messages(program) if control == "messages" else program)
        assert done.returncode != 0
        assert done.stderr.count("PeerError: rank 1 failed") == 2
        assert "ValueError: on purpose" in done.stderr

    @pytest.mark.parametrize("control", ["shared", "messages"])
    @pytest.mark.parametrize("leave", ["sys.exit(0)", "pass"])
    def test_rank_that_leaves_early_is_told_to_all(self, control: str, leave: str) -> None:
        program = f"""
            comm = ac.init()
            comm.barrier()
            if comm.rank == 1:
                {leave}
            else:
                comm.allreduce(np.ones(3))
        """
        done = _on_three(_messages(program) if control == "messages" else program)
        assert done.returncode != 0
        assert done.stderr.count("PeerError: rank 1 has reached the end of its program") == 2

    @pytest.mark.parametrize("control", ["shared", "messages"])
    def test_uncaught_mismatch_is_printed_by_every_rank(self, control: str) -> None:
        program = """
            comm = ac.init()
            comm.allreduce(np.ones(3 + (comm.rank == 2)))
        """
        done = _on_three(_messages(program) if control == "messages" else program)
        assert done.returncode != 0
        assert done.stderr.count("MismatchError: ranks of one communicator called") == 3

    def test_error_is_printed_in_one_piece(self) -> None:
        """A launcher mixes what its ranks write in several."""
        done = _on_three("""
            class Pieces:
                def __getattr__(self, name):
                    return getattr(sys.__stderr__, name)
                def write(self, text):
                    print(f"a piece of {text.count(chr(10))} lines", flush=True)

            comm = ac.init()
            sys.stderr = Pieces()
            comm.allreduce(np.ones(5 + comm.rank))
        """)
        assert done.returncode != 0
        assert done.stdout.count("a piece of") == 3, done.stdout

    @pytest.mark.parametrize("control", ["shared", "messages"])
    def test_handled_mismatch_ends_well(self, control: str) -> None:
        program = """
            comm = ac.init()
            for broken in (comm.dup(), comm):
                try:
                    broken.allreduce(np.ones(3 + (comm.rank == 2)))
                except ac.MismatchError:
                    print("handled")
        """
        done = _on_three(_messages(program) if control == "messages" else program)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("handled") == 6

    @pytest.mark.parametrize("control", ["shared", "messages"])
    def test_last_rank_may_take_its_time(self, control: str) -> None:
        program = """
            comm = ac.init()
            comm.barrier()
            if comm.rank == 2:
                time.sleep(2)
            print("end")
        """
        done = _on_three(_messages(program) if control == "messages" else program)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("end") == 3

    def test_failure_with_requests_outstanding_ends_the_job(self) -> None:
        started = time.monotonic()
        done = _on_three("""
            comm = ac.init()
            request = comm.iallreduce(np.ones(10**6))
            if comm.rank == 1:
                raise ValueError("on purpose")
            request.wait()
            comm.barrier()
        """)
        assert time.monotonic() - started < 30
        assert done.returncode != 0
        assert done.stderr.count("PeerError: rank 1 failed") == 2

    @pytest.mark.parametrize("control", ["shared", "messages"])
    @pytest.mark.parametrize("count", [10, 1_000_000])
    def test_request_that_nobody_waited_for_is_completed_at_the_end(
        self, control: str, count: int
    ) -> None:
        program = f"""
            comm = ac.init()
            comm.dup().iallreduce(np.ones({count}))
            comm.iallreduce(np.ones({count}))
        """
        done = _on_three(_messages(program) if control == "messages" else program)
        assert done.returncode == 0, done.stderr
        assert "never waited for" in done.stderr or count == 10

    def test_finalize_completes_requests_of_duplicates_first(self) -> None:
        done = _on_three("""
            comm = ac.init()
            out = np.empty(10**6)
            request = comm.dup().iallreduce(np.ones(10**6), out=out)
            ac.finalize()
            assert (out == 3).all()
        """)
        assert done.returncode == 0, done.stderr

    def test_finalize_on_one_rank_only_is_a_mismatch_that_ends(self) -> None:
        done = _on_three("""
            comm = ac.init()
            try:
                ac.finalize() if comm.rank == 0 else comm.allreduce(1)
            except ac.MismatchError:
                print("handled")
        """)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("handled") == 3

    def test_finalize_on_one_rank_after_a_handled_mismatch_ends(self) -> None:
        done = _on_three("""
            comm = ac.init()
            try:
                comm.allreduce(np.ones(2 + (comm.rank == 1)))
            except ac.MismatchError:
                print("handled")
            if comm.rank == 0:
                ac.finalize()
        """)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("handled") == 3

    def test_duplicate_outlives_the_world_and_is_watched(self) -> None:
        done = _on_three("""
            comm = ac.init()
            other = comm.dup()
            comm.free()
            assert other.allreduce(1) == 3
            if comm.rank == 0:
                raise ValueError("on purpose")
            other.barrier()
        """)
        assert done.returncode != 0
        assert done.stderr.count("PeerError: rank 0 failed") == 2

    @pytest.mark.parametrize(
        "wrong", ["device='cuda:0'", "timeout='soon'", "backend='nccl'", "check=3"]
    )
    def test_wrong_argument_of_init_on_one_rank_ends_the_job(self, wrong: str) -> None:
        done = _on_three(f"""
            from mpi4py import MPI
            ac.init({wrong}) if MPI.COMM_WORLD.rank == 1 else ac.init()
        """)
        assert done.returncode != 0
        assert "Error: " in done.stderr

    @pytest.mark.parametrize("control", ["shared", "messages"])
    def test_handled_error_within_a_duplicate_ends_well(self, control: str) -> None:
        program = """
            comm = ac.init()
            try:
                with comm.dup() as inner:
                    raise KeyError
            except KeyError:
                pass
            assert comm.allreduce(1) == 3
        """
        done = _on_three(_messages(program) if control == "messages" else program)
        assert done.returncode == 0, done.stderr

    def test_exit_status_of_the_program_is_kept(self) -> None:
        done = _on_three("""
            comm = ac.init()
            comm.barrier()
            sys.exit(3)
        """)
        assert done.returncode == 3

    def test_hook_of_the_user_is_called(self) -> None:
        done = _on_three("""
            sys.excepthook = lambda *_: print("mine", flush=True)
            comm = ac.init()
            raise ValueError
        """)
        assert done.returncode != 0
        assert done.stdout.count("mine") == 3

    def test_mpi_without_room_for_a_communicator_is_told_what_to_do(self) -> None:
        done = _on_three("""
            from mpi4py import MPI
            comm = ac.init()

            class Full:
                def Split(self, *_):
                    raise MPI.Exception(MPI.ERR_OTHER)

            usual, comm._link.mpi_comm = comm._link.mpi_comm, Full()
            try:
                comm.dup()
            except ac.TransportError as error:
                print(error)
            comm._link.mpi_comm = usual
            assert comm.allreduce(1) == 3
        """)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("free() those that are no longer used") == 3

    @pytest.mark.parametrize("control", ["shared", "messages"])
    def test_rank_that_closed_a_communicator_alone_and_went_on_ends_with_the_others(
        self, control: str
    ) -> None:
        """It is interrupted before it takes part in anything, so that nobody learns of it in a step."""
        program = """
            class Interrupted:
                @property
                def __array_interface__(self):
                    raise KeyboardInterrupt

            part = ac.init().dup()
            if part.rank == 1:
                try:
                    part.allreduce(Interrupted())
                except KeyboardInterrupt as error:
                    print(repr(part))
            ac.world().barrier()
        """
        done = _on_three(_messages(program) if control == "messages" else program)
        assert done.returncode == 0, done.stderr
        assert "rank 1 of 3, closed>" in done.stdout

    @pytest.mark.parametrize("last", ["", "comm.barrier()", "ac.finalize()", "comm.free()"])
    def test_mismatch_on_a_device_that_nothing_followed_fails_the_job(self, last: str) -> None:
        """Host memory stands in for a device: the call goes ahead of its header, and the program ends."""
        program = f"""
            from tests.collectives.standin import DeviceArray, devices

            class Done:
                def done(self):
                    return True

            with devices():
                comm = ac.init()
                comm.allreduce(DeviceArray(np.ones(5)))
                link = comm._devices.link
                link.alltoall = link.allgather = lambda *_: Done()
                comm.allreduce(DeviceArray(np.ones(5 + comm.rank)))
                {last}
        """
        done = _on_three(program)
        assert done.returncode != 0
        assert done.stderr.count("MismatchError: ranks of one communicator called") == 3, (
            done.stderr
        )

    @pytest.mark.parametrize("control", ["shared", "messages"])
    def test_program_may_finalize_mpi_itself(self, control: str) -> None:
        program = """
            from mpi4py import MPI
            comm = ac.init()
            request = comm.iallreduce(np.ones(100_000))
            assert comm.allreduce(1) == 3
            MPI.Finalize()
            for call in (comm.dup, comm.barrier, lambda: comm.allreduce(np.ones(100_000))):
                try:
                    call()
                except ac.CommunicatorClosedError as error:
                    print(error)
            try:
                ac.init(backend="mpi", timeout=5.0)
            except (ValueError, ac.BackendUnavailableError) as error:
                print(error)
            assert request.wait()[0] == 3
        """
        done = _on_three(_messages(program) if control == "messages" else program)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("the program has finalized MPI") == 9

    def test_mpi_that_is_over_or_has_not_begun_is_an_error(self) -> None:
        for program, said in (
            ("from mpi4py import MPI; MPI.Finalize()", "the program has finalized MPI"),
            ("import mpi4py; mpi4py.rc.initialize = False", "mpi4py.rc.initialize is off"),
        ):
            # Handled, for a launcher ends the job with its first failure, and no rank waits for another.
            done = _on_three(f"""
                {program}
                try:
                    ac.init()
                except ac.BackendUnavailableError as error:
                    print(error)
            """)
            assert done.returncode == 0, done.stderr
            # The ranks' lines may run into one another.
            assert len(re.findall(f"init: [^:]*{said}", done.stdout)) == 3, done.stdout

    def test_rank_that_is_killed_ends_the_job(self) -> None:
        started = time.monotonic()
        done = _on_three("""
            import os, signal
            comm = ac.init()
            comm.barrier()
            if comm.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            comm.barrier()
        """)
        assert done.returncode != 0
        assert time.monotonic() - started < 30

    def test_timeout_names_the_missing_rank(self) -> None:
        done = _on_three("""
            comm = ac.init(timeout=3)
            comm.barrier()
            if comm.rank != 1:
                comm.allreduce(1.0)
            time.sleep(10)
        """)
        assert done.returncode != 0
        assert "CommTimeoutError" in done.stderr
        assert "rank 1 is missing: it was last seen in barrier" in done.stderr

    def test_options_that_differ_are_a_mismatch(self) -> None:
        done = _on_three("""
            from mpi4py import MPI
            ac.init(check=MPI.COMM_WORLD.rank != 1)
        """)
        assert done.returncode != 0
        assert "check=False" in done.stderr
        assert done.stderr.count("MismatchError") == 3

    def test_launcher_of_another_mpi_is_an_error(self) -> None:
        program = HEAD + "ac.init()"
        done = subprocess.run(
            [sys.executable, "-c", program],
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


pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")
