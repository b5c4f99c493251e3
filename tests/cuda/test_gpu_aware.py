"""Whether MPI takes device memory, asked in processes of their own: asking too early ends one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from arraycomm._cuda.links import gpu_aware as subject
from arraycomm._cuda.links.gpu_aware import VARIABLE, gpu_aware
from tests.support.launcher import run_python

needs_mpi = pytest.mark.skipif(
    run_python("-c", "from mpi4py import MPI").returncode != 0, reason="no MPI can be loaded"
)
HEAD = """
import os
for name in list(os.environ):
    if name.startswith(("PMI", "OMPI_COMM", "ARRAYCOMM")):
        del os.environ[name]
from arraycomm._cuda.links import gpu_aware as g
"""


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
    program = """
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
"""
    done = run_python("-c", HEAD + program)
    assert done.returncode == 0, done.stderr


@needs_mpi
def test_the_wheels_of_mpich_and_open_mpi_say_no() -> None:
    program = """
import ctypes
from mpi4py import MPI
library = MPI.Get_library_version()
print(g.gpu_aware(), hasattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support"))
"""
    done = run_python("-c", HEAD + program)
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr


@pytest.fixture
def asks() -> Iterator[Callable[[str | None], bool]]:
    """Return what asks a library, which is asked anew."""
    subject._asked.cache_clear()
    yield subject._asked
    subject._asked.cache_clear()


@pytest.mark.parametrize("answer", [0, 1])
def test_the_answer_is_the_librarys_and_kept(monkeypatch, asks, answer) -> None:
    answers = iter([answer])
    library = SimpleNamespace(MPIX_Query_cuda_support=lambda: next(answers))
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert [asks("there"), asks("there")] == [bool(answer)] * 2


@pytest.mark.parametrize("library", ["/no/such/library.so", None])
def test_a_library_that_does_not_know_the_question_says_no(asks, library) -> None:
    assert asks(library) is False
