"""What the laws make of results that are long or shown as a copy, and of objects with few methods."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

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
    """What a library has of its own around a communicator: few methods, one of which is wrong."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.allreduce, self.allgather = comm.allreduce, comm.allgather
        self._bcast = comm.bcast

    def bcast(self, x: Any, root: int = 0, **options: Any) -> Any:
        return self._bcast(x, 0, **options)


class _OfWrapper(Conformance):
    def subject(self, comm: Communicator) -> Any:
        return _Wrapper(comm)


def test_laws_hold_an_object_to_the_methods_that_it_has() -> None:
    laws = _OfWrapper()
    laws.test_allgather_stacks()
    laws.test_allreduce_is_the_fold_in_rank_order()
    with pytest.raises(AssertionError):
        laws.test_bcast_copies()
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


def _from_any(comm: Communicator, _: int, tag: int = 0, **options: Any) -> Any:
    return comm.recv(ANY_SOURCE, tag, **options)


def _on_the_first_rank(comm: Communicator, x: Any) -> Any:
    values, ranks = comm.maxloc(x)
    return values, ranks * 0


@pytest.mark.parametrize(
    ("law", "name", "wrong"),
    [
        ("messages_arrive_as_they_were_sent", "recv", _from_any),
        ("extremes_are_where_they_are_said_to_be", "maxloc", _on_the_first_rank),
        ("objects_are_messages_too", "iprobe", lambda *_: None),
    ],
)
def test_laws_find_the_method_that_is_wrong(law, name, wrong, monkeypatch) -> None:
    monkeypatch.setattr(_OfWrapper, "subject", lambda _, comm: _Wrong(comm, name, wrong))
    with pytest.raises((AssertionError, ExceptionGroup)):
        getattr(_OfWrapper(), f"test_{law}")()
