"""Whether MPI takes device memory, asked in processes of their own: asking too early ends one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap

import pytest

from arraycomm._cuda import gpu_aware as subject
from arraycomm._cuda.gpu_aware import VARIABLE, gpu_aware

needs_mpi = pytest.mark.skipif(
    subprocess.run(
        [sys.executable, "-c", "from mpi4py import MPI"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="no MPI can be loaded",
)


def _run(program: str) -> subprocess.CompletedProcess[str]:
    head = "import sys\nfrom arraycomm._cuda import gpu_aware as g\n"
    launched = ("PMI", "OMPI_COMM", "ARRAYCOMM")
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if not k.startswith(launched)},
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "answer"),
    [("1", True), ("true", True), (" True ", True), ("0", False), ("FALSE", False)],
)
def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch, text: str, answer: bool) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # decided without it
    monkeypatch.setenv(VARIABLE, text)
    assert gpu_aware() is answer


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "Perhaps")
    with pytest.raises(ValueError, match=r"^init: ARRAYCOMM_GPU_AWARE_MPI must be .*'Perhaps'$"):
        gpu_aware()


@needs_mpi
def test_the_library_is_asked_between_init_and_finalize_only() -> None:
    done = _run("""
        import mpi4py
        mpi4py.rc.initialize = False
        asked = []
        def answer(library):
            asked.append(library)
            return True
        g._asked = answer
        assert g.gpu_aware() is False and not asked
        from mpi4py import MPI
        MPI.Init()
        assert g.gpu_aware() is True and asked == [MPI.__file__]
        MPI.Finalize()
        assert g.gpu_aware() is False and len(asked) == 1
    """)
    assert done.returncode == 0, done.stderr


@needs_mpi
def test_the_wheels_of_mpich_and_open_mpi_say_no() -> None:
    done = _run("""
        import ctypes
        from mpi4py import MPI
        library = MPI.Get_library_version()
        print(g.gpu_aware(), hasattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support"))
    """)
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr


class _Library:
    """Answers what it is told to, and counts how often it is asked."""

    def __init__(self, answer: int) -> None:
        self.asked = 0

        def query() -> int:
            self.asked += 1
            return answer

        self.MPIX_Query_cuda_support = query


@pytest.mark.parametrize("answer", [0, 1])
def test_the_answer_is_the_librarys_and_kept(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    library = _Library(answer)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    subject._asked.cache_clear()
    try:
        assert [subject._asked("there"), subject._asked("there")] == [bool(answer)] * 2
    finally:
        subject._asked.cache_clear()
    assert library.asked == 1


@pytest.mark.parametrize("library", ["/no/such/library.so", None])
def test_a_library_that_does_not_know_the_question_says_no(library: str | None) -> None:
    subject._asked.cache_clear()
    assert subject._asked(library) is False
