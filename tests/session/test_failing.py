"""Programs that fail on one rank: the others are told, and the job ends with its error and status."""

from __future__ import annotations

import pytest

from tests.session.launching import launch
from tests.support.launcher import LAUNCHED, needs_mpiexec

pytestmark = pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")


# How many ranks over which channel, what comes before one raises, and in what the others wait.
RAISING = {
    "at once": (2, "shared", "comm = ac.init()", "comm.allreduce(np.ones(3))"),
    "with requests outstanding, on a duplicate that outlives the world": (
        3,
        "messages",
        "w, x = ac.init(), np.ones(10**6); comm = w.dup(); w.free(); r = comm.iallreduce(x)",
        "r.wait(); comm.barrier()",
    ),
}


@needs_mpiexec
class TestFailing:
    """Programs that end with a status other than 0, each in a job of its own."""

    @pytest.mark.each_mpi
    @pytest.mark.parametrize(("ranks", "control", "before", "waits"), RAISING.values(), ids=RAISING)
    def test_rank_that_raises_is_told_to_all(self, ranks, control, before, waits) -> None:
        program = f"""
            {before}
            if comm.rank == 1:
                raise ValueError("on purpose")
            {waits}
        """
        done = launch(program, control, ranks)
        assert done.returncode != 0
        assert done.stderr.count("PeerError: rank 1 failed") == ranks - 1, done.stderr
        # The rank's own, and one that each of the others was told.
        assert done.stderr.count("ValueError: on purpose") == ranks, done.stderr

    @pytest.mark.each_mpi
    @pytest.mark.parametrize(
        ("ranks", "control", "leave", "said"),
        [
            (3, "messages", "pass", "reached the end of its program, or called sys.exit, and"),
            (2, "shared", "from mpi4py import MPI; MPI.Finalize()", "finalized MPI and"),
        ],
    )
    def test_rank_that_leaves_early_is_told_to_all(self, ranks, control, leave, said) -> None:
        program = f"""
            comm = ac.init()
            comm.barrier()
            if comm.rank == 1:
                {leave}
            else:
                comm.allreduce(np.ones(3))
        """
        done = launch(program, control, ranks)
        assert done.returncode != 0
        told = done.stderr.count(f"PeerError: rank 1 has {said} takes part no more")
        assert told == ranks - 1, done.stderr

    @pytest.mark.each_mpi
    def test_uncaught_mismatch_is_printed_once_and_in_one_piece(self) -> None:
        """By the lowest rank that does not handle it. A launcher mixes what ranks write in pieces."""
        program = """
            class Pieces:
                def __getattr__(self, name):
                    return getattr(sys.__stderr__, name)
                def write(self, text):
                    sys.stdout.write(f"a piece of {text.count(chr(10))} lines\\n")
                    return sys.__stderr__.write(text)

            comm = ac.init()
            sys.stderr = Pieces()
            try:
                comm.allreduce(np.ones(5 + comm.rank))
            except ac.MismatchError:
                if comm.rank != 0:
                    raise
        """
        done = launch(program, "messages", 3)
        assert done.returncode != 0
        assert done.stdout.count("a piece of 1 lines") == 1, done.stdout
        assert done.stdout.count("a piece of") == 2, done.stdout
        assert done.stderr.count("MismatchError: ranks of one communicator called") == 1
        line = "rank 2 of world: arraycomm.MismatchError, as printed by rank 1\n"
        assert line in done.stderr, done.stderr

    def test_hook_of_the_user_is_called_with_an_uncaught_mismatch(self) -> None:
        done = launch(
            """
            sys.excepthook = lambda kind, error, trace: print(f"mine: {error}", flush=True)
            comm = ac.init()
            comm.allreduce(np.ones(3 + comm.rank))
            """
        )
        assert done.returncode != 0
        assert done.stdout.count("mine: ranks of one communicator called") == 2, done.stdout

    @pytest.mark.each_mpi
    @pytest.mark.parametrize("waits", ["comm.barrier()", "MPI.COMM_WORLD.Barrier()"])
    def test_failure_that_another_hook_prints_is_told_to_all(self, waits: str) -> None:
        """Also if threads and hooks of the program would wait for those that wait for it."""
        done = launch(f"""
            import atexit, threading
            comm = ac.init()
            from mpi4py import MPI
            sys.excepthook = lambda kind, error, trace: print(f"mine: {{error}}", file=sys.stderr)
            parts = [comm.dup() for _ in range(3)]
            if comm.rank == 1:
                threading.Thread(target=parts[0].recv, args=(0,)).start()
                atexit.register(parts[1].barrier)
                request = parts[2].irecv(0)
                raise ValueError("on purpose")
            {waits}
        """)
        assert done.returncode != 0
        assert "mine: on purpose" in done.stderr
        told = "mine: rank 1 failed and takes part no more" in done.stderr
        assert told == waits.startswith("comm"), done.stderr

    def test_wrong_argument_of_init_on_one_rank_ends_the_job(self) -> None:
        done = launch("""
            from mpi4py import MPI
            ac.init(device="cuda:0") if MPI.COMM_WORLD.rank == 1 else ac.init()
        """)
        assert done.returncode != 0
        assert "Error: " in done.stderr

    @pytest.mark.parametrize("last", ["", "ac.finalize()", "comm.free()"])
    def test_mismatch_on_a_device_that_nothing_followed_fails_the_job(self, last: str) -> None:
        """On devices in software. The call does not wait for its header, and the program ends."""
        done = launch(
            f"""
            from tests.support.device import linked_devices

            def differ(comm):
                comm.allreduce(cupy.ones(5))
                comm.allreduce(cupy.ones(5 + comm.rank))

            with linked_devices():
                import cupy

                comm = ac.init()
                part = comm.dup()
                try:
                    differ(part)
                    part.barrier()
                except ac.MismatchError:
                    print("raised by the next call", flush=True)
                differ(comm)
                {last}
            """
        )
        assert done.returncode != 0
        whole = done.stderr.count("MismatchError: ranks of one communicator called")
        # By one that knows that the other has printed it, unless it is ended with the job before.
        short = done.stderr.count("MismatchError, as printed by rank")
        assert whole >= 1 >= short, done.stderr
        assert done.stdout.count("raised by the next call") == 2, done.stdout
