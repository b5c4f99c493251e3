"""What work in another process gave or raised, as a pickle."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from typing import Any

from arraycomm._callsite import describe_exception


def cloudpickle() -> Any:
    """Return what pickles the functions of a program itself, None if it is not installed."""
    # Before 1.6 joblib has a copy of its own.
    for name in ("cloudpickle", "joblib.externals.cloudpickle"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def outcome_of(work: Callable[[], Any], where: str) -> tuple[bytes, BaseException | None]:
    """Do some work; return the pickle of its result and its exception, and the latter.

    A note of the exception says `where`, and has the traceback.
    """
    dumps = (cloudpickle() or pickle).dumps
    try:
        return dumps((work(), None)), None
    except BaseException as error:
        note = f"{where}:\n{describe_exception(error)}"
        error.add_note(note)
        try:
            data: bytes = dumps((None, error))
            pickle.loads(data)
        except Exception:
            # Exceptions of some classes cannot be pickled, or not be read again.
            data = pickle.dumps((None, RuntimeError(note)))
        return data, error
