"""What ranks show in the step of a call that has a fast path, and what follows on devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import BufferView
from arraycomm._arrays.frameworks.base import ByAddress
from arraycomm._arrays.views import by_address
from arraycomm._calls.operation import NO_SHARE, Operation, Share
from arraycomm._calls.refusals import is_numpy
from arraycomm._calls.runner import NO_HEADERS, OperationClass, Runner, prefix_of
from arraycomm._collectives.movements import Bcast, FromRoot
from arraycomm._dtypes import DType
from arraycomm._protocol.group import Group
from arraycomm._protocol.header import ALL_ON_DEVICE, MAX_DIMS, ON_HOST, Headers, Signature
from arraycomm._transports.base import Steps
from arraycomm._transports.control import PREFIX, ControlChannel

# The digest in a header, by which ranks compare calls.
DIGEST: Final = slice(0, 8)
_PLAIN: Final = (np.ndarray, type(None))


class Form(NamedTuple):
    """The dtype and the shape of an array."""

    dtype: DType
    shape: tuple[int, ...]


class Call(NamedTuple):
    """A call `operation(context, x, *rest, out)`, and the key by which its fast path is found."""

    key: tuple[Any, ...]
    operation: OperationClass[...]
    rest: tuple[Any, ...]


class Step(NamedTuple):
    """What a rank shows in the step of a call, with the array that it sends, and what it gets.

    `headers` is what all ranks have shown, or its beginning, one after the other. If the call is
    `plain`, its arrays are NumPy's. Otherwise `addresses` says whether they need no view.
    """

    signature: Signature
    header: bytes
    headers: bytes
    sends: Form | None
    gets: Form | None
    share: Share
    plain: bool
    addresses: ByAddress | None


def step_of(runner: Runner, made: Operation, x: Any, result: Any) -> Step | None:
    """Return the step of a small call that has just been made; None if it is not known."""
    control, share = runner.group.control, made.share()
    found = Headers(control)
    made.payload = made.pack(made.placement.inline_bytes)
    header, shown = prefix_of(made), bytes(control.mine[control.step & 1][PREFIX])
    is_large = made.payload is None and made.header_independent
    # If further steps have been made, it is lost what all ranks have shown.
    if share is None or is_large or not made.placement.host or shown != header:
        return None
    # What is on a device of another rank does not come with its header, nor from one in `join`.
    calls = set(map(found.call_digest, range(control.size)))
    if found.device_flags() != {ON_HOST} or len(calls) > 1:
        return None
    # A structure may be a record in the next call, of an equal dtype.
    is_structure = getattr(getattr(x, "dtype", None), "names", None) is not None
    plain = type(x) in _PLAIN and type(result) in _PLAIN and not is_structure
    source: BufferView | None = None if made.payload is None else getattr(made, "source", None)
    if source is not None and source.copied:
        # It would be copied in each call.
        return None
    sends = None if source is None else Form(source.dtype, source.shape)
    gets = None if made.target is None else Form(made.target.dtype, made.target.shape)
    # The native part holds no shapes of more dimensions, of which a result may have one more.
    if any(form is not None and len(form.shape) > MAX_DIMS + 1 for form in (sends, gets)):
        return None
    compared = DIGEST
    if isinstance(made, FromRoot):
        compared, known = slice(None), found.array(made.root)
        if known is None or found.payload_bytes(made.root) < 0:
            return None
        # Else it may be of the root's framework once that is imported here, or has the dtype.
        is_known = made.is_root or x is not None or made.out is not None
        if not (is_known or is_numpy(found.raw_words(made.root)[0])):
            return None
        # What others pass to a scatter is not looked at.
        if not (plain or made.is_root or (made.whole and x is not None)):
            return None
        gets = Form(*known)
    elif not found.agree():
        return None
    headers = _shown(control, header, compared)
    return Step(made.signature, header, headers, sends, gets, share, plain, by_address(x))


def _shown(control: ControlChannel, own: bytes, compared: slice) -> bytes:
    """Return what all ranks have shown in the last step."""
    parity = control.step & 1
    if control.alike[parity]:
        return own[compared] * control.size
    return b"".join(row[PREFIX].tobytes()[compared] for row in control.rows[parity])


def moving(made: Operation, take_apart: Callable[[Any], list[Any]]) -> Steps:
    """Move what a call moves that has no more to learn from headers; return its results."""
    if isinstance(made, Bcast) and made.target is not None:
        yield from made.move(None, made.target.dtype, made.target.shape)
    elif made.may_go_ahead or made.negotiable:
        yield from made.steps(NO_HEADERS)
    else:
        raise TypeError(made.name)
    return take_apart(made.result(NO_HEADERS))


def step_on_device(group: Group, made: Operation) -> Step | None:
    """Return the step of a call on devices; None if its headers are not known."""
    header, control, signature = prefix_of(made), group.control, made.signature
    headers = header[DIGEST] * group.size
    if len(signature.shape or ()) > MAX_DIMS:
        return None
    if isinstance(made, Bcast):
        # What others pass may be unlike the root's.
        found = Headers(control)
        if found.device_flags() != {ALL_ON_DEVICE} or found.array(made.root) is None:
            return None
        if bytes(control.mine[control.step & 1][PREFIX]) != header:
            return None
        headers = _shown(control, header, slice(None))
    return Step(signature, header, headers, None, None, NO_SHARE, plain=False, addresses=None)
