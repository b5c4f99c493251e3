"""The first difference between the ranks, with each one's value: sought once digests differ."""

from __future__ import annotations

import base64
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._dtypes import BY_NAME, DType, name_of
from arraycomm._protocol.details import Detail, Nothing, exchange_details
from arraycomm._protocol.mismatch import by_ranks
from arraycomm._training.comparison.digests import BLOCK_BYTES, block_sums, bytes_of, digest_of
from arraycomm._transports.base import Handle
from arraycomm._transports.control import ControlChannel
from arraycomm._trees.layout import Spec

_BYTE: Final = np.dtype(np.uint8)
# The sums of more would be too long a message.
_MOST_ELEMENTS: Final = 1 << 30


class Item(NamedTuple):
    """One thing that ranks compare."""

    # How messages call it, and its type, or its dtype and shape.
    name: str
    kind: str
    digest: int
    # The value, unless it is an array; not compared, as it may say the same in another order.
    text: str = ""


def array_item(name: str, array: Any) -> Item:
    """Return an array as ranks compare it."""
    dtype = name_of(array.dtype) if isinstance(array.dtype, np.dtype) else str(array.dtype)
    return Item(name, f"{dtype.rpartition('.')[2]} {tuple(array.shape)}", digest_of(array))


@dataclass(frozen=True, slots=True)
class _Items(Detail):
    """What one rank compares, and the line of its program."""

    site: str
    items: tuple[Item, ...]

    @classmethod
    def read(cls, values: dict[str, Any]) -> _Items:
        return cls(values["site"], tuple(Item(*item) for item in values["items"]))


@dataclass(frozen=True, slots=True)
class _Bytes(Detail):
    """The sums of the blocks of one array, or the bytes of one block."""

    data: str

    @classmethod
    def of(cls, array: Array) -> _Bytes:
        """Return the elements of an array."""
        return cls(base64.b64encode(array.tobytes()).decode())

    def array(self, dtype: DType) -> Array:
        """Return them as an array."""
        return np.frombuffer(base64.b64decode(self.data), dtype)


class Difference(NamedTuple):
    """The first difference between ranks, and how many things of its kind differ."""

    name: str
    # What each rank has, with the line of its program.
    said: str
    is_array: bool
    # Whether all ranks' arrays have one dtype and shape.
    same_kind: bool
    differing: int
    total: int
    # Whether every rank has the same things, in another order.
    reordered: bool


def find_difference(
    control: ControlChannel, site: str, items: Sequence[Item], arrays: Mapping[str, Any]
) -> Generator[Handle, None, Difference]:
    """Return the first difference between the ranks' items; `arrays` are the arrays among them.

    Collective. A rank without items takes part, and is not compared.
    """
    shown = yield from exchange_details(control, _Items(site, tuple(items)))
    having = [rank for rank, each in enumerate(shown) if each.items]
    lists = [shown[rank].items for rank in having]
    rows = [{item.name: item for item in each} for each in lists]
    names = dict.fromkeys(item.name for each in lists for item in each)
    differing = [
        name for name in names if len({name in row and row[name][1:3] for row in rows}) > 1
    ]
    first = next(iter(differing), "the order of what is compared")
    texts = [_said(row.get(first)) for row in rows]
    if not differing:
        texts = [", ".join(row) for row in rows]
    kinds = {row[first].kind if first in row else "" for row in rows}
    same_kind = len(kinds) == 1
    spec = _spec_of(kinds.pop()) if same_kind else None
    if spec is not None:
        texts = yield from _elements(control, having, spec, arrays.get(first))
    lines = [""] * len(shown)
    for rank, text in zip(having, texts, strict=True):
        lines[rank] = f"{text}, at {shown[rank].site}"
    said = by_ranks([line or f"not compared, at {shown[r].site}" for r, line in enumerate(lines)])
    is_array = _is_array(rows, first)
    alike = [name for name in names if _is_array(rows, name) is is_array]
    count = len(set(alike) & set(differing))
    reordered = _are_reordered(lists)
    return Difference(first, said, is_array, same_kind, count, len(alike), reordered)


def _is_array(rows: Sequence[Mapping[str, Item]], name: str) -> bool:
    return not any(row[name].text for row in rows if name in row)


def _said(item: Item | None) -> str:
    return "missing" if item is None else item.text or item.kind


def _are_reordered(lists: Sequence[Sequence[Item]]) -> bool:
    values = [[item[1:3] for item in items] for items in lists]
    return all(sorted(each) == sorted(values[0]) for each in values) and any(
        each != values[0] for each in values
    )


def _spec_of(kind: str) -> Spec | None:
    """Return the dtype and shape of an array, unless it has no elements that can be shown."""
    name, _, shape = kind.partition(" ")
    if name not in BY_NAME:
        return None
    dims = tuple(int(n) for n in shape.strip("()").split(",") if n.strip())
    return (BY_NAME[name].dtype, dims) if prod(dims) <= _MOST_ELEMENTS else None


def _elements(
    control: ControlChannel, having: Sequence[int], spec: Spec, array: Any
) -> Generator[Handle, None, list[str]]:
    """Return the first element in which arrays differ, as each rank has it."""
    dtype, shape = spec
    mine = Nothing() if array is None else _Bytes.of(block_sums(array))
    shown = yield from exchange_details(control, mine, _Bytes, Nothing)
    sums = np.array([shown[rank].array(np.dtype(np.uint64)) for rank in having])
    start = int((sums != sums[0]).any(axis=0).argmax()) * BLOCK_BYTES
    part = Nothing() if array is None else _Bytes.of(bytes_of(array)[start : start + BLOCK_BYTES])
    shown = yield from exchange_details(control, part, _Bytes, Nothing)
    parts = [shown[rank].array(_BYTE) for rank in having]
    byte = int((np.array(parts) != parts[0]).any(axis=0).argmax())
    byte -= byte % dtype.itemsize
    values = [data[byte : byte + dtype.itemsize].view(dtype)[0] for data in parts]
    if not shape:
        return [str(value) for value in values]
    place = np.unravel_index((start + byte) // dtype.itemsize, shape)
    return [f"{value} at [{', '.join(map(str, place))}]" for value in values]
