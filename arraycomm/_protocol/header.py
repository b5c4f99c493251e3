"""The header: one step of the control channel in which ranks show one another what they are about to call.

Word 1 of the slot is a digest of the whole signature; where all ranks show the same, they agree.
Where they do not, words 2 and 3 tell the call (operation, op, root) from the array (dtype, shape),
for which a rank that cannot know it shows 0, "matches anything". Word 4 packs status, operation,
dtype and number of dimensions, words 5 to 12 the shape, word 13 the length of the payload that
travels along, or -1, and word 14 the length of what is sent where that may differ between ranks.
Word 15 tells where the rank's arrays are, 0 for the host: ranks may differ in it, and still agree.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._callsite import call_site
from arraycomm._dtypes import BY_CODE, BY_DTYPE, DType, name_of
from arraycomm._errors import MismatchError, PeerError
from arraycomm._transports.base import Bytes, Handle
from arraycomm._transports.control import PAYLOAD, PREFIX, ControlChannel

MAX_DIMS: Final = 8
ANY: Final = -1
_CALL, _RAISING, _LEAVING, _TEXT, _MISMATCH, _JOINING = range(6)
_OPERATIONS: Final = (
    "",
    "init",
    "allreduce",
    "reduce",
    "bcast",
    "allgather",
    "allgatherv",
    "barrier",
    "bcast_object",
    "allgather_object",
    "split",
    "dup",
    "free",
    "synchronize",
    "allreduce_tree",
    "allreduce_gradients",
    "println",
    "finalize",
    "draw",
    "gather",
    "gatherv",
    "scatter",
    "scatterv",
    "alltoall",
    "alltoallv",
    "reduce_scatter",
    "scan",
    "exscan",
    "gather_object",
    "plan",
    "Plan",
    "mean_metrics",
    "DistributedDataContainer",
    "set_epoch",
    "batches",
    "load_state_dict",
    "join",
    "raise_together",
)
# The call of a rank that takes part in whatever the others call: see `join`.
_SHADOW: Final = "join"
_MAX_TEXT: Final = 16 << 20
_LONG: Final = 10_000
_WORDS: Final = struct.Struct("<15q")

Steps = Generator[Handle, None, Any]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a rank is about to call.

    `shape` is None on a rank that cannot know its array, and begins with `ANY` where the length of
    axis 0 may differ between ranks. `leaves` describes a tree, one
    `(path, description)` for each leaf, and `settings` what else decides how it travels; a header
    carries their digest.
    """

    operation: str
    op: str | None = None
    root: int | None = None
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None
    leaves: tuple[tuple[str, str], ...] | None = None
    settings: str = ""

    def __str__(self) -> str:
        if self.leaves is not None:
            return f"{self.head} of {len(self.leaves)} leaves"
        if self.shape is None or self.dtype is None:
            return self.head
        shape = str(self.shape).replace("-1", "any", 1) if ANY in self.shape else self.shape
        return f"{self.head} {name_of(self.dtype)} {shape}"

    @property
    def head(self) -> str:
        """The call without its array: what a rank always knows."""
        root = None if self.root is None else f"root={self.root}"
        inside = ", ".join(part for part in (self.op, root) if part is not None)
        return f"{self.operation}({inside})" if inside else self.operation


class Agreement(NamedTuple):
    """What all ranks showed: their slots, and, where they had to be asked, their details."""

    rows: Bytes
    words: memoryview
    details: list[dict[str, Any]] | None
    # Whether some ranks' arrays are on devices, and others' are not.
    mixed: bool = False

    def word(self, rank: int, number: int) -> int:
        """Return a word of the header of `rank`."""
        return self.words[rank * (len(self.words) // len(self.rows)) + number]

    def payload(self, rank: int, nbytes: int) -> Bytes:
        """Return the bytes that came with the header of `rank`; valid until the next step."""
        row: Bytes = self.rows[rank, PAYLOAD : PAYLOAD + nbytes]
        return row


def digest(*parts: object) -> int:
    """Return a nonzero signed 64-bit digest of the parts' representations."""
    raw = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little", signed=True) or 1


def encode(
    signature: Signature, payload: int, length: int = 0, status: int = _CALL, place: int = 0
) -> bytes:
    """Return the words 1 to 15 of a slot; see the module for the meaning of the arguments."""
    call = digest(signature.operation, signature.op, signature.root)
    array = 0
    shape: tuple[int, ...] = signature.shape or ()
    if signature.leaves is not None:
        array = digest(signature.leaves, signature.settings)
    elif signature.shape is not None:
        array = digest(str(signature.dtype), signature.shape)
    info = None if signature.dtype is None else BY_DTYPE.get(signature.dtype)
    code = 0 if info is None else info.code
    operation = _OPERATIONS.index(signature.operation)
    packed = status | operation << 8 | code << 16 | len(shape) << 32
    dims = (shape if len(shape) <= MAX_DIMS else ()) + (0,) * MAX_DIMS
    return _WORDS.pack(
        digest(call, array, packed, place),
        *(call, array, packed),
        *dims[:MAX_DIMS],
        *(payload, length, place),
    )


def operation_of(words: memoryview, base: int) -> str:
    """Return the operation that the slot at word `base` last named."""
    code = (words[base + 4] >> 8) & 0xFF
    return _OPERATIONS[code] if code < len(_OPERATIONS) else ""


def array_of(words: memoryview, base: int) -> tuple[DType, tuple[int, ...]] | None:
    """Return dtype and shape from the slot at word `base`, or None where they did not fit."""
    packed = words[base + 4]
    info, ndim = BY_CODE.get((packed >> 16) & 0xFFFF), packed >> 32
    if info is None or ndim > MAX_DIMS:
        return None
    return info.dtype, tuple(words[base + 5 : base + 5 + ndim])


def in_header(dtype: DType, shape: tuple[int, ...]) -> bool:
    """Tell whether a header has room for this dtype and shape; see `array_of`."""
    return dtype in BY_DTYPE and len(shape) <= MAX_DIMS


def agree(
    control: ControlChannel,
    signature: Signature,
    prefix: bytes,
    payload: Bytes | None,
    *,
    negotiable: bool = False,
    site: str | None = None,
) -> Steps:
    """Show `signature`, encoded as `prefix`, with its payload; return all ranks' `Agreement`.

    Raises `PeerError` where another rank is raising, `MismatchError` where signatures differ. With
    `negotiable`, trees that differ are returned with their details instead.
    """
    yield from _show(control, prefix, payload)
    return (yield from settle(control, signature, negotiable=negotiable, site=site))


def settle(
    control: ControlChannel,
    signature: Signature,
    *,
    negotiable: bool = False,
    site: str | None = None,
) -> Steps:
    """Judge the step in which all ranks have shown their signatures; see `agree`."""
    rows, words = _seen(control)
    own = words[control.rank * control.stride + 1]
    if all(words[peer * control.stride + 1] == own for peer in control.peers):
        return Agreement(rows, words, None)
    verdict = _judge(control, words)
    places = {words[base + 15] for base in range(0, control.size * control.stride, control.stride)}
    if verdict == _CALL:
        return Agreement(rows, words, None, len(places) > 1)
    if verdict == _LEAVING:
        control.ended = True
        raise _leaving_error(control, rows, words)
    mine = {
        "head": signature.head,
        "call": str(signature),
        "site": site or call_site(),
        "leaves": signature.leaves,
        "settings": signature.settings,
        "length": words[control.rank * control.stride + 14],
    }
    details = yield from exchange_details(control, mine)
    if verdict == _RAISING:
        _remember_told(control, details)
        raise peer_error(signature.operation, details)
    heads = {detail.get("head") for detail in details} - {_SHADOW}
    if negotiable and len(heads) == 1:
        return Agreement(rows, words, details, len(places) > 1)
    control.ended = True
    raise mismatch(details)


def fail_in_step(
    control: ControlChannel, operation: str, error: Exception, traceback: str, together: int = 0
) -> Steps:
    """Take part in the step of a call whose arguments were wrong, so that the others learn of it.

    `together` is how many blocks of `raise_together` the rank leaves the innermost of, where it is
    that call. Returns whether the ranks are still in step after it.
    """
    name = operation if operation in _OPERATIONS else ""
    yield from _show(control, encode(Signature(name), -1, status=_RAISING), None)
    _, words = _seen(control)
    verdict = _judge(control, words)
    if verdict != _LEAVING:
        mine = {"error": str(error), "traceback": traceback, "together": together}
        _remember_told(control, (yield from exchange_details(control, mine)))
    control.ended = verdict != _RAISING
    return not control.ended


def _remember_told(control: ControlChannel, details: Sequence[dict[str, Any]]) -> None:
    depths = [depth for detail in details if (depth := detail.get("together", 0))]
    if depths:
        control.left_together = (control.step, min(depths))


def leave_in_step(control: ControlChannel, text: str) -> Steps:
    """Take part in one last step that tells the others that this rank leaves, and why."""
    data = np.frombuffer(text.encode(errors="replace")[-control.payload :], np.uint8)
    control.ended = True
    yield from _show(control, encode(Signature(""), len(data), status=_LEAVING), data)


def all_left_well(control: ControlChannel) -> bool:
    """Tell whether the step of `leave_in_step` showed every rank leaving without a failure."""
    _, words = _seen(control)
    bases = range(0, control.size * control.stride, control.stride)
    return all(words[base + 4] & 0xFF == _LEAVING and words[base + 13] == 0 for base in bases)


def mismatch(details: Sequence[dict[str, Any]]) -> MismatchError:
    """Return the error that shows what each rank called, ranks of one call together."""
    groups: dict[str, list[int]] = {}
    for rank, detail in enumerate(details):
        said = f"{detail.get('call', 'an unknown call')} at {detail.get('site', 'unknown')}"
        if "error" in detail:
            said = f"raised {detail['error']}"
        groups.setdefault(said, []).append(rank)
    lines = "; ".join(f"{_ranks(ranks)}: {said}" for said, ranks in groups.items())
    difference = first_difference(details)
    return MismatchError(
        f"ranks of one communicator called different things: {lines}"
        + (f". {difference}" if difference else "")
    )


def first_difference(details: Sequence[dict[str, Any]]) -> str:
    """Name the first leaf in which the trees of two ranks differ, or return an empty string."""
    first = details[0].get("leaves")
    for rank, detail in enumerate(details):
        other = detail.get("leaves")
        if first is None or other is None or first == other:
            continue
        for (path, said), (other_path, other_said) in zip(first, other, strict=False):
            if path != other_path:
                return f"First difference: {path} on rank 0, {other_path} on rank {rank}"
            if said != other_said:
                return f"First difference: {path} is {said} on rank 0, {other_said} on rank {rank}"
        longer, where = (first, 0) if len(first) > len(other) else (other, rank)
        path = longer[min(len(first), len(other))][0]
        return f"First difference: {path} is on rank {where} only"
    for rank, detail in enumerate(details):
        if detail.get("settings", "") != details[0].get("settings", ""):
            return (
                f"First difference: {details[0].get('settings')} on rank 0, "
                f"{detail.get('settings')} on rank {rank}"
            )
    return ""


def _show(control: ControlChannel, prefix: bytes, payload: Bytes | None) -> Steps:
    parity = (control.step + 1) & 1
    slot = control.mine[parity]
    slot[PREFIX] = control.shown[parity] = prefix
    if payload is not None and len(payload):
        slot[PAYLOAD : PAYLOAD + len(payload)] = payload.data
    control.post()
    yield control


def _seen(control: ControlChannel) -> tuple[Bytes, memoryview]:
    parity = control.step & 1
    return control.rows[parity], control.words[parity]


def _judge(control: ControlChannel, words: memoryview) -> int:
    """Return `_CALL` where the slots match, else what stands in the way."""
    bases = range(0, control.size * control.stride, control.stride)
    statuses = [words[base + 4] & 0xFF for base in bases]
    if _LEAVING in statuses:
        return _LEAVING
    calling = [base for base, status in zip(bases, statuses, strict=True) if status == _CALL]
    calls = {words[base + 2] for base in calling}
    arrays = {words[base + 3] for base in calling} - {0}
    live = calls - {digest(_SHADOW, None, None)}
    if len(live) > 1 or len(arrays) > 1:
        return _MISMATCH
    if _RAISING in statuses:
        return _RAISING
    return _JOINING if live and live != calls else _CALL


def _leaving_error(control: ControlChannel, rows: Bytes, words: memoryview) -> PeerError:
    for rank in range(control.size):
        base = rank * control.stride
        if words[base + 4] & 0xFF == _LEAVING:
            length = min(max(words[base + 13], 0), control.payload)
            text = rows[rank, PAYLOAD : PAYLOAD + length].tobytes().decode(errors="replace")
            how = f"failed: {text}" if text else "has reached the end of its program"
            return PeerError(f"rank {rank} {how}; it takes part no more", rank=rank, traceback=text)
    raise AssertionError("no rank is leaving")


def peer_error(operation: str, details: Sequence[dict[str, Any]]) -> PeerError:
    """Return the error of the ranks that did not raise, from the details of one that did."""
    rank = next(rank for rank, detail in enumerate(details) if "error" in detail)
    text = str(details[rank].get("traceback", ""))
    error = PeerError(
        f"{operation}: rank {rank} raised instead of taking part; its traceback:\n{text}",
        rank=rank,
        traceback=text,
    )
    error.in_step = True
    return error


def exchange_details(control: ControlChannel, mine: dict[str, Any]) -> Steps:
    text = json.dumps(mine)
    if len(text) > _MAX_TEXT:
        text = json.dumps(
            {key: str(value)[-_LONG:] for key, value in mine.items() if key != "leaves"}
        )
    texts = yield from _gather_texts(control, text)
    details: list[dict[str, Any]] = []
    for text in texts:
        detail = json.loads(text)
        if detail.get("leaves") is not None:
            detail["leaves"] = [tuple(leaf) for leaf in detail["leaves"]]
        details.append(detail)
    return details


def _gather_texts(control: ControlChannel, text: str) -> Steps:
    """Every rank's text, in as many steps as the longest needs."""
    data = text.encode()
    received = [bytearray() for _ in range(control.size)]
    start, rounds = 0, 1
    while start < rounds * control.payload:
        piece = np.frombuffer(data[start : start + control.payload], np.uint8)
        yield from _show(control, encode(Signature(""), len(data), status=_TEXT), piece)
        rows, words = _seen(control)
        for rank in range(control.size):
            length = words[rank * control.stride + 13]
            if not 0 <= length <= _MAX_TEXT:
                raise PeerError(f"rank {rank} sent a malformed header", rank=rank)
            rounds = max(rounds, -(-length // control.payload))
            count = min(max(length - start, 0), control.payload)
            received[rank] += rows[rank, PAYLOAD : PAYLOAD + count].tobytes()
        start += control.payload
    return [bytes(part).decode() for part in received]


def _ranks(ranks: Sequence[int]) -> str:
    """Name ranks in ascending order, runs of three and more by their ends."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
