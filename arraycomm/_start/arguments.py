"""The arguments of `init`: their defaults, what is wrong with one, and whether the ranks agree."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from arraycomm._callsite import describe_raise
from arraycomm._checks import check_bool, check_seconds
from arraycomm._cuda.device import DeviceRequest
from arraycomm._errors import MismatchError, text_of
from arraycomm._native.build import build
from arraycomm._protocol.details import Failure, Nothing
from arraycomm._protocol.group import Options
from arraycomm._protocol.mismatch import by_ranks, peer_error
from arraycomm._protocol.waits import still_waiting

BACKENDS: Final = ("auto", "self", "mpi", "nccl", "processes", "threads")
_YES: Final = ("1", "true", "yes", "on")
_NO: Final = ("0", "false", "no", "off")
_DEFAULT: Final = 1800.0
# The most characters of an error that others are told, so that it fits into a line of `joining`.
_TOLD: Final = 16 << 10


class Default:
    """What an argument is if it is not passed; told apart from the same value that is passed."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def default(value: Any) -> Any:
    """Return the default of an argument; signatures show its value."""
    return Default(value)


def check(backend: Any, verbose: Any, report_after: Any, *, first: bool) -> None:
    """Raise if one of these is wrong; take over the last one."""
    if backend not in BACKENDS:
        raise ValueError(f"init: backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    check_bool(verbose, "init: verbose")
    # A first `init` may leave it to the variable.
    if not isinstance(report_after, Default):
        still_waiting.choose(report_after)
    elif first:
        still_waiting.choose(_seconds(still_waiting.VARIABLE, still_waiting.DEFAULT))


def _seconds(variable: str, otherwise: float) -> float | None:
    """Return the seconds that a variable of the environment says, None for ever."""
    said = os.environ.get(variable, str(otherwise))
    try:
        return None if said.lower() == "none" else float(said)
    except ValueError:
        raise ValueError(
            f"init: {variable} must be a number of seconds or none; got {said!r}"
        ) from None


CONSTANTS: Final = {"device": None, "check": True, "reproducible": True, "timeout": 1800.0}


def defaults() -> dict[str, Any]:
    timeout = _seconds("ARRAYCOMM_TIMEOUT", 1800.0)
    return {**CONSTANTS, "check": _default_check(), "timeout": timeout}


def _default_check() -> bool:
    said = os.environ.get("ARRAYCOMM_CHECK") or "1"
    if said.lower() not in _YES + _NO:
        allowed = ", ".join(_YES + _NO)
        raise ValueError(f"init: ARRAYCOMM_CHECK must be one of {allowed}; got {said!r}")
    return said.lower() in _YES


def seconds_of(timeout: Any) -> float:
    """Return the seconds of an argument that is still to be checked; a default if it is wrong."""
    try:
        seconds = check_seconds(timeout)
    except (TypeError, ValueError):
        return _DEFAULT
    return inf if seconds is None else seconds


@dataclass(frozen=True)
class Arguments:
    """What this rank passed to `init` or `from_mpi`, before it is checked."""

    backend: Any
    device: Any
    check: Any
    reproducible: Any
    timeout: Any
    # Another argument or a variable of the environment is wrong: `checked` raises it, and so tells
    # the others.
    wrong: Exception | None = None
    # Whether they are those of `init`.
    over_world: bool = True

    def checked(self, local_rank: int, local_size: int) -> tuple[Options, DeviceRequest]:
        """Return the options and the request of this rank, or raise what is wrong with them."""
        if self.wrong is not None:
            raise self.wrong
        options = Options(self.check, self.reproducible, self.timeout)
        own_device = self._own_device(local_rank, local_size)
        return options, DeviceRequest.checked(self.backend, own_device, local_rank)

    def _own_device(self, local_rank: int, local_size: int) -> Any:
        devices = self.device
        if not isinstance(devices, list | tuple):
            return devices
        if len(devices) < local_size:
            raise ValueError(
                "init: a list of devices must have one for each rank of a node, by local rank; got "
                f"{len(devices)} for {local_size} ranks: {devices!r}"
            )
        return devices[local_rank]


# Gives the other ranks a text of a name, and returns those of this name of all ranks; collective.
Tell = Callable[[str, str], Sequence[str]]


def refuse_different(sight: str, tell: Tell) -> None:
    """Raise on every rank if their builds differ: they would misread one another's headers.

    `sight` is what this rank has seen of its own.
    """
    if len(set(tell("version", sight))) == 1 and len(set(sight.split()[1:])) < 2:
        return
    # What another version says has one line.
    said = tell("build", "\n".join(build()))
    builds = [(*text.split("\n"), "", "", "")[:4] for text in said]
    natives = {digest for _, _, *digests in builds for digest in digests if digest}
    if len({code for _, code, *_ in builds}) > 1 or len(natives) > 1:
        raise MismatchError(
            "init: ranks run different versions of arraycomm, or a C part of other sources: "
            f"{by_ranks([_said(*one) for one in builds])}; install the same version for all ranks, "
            "build the C part again (pip install -e .) or set ARRAYCOMM_NATIVE=0, and start the "
            "program again"
        )


def _said(place: str, code: str, built_from: str, sources: str) -> str:
    here = f", whose sources there are {sources}" if sources not in ("", built_from) else ""
    return f"{place} (code {code}, C part {built_from or 'none'}{here})"


def agree(
    check: Callable[[], tuple[Options, DeviceRequest]], tell: Tell
) -> tuple[Options, DeviceRequest]:
    """Return this rank's arguments, once every rank has found its own to be right.

    Otherwise it raises, and all others raise `PeerError`.
    """
    try:
        found = check()
    except Exception as error:
        texts = [text[:_TOLD] for text in (text_of(error), describe_raise(error))]
        tell("arguments", json.dumps(texts))
        raise
    said = [json.loads(text) for text in tell("arguments", "[]")]
    if any(said):
        raise peer_error("init", [Failure(*texts) if texts else Nothing() for texts in said])
    return found
