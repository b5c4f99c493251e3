"""`arraycomm run`: which launcher it takes, what ranks print, and how a job ends. Most programs here start no MPI."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import pytest

from arraycomm import BackendUnavailableError
from arraycomm._jobs import launchers, relay
from arraycomm._launch import places
from arraycomm._launch.library import MPICH, OPEN_MPI, Library
from arraycomm.cli import main
from tests.support.launcher import is_open_mpi, needs_mpiexec, run_python

RANK = "import os, sys, time; rank = int(os.environ.get('PMI_RANK') or os.environ['PMIX_RANK']); "
# Longer than a test may take: the job ends before.
WAITS = "time.sleep(600)"


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let nothing be set that the launcher needs."""
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@contextmanager
def begun(
    program: str, *words: str, before: Sequence[str] = (), **options: Any
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Run a program on two ranks; return the job, which ends with the block, and its output."""
    command = [*before, sys.executable, "-m", "arraycomm", "run", "-n", "2", *words, "-c", program]
    with subprocess.Popen(command, text=True, **{"stdout": subprocess.PIPE, **options}) as job:
        try:
            yield job, cast("IO[str]", job.stdout)
        finally:
            job.kill()


@needs_mpiexec
@pytest.mark.each_mpi
@pytest.mark.usefixtures("bare_environment")
class TestRanks:
    def test_lines_get_their_rank_and_go_to_a_file_of_each(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        program = RANK + (
            "print('begun', end='', flush=True); time.sleep(0.05); print(':', *sys.argv[1:]); "
            "print('\\r50%\\r100%', end='', file=sys.stderr, flush=True); "
            "print(os.environ['OMP_NUM_THREADS'], end='')"
        )
        logs = tmp_path / "new" / "logs"
        options = ["-n", "3", "--prefix", "--logs", str(logs), "--threads", "2"]
        assert main(["run", *options, "-c", program, "--logs", "-n"]) == 0
        out, err = capfd.readouterr()
        for rank in range(3):
            own = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
            assert own == [f"[{rank}] begun: --logs -n", f"[{rank}] 2"]
            assert f"[{rank}] 50%\n" in err
            assert f"[{rank}] 100%\n" in err
            log = (logs / f"rank-{rank}.log").read_bytes()
            assert log.replace(b"\r50%\r100%", b"") == b"begun: --logs -n\n2"
        assert len(err.splitlines()) == 6

    def test_a_long_line_gets_its_rank_and_the_standard_input_ends(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        # Open MPI does not tell rank 0 that its input has ended.
        reads = "" if is_open_mpi() else "assert sys.stdin.read() == ''; "
        program = f"import sys; {reads}print('x' * 300_000)"
        assert main(["run", "-np", "2", "--prefix", "-c", program]) == 0
        out, _ = capfd.readouterr()
        assert sorted(line[:5] for line in out.splitlines()) == ["[0] x", "[1] x"]
        assert {len(line) for line in out.splitlines()} == {300_004}

    @pytest.mark.parametrize("connects", [True, False])
    def test_lines_of_ranks_that_print_at_once_never_mix(
        self, connects: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if the launcher has to forward them, as from other hosts, where it breaks none."""
        if not connects:
            if is_open_mpi():
                pytest.skip("Open MPI's launcher may break lines that it forwards")
            monkeypatch.setattr(relay, "NAME", "/no/such/directory/{}")
        program = RANK + "[print('abcdef'[rank] * (1 + i * 7919 % 9000)) for i in range(200)]"
        expected = sorted(letter * (1 + i * 7919 % 9000) for i in range(200) for letter in "abcdef")
        assert main(["run", "-n", "6", "-c", program]) == 0
        assert sorted(capfd.readouterr().out.splitlines()) == expected

    def test_line_that_has_not_ended_is_shown_and_broken_by_that_of_another_rank(
        self, tmp_path: Path
    ) -> None:
        program = RANK + (
            "wait = lambda: [time.sleep(0.01) for _ in range(3000) if not os.path.exists(str(rank))]\n"
            "if rank == 0: print('a', end='', flush=True)\n"
            "wait(); print('bc'[rank])"
        )
        with begun(program, cwd=tmp_path) as (_, out):
            said = out.read(1)
            (tmp_path / "1").touch()
            said += out.read(3)
            (tmp_path / "0").touch()
            assert said + out.read() == "a\nc\nb\n"

    @pytest.mark.parametrize(
        ("failure", "status", "said"),
        [
            ("sys.exit(6)", 6, "run: rank 1 ended with status 6\n"),
            ("os.kill(os.getpid(), 9)", 137, "run: rank 1 died by SIGKILL (Killed)\n"),
        ],
        ids=["status", "signal"],
    )
    def test_all_end_once_one_has_failed(
        self, failure: str, status: int, said: str, capfd: pytest.CaptureFixture[str]
    ) -> None:
        program = RANK + f"os.write(1, b'there\\n'); {failure} if rank == 1 else {WAITS}"
        assert main(["run", "-n", "2", "-c", program]) == status
        assert capfd.readouterr() == ("there\nthere\n", said)

    def test_job_that_a_rank_has_left_behind_fails(self, capfd: pytest.CaptureFixture[str]) -> None:
        """MPICH's launcher ends the others then, if it sees that first, and may report success."""
        program = (
            "import os, time, arraycomm as ac; comm = ac.init(); comm.barrier()\n"
            "if comm.rank == 1: os._exit(0)\n"
            "time.sleep(30)"
        )
        assert main(["run", "-n", "2", "-c", program]) != 0
        left = "rank 0 had not ended when another rank left"
        assert is_open_mpi() or left in capfd.readouterr().err

    def test_the_rank_that_failed_comes_before_those_that_waited_for_it(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        program = (
            "import sys, arraycomm as ac; comm = ac.init()\n"
            "if comm.rank == 1: sys.exit(6)\n"
            "comm.allreduce(1)"
        )
        assert main(["run", "-n", "2", "-c", program]) == 6
        *traceback, last = capfd.readouterr().err.splitlines()
        assert last == "run: rank 1 ended with status 6; rank 0 ended with status 1"
        assert "PeerError: rank 1 has reached the end of its program" in traceback[-1]

    def test_ranks_live_on_only_if_the_launcher_lets_them(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        program = (
            "import os, arraycomm as ac; comm = ac.init()\n"
            "if comm.rank == 1: os.kill(os.getpid(), 9)\n"
            "try: comm.allreduce(1)\n"
            "except ac.PeerError: print(comm.shrink().allreduce(1))"
        )
        status = main(["run", "-n", "2", "--fault-tolerant", "-c", program])
        out, err = capfd.readouterr()
        if is_open_mpi():
            assert (status, out) == (0, "1\n"), err
        else:
            assert (status, out) == (2, "")
            assert "run: --fault-tolerant needs Open MPI; got " in err

    def test_an_mpi_that_is_asked_for_is_used_or_named(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        own, other = ("openmpi", "mpich") if is_open_mpi() else ("mpich", "openmpi")
        names = {"openmpi": "Open MPI", "mpich": "MPICH"}
        program = "from mpi4py import MPI; print(MPI.get_vendor()[0])"
        assert main(["run", "-n", "2", "--mpi", own, "-c", program]) == 0
        assert capfd.readouterr().out == f"{names[own]}\n" * 2
        assert main(["run", "-n", "2", "--mpi", other, "-c", program]) == 127
        assert re.fullmatch(
            "arraycomm run: 2 ranks need an MPI and its launcher, but this Python loads no MPI "
            r"\(cannot load MPI library\) that MPI4PY_LIBMPI names, which --mpi sets; without it, it "
            rf"loads {names[own]} .*libmpi.so.*; install one with: pip install 'arraycomm\[{other}\]'\n",
            capfd.readouterr().err,
        )

    def test_a_cleared_environment_is_enough(self) -> None:
        command = ["-m", "arraycomm", "run", "-n", "2", "-c", "import arraycomm as ac; ac.init()"]
        job = subprocess.run(
            ["env", "-i", sys.executable, *command], capture_output=True, text=True, check=False
        )
        assert (job.returncode, job.stderr) == (0, "")

    def test_ranks_that_all_start_on_one_of_several_nodes_are_said(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NHOSTS", "2")
        assert main(["run", "-n", "2", "-c", "pass"]) == 0
        assert capfd.readouterr().err == (
            "run: all 2 ranks are on this node, one of 2 that the batch system gave; to use all, "
            "start the program with srun, or with mpiexec and a list of hosts\n"
        )

    @pytest.mark.parametrize(
        ("number", "status", "said"),
        [
            (signal.SIGINT, 130, "KeyboardInterrupt\n\nrun: ended by Ctrl-C\n"),
            (signal.SIGKILL, -9, ""),
        ],
        ids=["Ctrl-C", "SIGKILL"],
    )
    def test_a_signal_ends_all_ranks_at_once(self, number: int, status: int, said: str) -> None:
        # In one piece, so that the ranks' lines do not mix.
        program = RANK + f"os.write(1, b'%d\\n' % os.getpid()); {WAITS}"
        with begun(program, stderr=subprocess.PIPE) as (job, out):
            ranks = [int(out.readline()) for _ in range(2)]
            job.send_signal(number)
            out_left, err = job.communicate(timeout=60)
        assert (job.returncode, out_left, err[-len(said) :] if said else err) == (status, "", said)
        assert soon(lambda: not any(map(alive, ranks)))

    @pytest.mark.parametrize(
        ("number", "handler", "status", "said"),
        [
            # Rank 0 has no handler; rank 1 still has its time.
            (signal.SIGTERM, "time.sleep(1.5), print('saved')", 143, "saved\n"),
            # Rank 0 leaves without MPI's end, for which launchers would end the others.
            (signal.SIGINT, "time.sleep(rank), print('saved'), os._exit(0)", 0, "saved\nsaved\n"),
            (signal.SIGHUP, "os._exit(99)", 99, ""),
            # Not this process is told to end: rank 0 fails, and rank 1 still has its time.
            (0, "time.sleep(1.5), print('saved')", 3, "saved\nrun: rank 0 ended with status 3\n"),
            (
                signal.SIGTERM,
                "None",
                137,
                "run: ranks 0, 1 had not ended 1 s after SIGTERM; for more",
            ),
        ],
        ids=["time", "Ctrl-C", "status", "failure", "late"],
    )
    def test_ranks_have_time_to_act_on_a_signal_that_ends_them(
        self, number: int, handler: str, status: int, said: str
    ) -> None:
        grace = 1 if handler == "None" else 10
        which = "if rank: " if status in (143, 3) else ""
        begins = "" if status else "from mpi4py import MPI"
        program = RANK + (
            f"import signal; ended = []; {begins}\n{which}signal.signal({number or 15:d}, lambda *_: ("
            f"{handler}, ended.append({bool(which)})))\nprint('ready')\n"
            f"if {number} == rank == 0: sys.exit(3)\nwhile not any(ended): time.sleep(0.01)"
        )
        with begun(program, "--grace", str(grace), stderr=subprocess.STDOUT) as (job, out):
            assert [out.readline() for _ in range(2)] == ["ready\n"] * 2
            if number:
                job.send_signal(number)
            assert job.communicate(timeout=60)[0].startswith(said)
        assert job.returncode == status

    def test_signal_that_is_ignored_stays_so(self, tmp_path: Path) -> None:
        """As under nohup, and in the background of a script."""
        program = (
            "import os, time\nprint('there')\nwhile not os.path.exists('go'): time.sleep(0.01)"
        )
        ignoring = ("sh", "-c", 'trap "" HUP INT; exec "$@"', "sh")
        with begun(program, before=ignoring, cwd=tmp_path) as (job, out):
            assert [out.readline() for _ in range(2)] == ["there\n"] * 2
            for number in (signal.SIGHUP, signal.SIGINT):
                job.send_signal(number)
            time.sleep(0.5)  # Longer than one wait for events.
            (tmp_path / "go").touch()
            assert job.communicate(timeout=60)[0] == ""
        assert job.returncode == 0

    @pytest.mark.parametrize("where", ["slow", "full", "unread", "logs"])
    def test_output_that_cannot_be_written_ends_no_job(self, where: str, tmp_path: Path) -> None:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        target: Any = writer
        (tmp_path / "rank-0.log").symlink_to("/dev/full")
        if where == "unread":
            os.close(reader)
        with open("/dev/full", "w") as full:
            target = full if where == "full" else writer
            options = ["--logs", str(tmp_path)] if where == "logs" else []
            program = "for _ in range(3000): print('x' * 79)\nprint('end')"
            with begun(program, *options, stdout=target, stderr=subprocess.PIPE) as (job, _):
                os.close(writer)
                said = b""
                if where in ("slow", "logs"):
                    time.sleep(0.5)  # The pipe is full.
                    while chunk := os.read(reader, 1 << 14):
                        said += chunk
                        time.sleep(0.001)
                err = job.communicate(timeout=60)[1]
        assert (job.returncode, said.count(b"end\n")) == (0, 2 if said else 0)
        name = {"logs": f"{tmp_path}/rank-0.log"}.get(where, "the standard output")
        reason = "Broken pipe" if where == "unread" else "No space left on device"
        lost = f"run: {name} cannot be written ({reason}); what ranks print there is lost\n"
        assert err == ("" if where == "slow" else lost)
        assert bool(said) is (where in ("slow", "logs"))
        assert where != "logs" or (tmp_path / "rank-1.log").read_bytes().endswith(b"end\n")

    def test_whatever_ranks_print_comes_whole(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Long lines, colours, bytes, what C prints, and the last words of one that dies."""
        program = RANK + (
            "import ctypes; print('\\33[3%dm' % rank + 'xy'[rank] * 1_000_000 + '\\33[m'); "
            "libc = ctypes.CDLL(None); libc.puts(b'C' * 5000); libc.fflush(None); "
            "time.sleep(0.3 * rank); os.write(2, b'last %d' % rank); os.kill(os.getpid(), 9)"
        )
        assert main(["run", "-n", "2", "-c", program]) == 137
        out, err = capfd.readouterr()
        lines = [f"\33[3{rank}m{'xy'[rank] * 1_000_000}\33[m" for rank in range(2)]
        assert sorted(out.splitlines()) == sorted([*lines, "C" * 5000, "C" * 5000])
        assert "last 0" in err
        assert "last 1" in err

    def test_signals_for_the_programs_reach_each_once(self) -> None:
        """And Ctrl-Z stops them with this process."""
        program = RANK + (
            "import signal; [signal.signal(n, lambda n, _: os.write(1, b'%d got %d\\n' % (rank, n))) "
            "for n in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)]; "
            f"os.write(1, b'%d\\n' % os.getpid()); {WAITS}"
        )
        with begun(program) as (job, out):
            ranks = [int(out.readline()) for _ in range(2)]

            def all_heard(number: int) -> bool:
                lines = sorted(out.readline() for _ in range(2))
                return lines == [f"{rank} got {number}\n" for rank in range(2)]

            for number in (signal.SIGUSR1, signal.SIGUSR2):
                job.send_signal(number)
                assert all_heard(number)
            job.send_signal(signal.SIGTSTP)
            assert soon(lambda: all(map(stopped, [job.pid, *ranks])))
            time.sleep(0.3)  # Longer than one wait for events.
            job.send_signal(signal.SIGCONT)
            assert all_heard(signal.SIGCONT)
            assert not any(map(stopped, [job.pid, *ranks]))
            other = max(map(int, os.listdir(f"/proc/{job.pid}/task")))  # Waits for no events.
            ctypes.CDLL(None).tgkill(job.pid, other, signal.SIGTERM)
            assert job.communicate(timeout=60)[0] == ""
        assert job.returncode == 143


def stopped(pid: int) -> bool:
    return ") T " in Path(f"/proc/{pid}/stat").read_text()


def soon(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not what() and time.monotonic() < deadline:
        time.sleep(0.01)
    return what()


def alive(pid: int) -> bool:
    # A process that nobody has waited for yet is none any more. One may end while it is looked at.
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


# Which launcher


def fake(place: Path, name: str, said: str) -> str:
    """Put a launcher there that only says what it is."""
    place.mkdir(parents=True, exist_ok=True)
    program = place / name
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this interpreter lie in a directory without launchers; return the directory."""
    monkeypatch.setattr(launchers.sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    return tmp_path / "env" / "bin"


def test_the_launcher_is_that_of_the_library(tmp_path: Path, beside: Path) -> None:
    path = os.pathsep.join([str(tmp_path / "usr"), str(tmp_path / "other")])
    fake(tmp_path / "usr", "mpiexec", "mpiexec (Open MPI) 5.0.11")
    library = Library(MPICH, "MPICH Version: 5.0.2", str(tmp_path / "opt/mpich/lib/libmpi.so.12"))
    with pytest.raises(BackendUnavailableError, match=r"found .*/usr/mpiexec of Open MPI; put the"):
        launchers.launcher_of(library, path)
    right = [
        fake(tmp_path / "other", "mpiexec.hydra", "HYDRA build details:"),
        fake(tmp_path / "opt/mpich/bin", "mpirun", "HYDRA build details:"),
        fake(beside, "mpiexec", "HYDRA build details: beside"),
    ]
    # Each is nearer than the one before.
    (tmp_path / "opt/mpich/bin/mpirun").rename(tmp_path / "away")
    (beside / "mpiexec").rename(tmp_path / "further")
    assert launchers.launcher_of(library, path) == (right[0], MPICH)
    (tmp_path / "away").rename(tmp_path / "opt/mpich/bin/mpirun")
    assert launchers.launcher_of(library, path) == (right[1], MPICH)
    (tmp_path / "further").rename(beside / "mpiexec")
    assert launchers.launcher_of(library, path) == (right[2], MPICH)


def test_one_that_does_not_say_what_it_is_may_be_right(tmp_path: Path, beside: Path) -> None:
    program = fake(tmp_path, "mpiexec", "version 1.2")
    library = Library(MPICH, "CRAY MPICH version 9", "")
    assert launchers.launcher_of(library, str(tmp_path)) == (program, "")


def test_each_launcher_gets_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers.os, "geteuid", lambda: 0)
    ours, other = launchers.Launcher("m", OPEN_MPI), launchers.Launcher("m", MPICH)
    assert ours.command(3) == ["m", "--oversubscribe", "-n", "3"]
    # Open MPI would bind all threads of a rank to one core.
    assert ours.command(3, threads=4)[2:4] == ["--bind-to", "none"]
    assert ours.command(3, fault_tolerant=True)[2:4] == ["--with-ft", "ulfm"]
    assert other.command(3, threads=4) == ["m", "-n", "3"]
    assert other.environment({}, 2) == {"OMP_NUM_THREADS": "2"}
    assert other.environment({"OMP_NUM_THREADS": "7"}, 2) == {"OMP_NUM_THREADS": "7"}
    # In a shell of srun, of which Slurm leaves variables there.
    shell = {"SLURM_JOB_NUM_NODES": "1", "PMIX_RANK": "0", "OMP_NUM_THREADS": "1"}
    needed = {"SLURM_JOB_NUM_NODES": "1", "OMP_NUM_THREADS": "1", "HYDRA_BOOTSTRAP": "fork"}
    assert launchers.Launcher("mpiexec", MPICH).environment(shell) == needed
    # In what another MPI's launcher has started.
    assert "OMPI_COMM_WORLD_SIZE" not in other.environment({"OMPI_COMM_WORLD_SIZE": "1"})
    assert "PMI_RANK" not in ours.environment({"PMI_RANK": "0"})
    assert set(ours.environment({})) > {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"}


def test_killed_launcher_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", str(tmp_path))
    (tmp_path / "ompi.7" / "0").mkdir(parents=True)
    launchers.remove_files_of(7)
    assert list(tmp_path.iterdir()) == []


def test_batch_systems_say_how_many_nodes_there_are(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\na slots=2\nb\n\n")
    cases: list[dict[str, str]] = [{"SLURM_JOB_NUM_NODES": "2"}, {"PBS_NODEFILE": str(hosts)}]
    assert [launchers.nodes_of(case) for case in cases] == [2, 2]
    assert [launchers.nodes_of(case) for case in ({}, {"PBS_NODEFILE": "/nowhere"})] == [1, 1]


def test_the_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "cores", lambda: 16)
    assert [places.threads_for(n, {}) for n in (1, 3, 16, 40)] == [16, 5, 1, 1]
    assert places.threads_for(3, {"OMP_NUM_THREADS": "2,1"}) == 2


@pytest.fixture
def no_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let there be none for programs that start here."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('there is none')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return monkeypatch


@pytest.mark.usefixtures("no_mpi")
@pytest.mark.parametrize(
    ("program", "status", "out", "err"),
    [
        ("print(comm.backend, comm.allreduce(1))", 0, "[0] processes 3\n[1] processes 3\n", ""),
        ("if comm.rank == 0: print(sys.stdin.read())", 0, "[0] typed\n", ""),
        (
            "if comm.rank == 1: sys.exit(6)\ncomm.barrier()",
            6,
            "",
            "run: rank 1 ended with status 6; ",
        ),
        ("if comm.rank == 1: os.kill(os.getpid(), 9)\ncomm.barrier()", 137, "", "died by SIGKILL"),
    ],
    ids=["ends", "reads", "status", "signal"],
)
def test_without_an_mpi_ranks_are_processes_of_this_node(
    program: str, status: int, out: str, err: str
) -> None:
    text = f"import os, sys, arraycomm as ac; comm = ac.init()\n{program}"
    words = ["-m", "arraycomm", "run", "-n", "3", "--prefix", "--", "-c", text]
    job = subprocess.run(
        [sys.executable, *words], input="typed", capture_output=True, text=True, check=False
    )
    assert job.returncode == status, job.stderr
    assert set(out.splitlines()) <= set(job.stdout.splitlines())
    assert err in job.stderr if err else not job.stderr


@pytest.mark.usefixtures("no_mpi")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_without_an_mpi_a_signal_ends_all_ranks(number: int) -> None:
    with begun(f"import os, time; os.write(1, b'%d\\n' % os.getpid()); {WAITS}") as (job, out):
        ranks = [int(out.readline()) for _ in range(2)]
        job.send_signal(number)
        job.wait(60)
    assert soon(lambda: not any(map(alive, ranks)))


@pytest.mark.parametrize(
    ("words", "variable", "extra"),
    [
        (["--mpi", "openmpi"], "HOME", "openmpi"),
        (["--fault-tolerant"], "HOME", "openmpi"),
        ([], "NHOSTS", "mpich"),
    ],
    ids=["chosen", "shrink", "nodes"],
)
def test_where_only_an_mpi_will_do_it_says_how_to_get_one(
    words: list[str], variable: str, extra: str, no_mpi: pytest.MonkeyPatch
) -> None:
    no_mpi.setenv(variable, "2")
    job = run_python("-m", "arraycomm", "run", "-n", "2", *words, "-c", "pass")
    assert (job.returncode, job.stdout) == (127, "")
    assert job.stderr.startswith(
        "arraycomm run: 2 ranks need an MPI and its launcher, but this Python loads no MPI ("
    )
    assert job.stderr.endswith(f"; install one with: pip install 'arraycomm[{extra}]'\n")


def test_the_mpich_of_debian_is_named(tmp_path: Path) -> None:
    """Under its own name, under which mpi4py does not look for it."""
    # Any library will do.
    maps = Path("/proc/self/maps").read_text().splitlines()
    stand_in = next(line.split()[-1] for line in maps if "libm.so" in line)
    (tmp_path / "libmpich.so.12").symlink_to(stand_in)
    settings = {"LD_LIBRARY_PATH": str(tmp_path), "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    for words in ("-m arraycomm run -n 2 true", "-c import_arraycomm;arraycomm.init('mpi')"):
        command = [sys.executable, *(word.replace("_", " ") for word in words.split())]
        job = subprocess.run(
            command, env=os.environ | settings, capture_output=True, text=True, check=False
        )
        assert "(cannot load MPI library; there is MPICH as " in job.stderr
        assert "libmpi.so.12 alone: link it under that name into a directory of LD_" in job.stderr


@needs_mpiexec
def test_init_refuses_the_launcher_of_another_mpi_each_time() -> None:
    if is_open_mpi():
        pytest.skip("Open MPI starts under any launcher")
    # As Open MPI's mpiexec leaves the environment; MPICH would end a process that it has started.
    program = (
        "import os; os.environ['OMPI_COMM_WORLD_SIZE'] = '2'\n"
        "import arraycomm as ac\n"
        "for _ in range(2):\n"
        "    try: ac.init()\n"
        "    except ac.BackendUnavailableError as error: print(error)\n"
        "from mpi4py import MPI; print(MPI.Is_initialized())"
    )
    first, second, initialized = run_python("-c", program).stdout.splitlines()
    assert first == second
    assert "Open MPI's mpiexec started 2 processes, but the MPI that was loaded (MPICH " in first
    assert first.endswith(
        "cannot start under it; start the program with: arraycomm run -n 2 …, "
        "which finds the mpiexec of the MPI that is loaded"
    )
    assert initialized == "False"


# What is wrong with the arguments


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["x.py"], "arraycomm run: the following arguments are required: -n"),
        (["-n", "2"], "arraycomm run: the following arguments are required: program"),
        (["-n", "0", "x.py"], "argument -n/-np: must be a positive integer; got '0'"),
        (["-n", "2", "--fast", "x.py"], "arraycomm run: unrecognized arguments: --fast; see: "),
        (["-n", "2", "--prefxi", "x.py"], "arguments: --prefxi; did you mean --prefix?; see: "),
        (["-n", "2", "--pref", "x.py"], "arguments: --pref; did you mean --prefix?; see: "),
        (["-n", "2", "--thread", "3", "x.py"], "arguments: --thread; did you mean --threads?; "),
        (["-n", "2", "--grace", "-1", "x.py"], "--grace: must be a number of seconds; got '-1'"),
        (["-n", "2", "no_such.py"], "run: there is no file no_such.py in "),
        (["-n", "2", "no_such_command"], "run: there is no file and no command no_such_command"),
        (["-n2", "-m"], "run: -m must be followed by a module"),
        (["-n", "2", "--logs", "/dev/null/x", "-c", ""], "run: --logs must be a directory; cannot"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_named_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["run", *words])
    except SystemExit as stop:
        status = stop.code
    err = capsys.readouterr().err
    assert (status, err.count("\n")) == (2, 1)
    assert said in err


@pytest.mark.parametrize("words", [["run", "-n2", "no.py"], ["trace", "no.json"]], ids=" ".join)
def test_a_working_directory_that_was_removed_is_said(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert main(words) == 2
    said = f"arraycomm {words[0]}: the working directory has been removed; change to another one\n"
    assert capsys.readouterr().err == said


def test_it_starts_no_job_in_each_process_of_a_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.delenv("ARRAYCOMM_RANK_PROCESS", raising=False)
    assert main(["run", "-n", "2", "-c", ""]) == 2
    assert "Open MPI's mpiexec has started this process as one of 4" in capsys.readouterr().err
