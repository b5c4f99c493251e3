"""The header: one step of the control channel in which each rank shows what it is about to call.

A header is fifteen words of 8 bytes. If the digests of all ranks are equal, the ranks agree. If
not, two smaller digests tell the call (operation, op, root) from the array (dtype, shape); a rank
that cannot know its array shows 0 for it, which matches anything. Only this module knows where in a
header each field lies. Word 0 is the stamp, the number of the step, written last; it belongs to the
control channel.

1      the digest of the words 2, 3, 4 and 15, which is compared
2      the digest of the call
3      the digest of the array, or of a tree: paths, dtypes and shapes of its leaves, and settings
4      the status, the operation's code, the dtype's code, the number of dimensions
5-12   the shape
13     the bytes of the payload; -1 if the elements are still to come
14     the free word
15     the device flag: 0 if all arrays are on the host, 1 if all are on devices, else a digest of
       which leaves are

Ranks may differ in the free word, which the digest leaves out. What it says has a type for each
use:

an int       a length, of axis 0 or in bytes, or a flag; see `Headers.lengths`
dtypes       that a result cannot have, and the framework of a root (`_calls/refusals.py`)
a digest     of what may differ if all ranks take it well, such as the adapter of an optimizer
a weight     of gradients (`_training/weighted.py`)
`Place`      where a rank is in its training (`_training/rounds.py`)
`Where`      in which update, and at which call of a program (`_training/numbered.py`)

Of a tree, whose shapes are in a digest, the words of the shape are free as well
(`_training/comparison/verification.py`).
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final, NamedTuple

from arraycomm._dtypes import BY_CODE, BY_DTYPE, DType, name_of
from arraycomm._protocol.announced import check_payload, check_size, malformed
from arraycomm._transports.base import Bytes
from arraycomm._transports.control import PAYLOAD, PREFIX, ControlChannel

MAX_DIMS: Final = 8
# The length of an axis that may differ between ranks.
ANY: Final = -1
# What a header says of arrays: all on the host, or all on devices. Trees in between show a digest.
ON_HOST: Final = 0
ALL_ON_DEVICE: Final = 1
# A length beyond this is a broken header, not a request for so much memory.
_MAX_LENGTH: Final = 1 << 40

_WORDS: Final = struct.Struct("<15q")
_DIGEST, _CALL, _ARRAY, _PACKED, _SHAPE = 1, 2, 3, 4, 5
_PAYLOAD_BYTES, _FREE, _DEVICE_FLAG = 13, 14, 15

_codes: dict[str, int] = {"": 0}
_names: dict[int, str] = {0: ""}


class Status(enum.IntEnum):
    """What a rank does in a step."""

    CALLING = 0
    RAISING = 1
    LEAVING = 2
    DETAILS = 3


class LeafSpec(NamedTuple):
    """One leaf of a tree, as ranks compare it: its path, its dtype or type, an array's shape."""

    path: str
    kind: str
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.kind if self.shape is None else f"{self.kind} {self.shape}"


# What decides how a tree is communicated, beside its leaves: names and values.
Settings = tuple[tuple[str, str | int | None], ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a rank is about to call.

    `shape` is None on a rank that cannot know its array, and begins with `ANY` if the length of
    axis 0 may differ between ranks. A header carries a digest of `leaves` and `settings`.
    """

    operation: str
    op: str | None = None
    root: int | None = None
    dtype: DType | None = None
    shape: tuple[int, ...] | None = None
    leaves: tuple[LeafSpec, ...] | None = None
    settings: Settings = ()
    _hash: int | None = field(default=None, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # Worked out once: encoded headers are found by it, and leaves may be many.
        if self._hash is None:
            own = hash((self.operation, self.op, self.root, self.dtype, self.shape, self.leaves))
            object.__setattr__(self, "_hash", own)
        return self._hash or 0

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


class Headers:
    """All ranks' headers and payloads of one step, valid until the next step but one."""

    __slots__ = ("rows", "size", "stride", "words")

    def __init__(self, control: ControlChannel, steps_ago: int = 0) -> None:
        parity = (control.step - steps_ago) & 1
        self.rows, self.size = control.rows[parity], control.size
        self.words, self.stride = control.words[parity], control.stride
        if control.alike[parity]:
            # Everyone's words are those of this rank.
            self.words, self.stride = control.my_words[parity], 0

    def _word(self, rank: int, field: int) -> int:
        word: int = self.words[rank * self.stride + field]
        return word

    def _all(self, field: int) -> list[int]:
        words, stride = self.words, self.stride
        return words[field::stride].tolist() if stride else [words[field]] * self.size

    def agree(self) -> bool:
        """Return whether all ranks show the same."""
        return not self.stride or len(set(self._all(_DIGEST))) == 1

    def statuses(self) -> list[Status]:
        """Return what each rank does in this step."""
        return [self._status(rank) for rank in range(self.size)]

    def _status(self, rank: int) -> Status:
        code = self._word(rank, _PACKED) & 0xFF
        try:
            return Status(code)
        except ValueError:
            raise malformed(rank, f"the status {code}") from None

    def call_digest(self, rank: int) -> int:
        """Return the digest of a rank's operation, op and root."""
        return self._word(rank, _CALL)

    def array_digest(self, rank: int) -> int:
        """Return the digest of a rank's dtype and shape, or of its tree; 0 if it knows none."""
        return self._word(rank, _ARRAY)

    def operation(self, rank: int) -> str:
        """Return the operation that a rank names, or an empty string."""
        return _names.get((self._word(rank, _PACKED) >> 8) & 0xFF, "")

    def array(self, rank: int) -> tuple[DType, tuple[int, ...]] | None:
        """Return a rank's dtype and shape, or None if the header has no room for them."""
        packed = self._word(rank, _PACKED)
        info, ndim = BY_CODE.get((packed >> 16) & 0xFFFF), packed >> 32
        if info is None or ndim > MAX_DIMS:
            return None
        first = rank * self.stride + _SHAPE
        shape = tuple(self.words[first : first + ndim])
        check_size(rank, shape[shape[:1] == (ANY,) :], info.dtype.itemsize)
        return info.dtype, shape

    def payload_bytes(self, rank: int) -> int:
        """Return how many bytes came with a rank's header; -1 if its elements are still to come."""
        return self._word(rank, _PAYLOAD_BYTES)

    def payload(self, rank: int, nbytes: int) -> Bytes:
        """Return the bytes that came with a rank's header."""
        row: Bytes = self.rows[rank, PAYLOAD : PAYLOAD + nbytes]
        return row

    def payloads(self, nbytes: int) -> Bytes:
        """Return what came with all headers, one row a rank, if each rank sent `nbytes` bytes."""
        rows: Bytes = self.rows[:, PAYLOAD : PAYLOAD + nbytes]
        return rows

    def raw_words(self, rank: int) -> tuple[int, ...]:
        """Return the word of a rank's header, and a tree's further ones; see `with_words`."""
        first = rank * self.stride + _SHAPE
        return self._word(rank, _FREE), *self.words[first : first + MAX_DIMS]

    def lengths(self, itemsize: int | None = None, *, empty: bool = False) -> list[int]:
        """Return what each rank announces as its length, if the ranks may differ in it.

        With `itemsize`, what came with a rank's header has to be this many bytes for each. `empty`
        rows may be any number, which takes no memory.
        """
        lengths = self._all(_FREE)
        for rank, length in enumerate(lengths):
            if length < 0 or (length > _MAX_LENGTH and not empty):
                raise malformed(rank, f"a length of {length}")
            if itemsize is not None and (nbytes := self.payload_bytes(rank)) >= 0:
                check_payload(rank, nbytes, length * itemsize)
        return lengths

    def device_flags(self) -> set[int]:
        """Return what the ranks say of where their arrays are; see `ON_HOST`."""
        return set(self._all(_DEVICE_FLAG))


def register(operation: str, code: int) -> None:
    """Give an operation the code by which headers name it."""
    if _codes.get(operation, code) != code or _names.get(code, operation) != operation:
        raise ValueError(f"code {code} of {operation} is {_names.get(code)}'s, or it has another")
    _codes[operation], _names[code] = code, operation


def digest(*parts: object) -> int:
    """Return a nonzero signed 64-bit digest of the parts' representations."""
    raw = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little", signed=True) or 1


def call_digest(signature: Signature) -> int:
    """Return the digest of a signature's operation, op and root."""
    return digest(signature.operation, signature.op, signature.root)


def encode(
    signature: Signature,
    payload_bytes: int,
    *,
    status: Status = Status.CALLING,
    device_flag: int = ON_HOST,
) -> bytes:
    """Return a header as bytes; see `Headers` for the meaning of its fields."""
    call = call_digest(signature)
    array = 0
    shape: tuple[int, ...] = signature.shape or ()
    if signature.leaves is not None:
        array = digest(tuple(map(tuple, signature.leaves)), signature.settings)
    elif signature.shape is not None and signature.dtype is not None:
        array = digest(name_of(signature.dtype), signature.shape)
    info = None if signature.dtype is None else BY_DTYPE.get(signature.dtype)
    dtype_code = 0 if info is None else info.code
    code = _codes.get(signature.operation, 0)
    packed = status | code << 8 | dtype_code << 16 | len(shape) << 32
    dims = (shape if len(shape) <= MAX_DIMS else ()) + (0,) * MAX_DIMS
    return _WORDS.pack(
        digest(call, array, packed, device_flag),
        *(call, array, packed),
        *dims[:MAX_DIMS],
        *(payload_bytes, 0, device_flag),
    )


def digest_of(prefix: bytes) -> int:
    """Return the digest in an encoded header."""
    found: int = _WORDS.unpack(prefix)[_DIGEST - 1]
    return found


def with_words(prefix: bytes, word: int, further: Sequence[int] = ()) -> bytes:
    """Return an encoded header with its free word, and of a tree up to `MAX_DIMS` more."""
    words = list(_WORDS.unpack(prefix))
    words[_FREE - 1] = word
    words[_SHAPE - 1 : _SHAPE - 1 + len(further)] = further
    return _WORDS.pack(*words)


def has_room_for(dtype: DType, shape: tuple[int, ...]) -> bool:
    """Return whether a header has room for this dtype and shape; see `Headers.array`."""
    return dtype in BY_DTYPE and len(shape) <= MAX_DIMS


def show(control: ControlChannel, prefix: bytes, payload: Bytes | None) -> None:
    """Post a header and what travels with it; the step ends once every rank has shown its own."""
    slot = control.mine[(control.step + 1) & 1]
    slot[PREFIX] = prefix
    length = 0 if payload is None else len(payload)
    if payload is not None and length:
        slot[PAYLOAD : PAYLOAD + length] = payload.data
    control.post(length)
