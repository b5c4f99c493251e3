"""What the laws make of results that are long or shown as a copy, and of objects with few methods."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis.internal.conjecture import engine

from arraycomm import ANY_SOURCE, Communicator
from arraycomm.testing.conformance import Conformance
from arraycomm.testing.conformance._checks import check_copy, check_elements, scribble


class _Copied:
    """An array whose elements are read by a copy, as MLX's are."""

    def __init__(self) -> None:
        self._array = np.zeros(3)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._array.copy()


def test_what_is_written_into_a_copy_is_not_expected_to_stay() -> None:
    assert not scribble(_Copied(), 1)
    assert scribble(np.zeros(3), 1)
    assert scribble(np.ones(3, np.uint8), 1)


@pytest.mark.parametrize("check", [check_copy, lambda *arrays: check_elements(*arrays, "max")])
def test_first_difference_of_long_arrays_is_named(check) -> None:
    want = np.zeros((2, 3_000))
    found = want.copy()
    found[1, 1_234:1_240] = 5.0
    with pytest.raises(AssertionError, match=r"difference is at \[1, 1234\]: .*5.0\)?, not"):
        check(found, want)


def test_first_difference_is_one_that_counts() -> None:
    """The signs of NaN do not."""
    want = np.array([np.nan, 0.0])
    found = np.array([-np.nan, 1.0])
    with pytest.raises(AssertionError, match=r"difference is at \[1\]"):
        check_elements(found, want, "max")


class _Wrapper:
    """What a library has of its own around a communicator: few methods."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.allreduce, self.allgather = comm.allreduce, comm.allgather


class _OfWrapper(Conformance):
    def subject(self, comm: Communicator) -> Any:
        return _Wrapper(comm)


def test_laws_hold_an_object_to_the_methods_that_it_has() -> None:
    laws = _OfWrapper()
    laws.test_allgather_stacks()
    laws.test_allreduce_is_the_fold_in_rank_order()
    with pytest.raises(unittest.SkipTest, match="Wrapper has no exscan, scan"):
        laws.test_scan_is_the_fold_of_the_ranks_so_far()
    with pytest.raises(unittest.SkipTest, match="Wrapper has no synchronize"):
        laws.test_synchronize_is_idempotent()


class _Wrong:
    """A communicator with one wrong method."""

    def __init__(self, comm: Communicator, name: str, wrong: Callable[..., Any]) -> None:
        self._comm = comm
        setattr(self, name, partial(wrong, comm))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


WRONG: dict[str, tuple[str, Callable[..., Any]]] = {
    "messages_arrive_as_they_were_sent": (
        "recv",
        lambda comm, _, *a, **b: comm.recv(ANY_SOURCE, *a, **b),
    ),
    "extremes_are_where_they_are_said_to_be": (
        "maxloc",
        lambda comm, x: (comm.maxloc(x)[0], comm.maxloc(x)[1] * 0),
    ),
    "bcast_copies": ("bcast", lambda comm, x, root=0, **options: comm.bcast(x, 0, **options)),
    "objects_are_messages_too": ("iprobe", lambda *_: None),
}


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("law", WRONG)
def test_laws_find_the_method_that_is_wrong(law, monkeypatch) -> None:
    monkeypatch.setattr(_OfWrapper, "subject", lambda _, comm: _Wrong(comm, *WRONG[law]))
    # Whatever example shows it will do.
    monkeypatch.setattr(engine, "MAX_SHRINKS", 0)

    def check() -> None:
        # A few examples may all be such that the wrong method is right.
        for _ in range(20):
            getattr(_OfWrapper(), f"test_{law}")()

    with pytest.raises((AssertionError, ExceptionGroup)):
        check()
