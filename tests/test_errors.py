"""An argument error begins with the operation's name, if it is the library's own."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._arrays.views import view
from arraycomm._errors import is_interrupt, name_operation, naming
from arraycomm._transports.threads import make_group
from properties.test_giving_up_laws import TimeUpError
from tests.support import internals


def raised(call: Callable[[], Any], *, skip: int = 2) -> Exception:
    """Return what a call raises, without the frames of this test, which are not the library's."""
    with pytest.raises(Exception) as caught:
        call()
    for _ in range(skip):
        caught.value.__traceback__ = caught.value.__traceback__.tb_next
    return caught.value


class Producer:
    """Raises in a method that the library calls."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def __array_interface__(self) -> Any:
        raise self._error


@pytest.mark.parametrize("x", [None, "text", np.ma.ones(3), 1 << 80, np.array([None])])
def test_the_operation_comes_before_the_message(x: Any) -> None:
    error = raised(lambda: view(x))
    message = str(error)
    for operation in ("allreduce", "allreduce", "bcast"):
        name_operation(error, operation)
        # What takes the argument instead may follow.
        assert re.fullmatch(rf"allreduce: {re.escape(message)}(, or use [\w ]+)?", str(error))


def test_a_name_that_is_there_already_is_not_repeated() -> None:
    error = raised(lambda: view(None, "bcast: x"))
    name_operation(error, "bcast")
    assert str(error).startswith("bcast: x must be an array")


@pytest.mark.parametrize(
    "error", [TypeError("a"), ValueError("a", "b"), ValueError(), KeyError("a"), MemoryError("a")]
)
def test_what_the_caller_raised_stays_as_it_is(error: Exception) -> None:
    before = error.args

    def fail() -> None:
        raise error

    name_operation(raised(fail, skip=0), "allreduce")
    assert error.args == before


def test_what_a_function_of_the_caller_raised_inside_the_library_stays_as_it_is() -> None:
    error = raised(lambda: view(Producer(MemoryError("none left"))))
    name_operation(error, "allreduce")
    assert str(error) == "none left"


def test_what_a_compiled_function_raised_stays_as_it_is() -> None:
    from arraycomm._arrays.buffer import allocate

    error = raised(lambda: allocate((1 << 62,), np.dtype("f8")))
    assert isinstance(error, (ValueError, OverflowError))
    before = str(error)
    name_operation(error, "allreduce")
    assert str(error) == before


def test_a_block_can_be_named() -> None:
    from arraycomm import exchange

    with pytest.raises(TypeError, match=r"^exchange: x must be an array"), naming("bcast"):
        exchange(None, "numpy")


# What a signal's handler raises


def handler(number: int, frame: Any, limit: float = 1.0) -> None:
    raise TimeUpError(limit)


class Handler:
    """Is none any more when it raises."""

    def __call__(self, number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        handler(number, None)


class Late:
    """Has its time over while it is read."""

    dtype, shape = np.dtype(np.float32), (3,)

    def read(self, *_: Any, **__: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return 1, 0

    __reduce__ = __dlpack__ = __dlpack_device__ = read


CALLS = {
    "array": lambda c: c.allreduce(Late()),
    "object": lambda c: c.bcast_object(Late()),
    "sendrecv": lambda c: c.sendrecv(Late(), 0, 0),
    "tree": lambda c: ac.allreduce_tree({"x": np.ones(3), "y": Late()}, comm=c),
    "difference": lambda c: ac.raise_on_difference([Late()], comm=c),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_handler_raises_leaves_a_call_as_it_is(name: str) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    try:
        for each in (
            handler,
            Handler(),
            partial(handler, limit=2.0),
            lambda *args: handler(*args, 3.0),
        ):
            signal.signal(signal.SIGUSR1, each)
            with pytest.raises(TimeUpError) as caught:
                CALLS[name](internals.communicator(make_group(1)[0]))
            assert is_interrupt(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not is_interrupt(raised(lambda: handler(0, None)))


@pytest.mark.parametrize("instead", [None, 1])
def test_what_functions_make_of_their_arguments_does_not_matter(instead: Any) -> None:
    def fail(*args: Any) -> None:
        args = instead
        raise TimeUpError(args)

    assert not is_interrupt(raised(fail, skip=0))
