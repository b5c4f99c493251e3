"""The last step of a group: the ranks tell in it that they leave, and why."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from arraycomm._errors import PeerError
from arraycomm._protocol.header import Headers, Signature, Status, encode, show
from arraycomm._protocol.mismatch import how_left
from arraycomm._transports.base import Handle
from arraycomm._transports.control import ControlChannel
from arraycomm._transports.notes import ENDED


def leave_in_step(control: ControlChannel, text: str) -> Generator[Handle, None, None]:
    """Take part in one last step, which tells the others that this rank leaves, and why."""
    data = np.frombuffer(text.encode(errors="replace")[-control.payload :], np.uint8)
    control.ended = True
    show(control, encode(Signature(""), len(data), status=Status.LEAVING), data)
    yield control


def all_left(control: ControlChannel) -> bool:
    """Return whether every rank has come to the step of `leave_in_step`."""
    return all(status is Status.LEAVING for status in Headers(control).statuses())


def all_left_well(control: ControlChannel) -> bool:
    """Return whether the step of `leave_in_step` showed every rank leaving without a failure."""
    headers = Headers(control)
    return all(
        status is Status.LEAVING and headers.payload_bytes(rank) == 0
        for rank, status in enumerate(headers.statuses())
    )


def leaving_error(control: ControlChannel, headers: Headers) -> PeerError:
    """Return the error of a rank in whose step another one leaves."""
    rank = headers.statuses().index(Status.LEAVING)
    length = min(max(headers.payload_bytes(rank), 0), control.payload)
    text = headers.payload(rank, length).tobytes().decode(errors="replace")
    how = f"failed: {text}; it" if text else f"{how_left(ENDED)} and"
    return PeerError(f"rank {rank} {how} takes part no more", rank=rank, traceback=text)
