"""Details: what ranks tell one another in further steps, each kind of message a class.

Details are exchanged only when a header is not enough: when ranks disagree, when one has failed, or
when a dtype does not fit in a header. They travel as JSON.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Generator
from dataclasses import dataclass, fields
from threading import RLock
from typing import Any, Final, Self

import numpy as np
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from arraycomm._dtypes import BY_DTYPE, BY_NAME, DType, name_of
from arraycomm._protocol.announced import check_size, malformed
from arraycomm._protocol.header import (
    ANY,
    Headers,
    LeafSpec,
    Settings,
    Signature,
    Status,
    encode,
    has_room_for,
    show,
)
from arraycomm._transports.base import Handle
from arraycomm._transports.control import ControlChannel

_MAX_TEXT: Final = 16 << 20
_LONG: Final = 10_000

# The types of fields that JSON has; its other values are made into what a class has by its `read`.
_TYPES: Final = {"str": str, "int": int, "bool": bool}

_parsing = RLock()


@dataclass(frozen=True, slots=True)
class Detail:
    """A message of one kind; its fields are what JSON knows."""

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        """Return the message of these fields."""
        return cls(**values)

    def values(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def shortened(self) -> dict[str, Any]:
        """Return the fields with only the end of long texts."""
        return {
            name: value[-_LONG:] if isinstance(value, str) else value
            for name, value in self.values().items()
        }


@dataclass(frozen=True, slots=True)
class Nothing(Detail):
    """A rank has nothing to tell, and takes part in the exchange."""


@dataclass(frozen=True, slots=True)
class CallDetail(Detail):
    """What a rank called, and where, and whether ranks may differ in the trees that they pass."""

    head: str
    call: str
    site: str
    leaves: tuple[LeafSpec, ...] | None = None
    settings: Settings = ()
    word: int = 0
    negotiable: bool = False
    further_words: tuple[int, ...] = ()

    @classmethod
    def of(cls, made: Signature, site: str, words: tuple[int, ...], *, negotiable: bool) -> Self:
        """Return what a rank calls, with the free words of its header."""
        word, *further = words
        return cls(
            *(made.head, str(made), site, made.leaves, made.settings),
            *(word, negotiable, tuple(further)),
        )

    @classmethod
    def read(cls, values: dict[str, Any]) -> Self:
        leaves = values.pop("leaves", None)
        if leaves is not None:
            leaves = tuple(_leaf(*leaf) for leaf in leaves)
        settings = tuple((name, value) for name, value in values.pop("settings", ()))
        return cls(**values, leaves=leaves, settings=settings)

    def shortened(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("head", "call", "site")}
        texts = {name: text[-_LONG:] for name, text in kept.items()}
        words = {"word": self.word, "further_words": self.further_words}
        return {**texts, **words, "negotiable": self.negotiable}


@dataclass(frozen=True, slots=True)
class Failure(Detail):
    """What a rank raised; how many blocks of `raise_together` it was in, if it left one of them."""

    error: str
    traceback: str
    together: int = 0


@dataclass(frozen=True, slots=True)
class Description(Detail):
    """A dtype and shape for which a header has no room, as text."""

    array: str

    @classmethod
    def if_needed(cls, dtype: DType, shape: tuple[int, ...]) -> Self | None:
        """Return the description of a dtype and shape, or None if they fit in a header."""
        if has_room_for(dtype, shape):
            return None
        try:
            descr: Any = name_of(dtype) if dtype in BY_DTYPE else dtype_to_descr(dtype)
            faithful = _dtype_of(descr) == dtype
        except ValueError:
            # Of fields that overlap, or that are not in the order of their offsets.
            faithful = False
        if not faithful:
            raise TypeError(
                f"dtype {dtype} cannot be described to the other ranks; send its fields one by one"
            )
        return cls(repr((descr, shape)))

    def parse(self, rank: int) -> tuple[DType, tuple[int, ...]]:
        """Return the dtype and shape, which `rank` has announced."""
        try:
            # Two threads of one interpreter may not make syntax trees at once: CPython 3.11 counts
            # their depths in one place, and raises SystemError.
            with _parsing:
                descr, shape = ast.literal_eval(self.array)
            dtype, shape = _dtype_of(descr), tuple(map(operator.index, shape))
        except (
            ValueError,
            SyntaxError,
            TypeError,
            LookupError,
            RecursionError,
            MemoryError,
        ) as error:
            raise malformed(rank, f"an array that cannot be described ({error!r})") from None
        check_size(rank, shape[shape[:1] == (ANY,) :], dtype.itemsize)
        return dtype, shape


def description_of(rank: int, detail: Detail) -> tuple[DType, tuple[int, ...]]:
    """Return the dtype and shape in the message of a rank."""
    if not isinstance(detail, Description):
        raise malformed(rank, "no dtype and shape")
    return detail.parse(rank)


def _dtype_of(descr: Any) -> DType:
    """Return the dtype of a name of the library's, or of the format of .npy files."""
    known = BY_NAME.get(descr) if isinstance(descr, str) else None
    return descr_to_dtype(descr) if known is None else known.dtype


def _leaf(path: str, kind: str, shape: list[int] | None) -> LeafSpec:
    return LeafSpec(path, kind, None if shape is None else tuple(shape))


def exchange_details(
    control: ControlChannel, mine: Detail, *kinds: type[Detail]
) -> Generator[Handle, None, list[Any]]:
    """Return every rank's message; each takes part with one, be it `Nothing`.

    They are of the kind of this rank's, or of `kinds`.
    """
    text = json.dumps([type(mine).__name__, mine.values()])
    if len(text) > _MAX_TEXT:
        text = json.dumps([type(mine).__name__, mine.shortened()])
    texts = yield from _gather_texts(control, text)
    known = {kind.__name__: kind for kind in (type(mine), *kinds)}
    return [_read(rank, text, known) for rank, text in enumerate(texts)]


def _read(rank: int, text: bytes, known: dict[str, type[Detail]]) -> Detail:
    """Return the message of a text; its fields have the class's types, as far as JSON has them."""
    try:
        kind, values = json.loads(text.decode())
        read = known[kind].read(values)
        for field in fields(read):
            expected = _TYPES.get(str(field.type))
            if expected is not None and type(getattr(read, field.name)) is not expected:
                raise TypeError(f"{field.name} is {getattr(read, field.name)!r}")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise malformed(rank, f"details that cannot be read ({error!r})") from None
    return read


def _gather_texts(control: ControlChannel, text: str) -> Generator[Handle, None, list[bytes]]:
    """Return every rank's text, in as many steps as the longest needs."""
    data = text.encode()
    received = [bytearray() for _ in range(control.size)]
    start, rounds = 0, 1
    while start < rounds * control.payload:
        piece = np.frombuffer(data[start : start + control.payload], np.uint8)
        prefix = encode(Signature(""), len(data), status=Status.DETAILS)
        show(control, prefix, piece)
        yield control
        headers = Headers(control)
        for rank, part in enumerate(received):
            length = headers.payload_bytes(rank)
            if not 0 <= length <= _MAX_TEXT:
                raise malformed(rank, f"a text of {length} bytes")
            rounds = max(rounds, -(-length // control.payload))
            count = min(max(length - start, 0), control.payload)
            part.extend(headers.payload(rank, count).tobytes())
        start += control.payload
    return [bytes(part) for part in received]
