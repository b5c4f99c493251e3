"""Where one algorithm of a reduction becomes faster than another, as measured between the ranks of a link."""

from __future__ import annotations

from typing import NamedTuple


class Crossovers(NamedTuple):
    """Up to how many bytes each algorithm is taken; None if that was not measured.

    Attributes
    ----------
    steps, gather, slices
        The largest arrays that go by these algorithms, in bytes of one rank. Larger ones than go by slices go along a
        chain of nodes, if the nodes make one.
    chunk
        The bytes of a chunk of slices between nodes.
    """

    steps: int | None = None
    gather: int | None = None
    slices: int | None = None
    chunk: int | None = None


NOT_MEASURED = Crossovers()
