"""An argument error begins with the operation's name, if it is the library's own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays.views import view
from arraycomm._errors import name_operation, naming


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
