"""Reductions of the user's own: what functions get, and what goes wrong; what they give are laws."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from itertools import product
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from arraycomm.testing.strategies import ArrayCase, installed_frameworks
from tests.support.on_ranks import each_rank_of
from tests.support.oracle import same_bits

Array = np.ndarray[Any, Any]

# Sides of square matrices of float64 that travel with the header, and that do not.
SIDES = [1, 3, 90]


def minus(a: Any, b: Any) -> Any:
    return a - b


def second(_a: Any, b: Any) -> Any:
    return b


def in_place(a: Any, b: Any) -> Any:
    a -= b
    return a


def _matrix(side: int, rank: int) -> Array:
    return np.random.default_rng((side, rank)).integers(-3, 4, (side, side)).astype(np.float64)


# What the function gets

ARITHMETIC = [f for f in installed_frameworks() if f not in ("buffer", "dlpack")]


def _case(shape: tuple[int, ...], framework: str, rank: int) -> ArrayCase:
    elements = tuple(np.random.default_rng(rank).standard_normal(11).tolist())
    return ArrayCase("float32", shape, framework=framework, elements=elements)


def _numpy(array: Any) -> Array:
    return np.asarray(ac.exchange(array, "numpy"))


@pytest.mark.parametrize("framework", ARITHMETIC)
@pytest.mark.parametrize(
    ("shape", "slices"), [((2, 3), False), ((90, 130), False), ((180, 130), True)], ids=str
)
@each_rank_of(3)
def test_function_gets_arrays_of_the_callers_framework(
    comm: Communicator, framework, shape, slices
) -> None:
    """Whole ones on one rank, or slices on each."""
    cases = [_case(shape, framework, rank) for rank in range(comm.size)]
    mine = cases[comm.rank].build()
    seen: list[tuple[type, tuple[int, ...], Any]] = []

    def fn(a: Any, b: Any) -> Any:
        seen.extend((type(x), tuple(x.shape), x.dtype) for x in (a, b))
        return a - b

    got = comm.allreduce(mine, ac.op(fn, elementwise=slices))
    assert type(got) is type(mine)
    assert same_bits(_numpy(got), reduce(minus, [case.numpy() for case in cases]))
    part = (180 * 130 // comm.size,) if slices else shape
    folds = slices or comm.rank == 0
    assert seen == [(type(mine), part, mine.dtype)] * (2 * (comm.size - 1) if folds else 0)


@each_rank_of("few")
def test_function_is_called_once_for_each_further_rank_on_one_rank(comm: Communicator) -> None:
    calls: list[int] = []

    def count(a: Any, b: Any) -> Any:
        calls.append(1)
        return a + b

    for side in SIDES:
        made, mine, root = ac.op(count), _matrix(side, comm.rank), comm.size - 1
        for on, call in (
            (0, partial(comm.allreduce, mine, made)),
            (root, partial(comm.reduce, mine, made, root)),
            (0, partial(comm.scan, mine, made)),
            (0, partial(comm.exscan, mine, made)),
        ):
            calls.clear()
            call()
            assert len(calls) == (comm.size - 1 if comm.rank == on else 0)


@each_rank_of(3)
def test_numbers_stay_numbers(comm: Communicator) -> None:
    seen: set[type] = set()

    def last(a: Any, b: Any) -> Any:
        seen.update((type(a), type(b)))
        return b

    for value in (2.5, 3, 1j, True, np.float32(1.5), np.int8(3)):
        kind = type(value)
        seen.clear()
        got = comm.allreduce(kind(value * (comm.rank == comm.size - 1)), ac.op(last))
        assert (type(got), got) == (kind, value)
        assert seen <= {kind}


@each_rank_of(3)
def test_dtypes_without_arithmetic_can_be_reduced(comm: Communicator) -> None:
    for count in (2, 9_000):
        dates = np.full(count, np.datetime64(comm.rank, "D"))
        latest = comm.allreduce(dates, ac.op(np.maximum))
        assert (latest == np.datetime64(comm.size - 1, "D")).all()
        pairs = np.full(count, comm.rank).astype("i4,f8")
        assert (comm.scan(pairs, ac.op(second)) == pairs).all()


@each_rank_of(3)
def test_arrays_passed_stay_as_they_are(comm: Communicator) -> None:
    for side, elementwise in product(SIDES, (False, True)):
        mine, made = _matrix(side, comm.rank), ac.op(in_place, elementwise=elementwise)
        for call in (comm.allreduce, comm.reduce, comm.scan, comm.exscan):
            call(mine, made)
            assert same_bits(mine, _matrix(side, comm.rank))


@each_rank_of(3)
def test_every_rank_gets_the_same_bits_whatever_its_framework(comm: Communicator) -> None:
    for shape, elementwise in product(((2, 3), (90, 130)), (False, True)):
        framework = ARITHMETIC[comm.rank % len(ARITHMETIC)]
        mine = _case(shape, framework, comm.rank).build()
        got = comm.allreduce(mine, ac.op(_noisy, elementwise=elementwise))
        assert type(got) is type(mine)
        said = comm.allgather_object(_numpy(got).tobytes())
        assert said == [said[0]] * comm.size


def _noisy(a: Any, b: Any) -> Any:
    """Something that frameworks round differently."""
    return (a * a * a + b / 3) * (a + b)


# What goes wrong

OPERATIONS = ["allreduce", "reduce", "reduce_scatter", "scan", "exscan"]


def _call(comm: Communicator, operation: str, count: int, made: Any) -> Any:
    shape = (comm.size, count) if operation == "reduce_scatter" else (count,)
    return getattr(comm, operation)(np.ones(shape), made)


@pytest.mark.parametrize("operation", OPERATIONS)
@each_rank_of(3)
def test_exception_of_one_rank_is_raised_by_all_and_they_go_on(
    comm: Communicator, operation
) -> None:
    def fails(a: Any, b: Any) -> Any:
        if comm.rank == culprit:
            raise ZeroDivisionError("of the user's")
        return a + b

    ranks = range(comm.size)
    for count, elementwise, culprit in product((3, 30_000), (False, True), ranks):
        if not _folds(operation, count, elementwise, culprit):
            continue
        kind = ZeroDivisionError if comm.rank == culprit else ac.PeerError
        with pytest.raises(kind, match="of the user's") as caught:
            _call(comm, operation, count, ac.op(fails, elementwise=elementwise))
        if comm.rank != culprit:
            assert caught.value.rank == culprit
            assert "test_custom_ops.py" in caught.value.traceback
        assert comm.allreduce(1) == comm.size


def _folds(operation: str, count: int, elementwise: bool, rank: int) -> bool:
    """Return whether a rank calls the function."""
    large = count > 3 and operation in ("allreduce", "reduce")
    return rank == 0 or (elementwise and (large or operation == "reduce_scatter"))


WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "shape": lambda a, b: (a - b)[..., :1],
    "more dimensions": lambda a, b: (a - b)[None],
    "dtype": lambda a, b: (a - b).astype(np.float32),
    "nothing": lambda a, b: None,
    "list": lambda a, b: [1.0],
    "number": lambda a, b: 1.0,
}


@pytest.mark.parametrize("case", WRONG)
@each_rank_of(2)
def test_wrong_result_is_a_type_error_and_the_ranks_go_on(comm: Communicator, case) -> None:
    for operation, count in product(OPERATIONS, (3, 30_000)):
        with pytest.raises((TypeError, ac.PeerError), match=operation) as caught:
            _call(comm, operation, count, ac.op(WRONG[case]))
        folds = _folds(operation, count, False, comm.rank)
        assert isinstance(caught.value, TypeError) == folds
        assert comm.allreduce(1) == comm.size


DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "functions": (
        ac.op(minus),
        ac.op(second),
        r"op\(tests\.collectives\.test_custom_ops\.second\)",
    ),
    "kinds": (ac.op(minus), ac.op(minus, elementwise=True), "minus, elementwise=True"),
    "name": (ac.op(minus), "sum", r"allreduce\(sum\)"),
}


@pytest.mark.parametrize("case", DIFFERENT)
@each_rank_of(2)
def test_different_functions_are_a_mismatch(comm: Communicator, case) -> None:
    usual, other, message = DIFFERENT[case]
    for count in (3, 30_000):
        with pytest.raises(ac.MismatchError, match=message):
            comm.dup().allreduce(np.ones(count), other if comm.rank else usual)


class Shift:
    """An object that can be called, one on each rank."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, a: Any, b: Any) -> Any:
        return a + b + self.by


def _shifted(by: float, a: Any, b: Any) -> Any:
    return a + b + by


def test_functions_are_named_alike_in_every_process_and_told_apart() -> None:
    for make in (lambda: Shift(1.0), lambda: partial(_shifted, 1.0), lambda: partial(Shift(1.0))):
        one, other = make(), make()
        assert ac.op(one).name == ac.op(other).name
        assert " at 0x" not in ac.op(one).name
    names = {ac.op(fn).name for fn in (np.add, max, min, np.logical_xor, int.__or__, bool.__or__)}
    assert len(names) == 6
    for wrong in ("sum", None, 3):
        with pytest.raises(TypeError, match="op: fn must be a function"):
            ac.op(wrong)


@each_rank_of(2)
def test_function_that_op_was_not_made_of_is_refused_by_all(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=r"arraycomm\.op"):
        comm.allreduce(np.ones(3), minus)
    with pytest.raises(TypeError):
        ac.allreduce_tree([np.ones(3)], ac.op(minus), comm=comm)
    assert comm.allreduce(1) == comm.size
