"""Digests of arrays: numbers that differ if one bit of one element does, or the order of elements.

The bytes of an array in C order are words of 8 bytes. The sum of a block is that of its words, each
times an odd number of its own, modulo 2⁶⁴: it is a product with a vector, at the speed of memory,
and any device can take it.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from arraycomm._arrays.buffer import Array
from arraycomm._arrays.exchange import exchange
from arraycomm._arrays.views import view
from arraycomm._dtypes import without_padding
from arraycomm._protocol.header import digest
from arraycomm._trees.nodes import is_torch

_BLOCK_WORDS: Final = 1024
BLOCK_BYTES: Final = 8 * _BLOCK_WORDS
# Odd, so that no change of one word is lost.
_FACTORS: Final = np.random.default_rng(0).integers(0, 1 << 63, _BLOCK_WORDS, np.uint64) * 2 + 1
# Blocks whose products are in a device's memory at the same time.
_BLOCKS_AT_ONCE: Final = 8192


def digest_of(x: Any) -> int:
    """Return a number for the elements of an array."""
    return digest(block_sums(x).tobytes())


def block_sums(x: Any) -> Array:
    """Return a number for each block of an array, in C order."""
    if is_torch(x, "Tensor") and x.is_cuda:
        return sums_by_torch(x)
    raw = bytes_of(x)
    whole = len(raw) // BLOCK_BYTES * BLOCK_BYTES
    rest = raw[whole:].tobytes()
    rest += b"\0" * (-len(rest) % 8)
    words = np.frombuffer(rest, np.uint64)
    blocks = raw[:whole].view(np.uint64).reshape(-1, _BLOCK_WORDS)
    sums: Array = np.append(blocks @ _FACTORS, words @ _FACTORS[: len(words)])
    return sums


def bytes_of(x: Any) -> Array:
    """Return the elements of an array as bytes in C order, in host memory."""
    # Not shared with NumPy, which would forbid to resize it from then on.
    array = view(x.detach().cpu()).array if is_torch(x, "Tensor") else exchange(x, "numpy")
    raw: Array = np.ascontiguousarray(without_padding(array)).reshape(-1).view(np.uint8)
    return raw


def sums_by_torch(x: Any) -> Array:
    """Return what `block_sums` does, computed where a tensor is."""
    torch = sys.modules["torch"]
    flat = x.detach().reshape(-1).contiguous()
    if len(flat) < 2:
        # Whatever the stride is.
        return block_sums(flat.cpu())
    raw = flat.view(torch.uint8)
    whole = len(raw) // BLOCK_BYTES * BLOCK_BYTES
    rest = torch.nn.functional.pad(raw[whole:], (0, whole + BLOCK_BYTES - len(raw)))
    factors = torch.from_numpy(_FACTORS.view(np.int64)).to(x.device)
    parts = [raw[:whole].view(torch.int64), rest.view(torch.int64)]
    sums = [
        (blocks * factors).sum(1)
        for part in parts
        for blocks in part.view(-1, _BLOCK_WORDS).split(_BLOCKS_AT_ONCE)
    ]
    found: Array = torch.cat(sums).cpu().numpy().view(np.uint64)
    return found
