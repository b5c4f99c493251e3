"""Laws of the data container."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

import arraycomm as ac


@given(
    count=st.integers(0, 200),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_container_holds_every_item_exactly_once(count, size, shuffle, epoch) -> None:
    items: list[int] = []
    for rank in range(size):
        part = ac.DistributedDataContainer(
            range(count), comm=SimpleNamespace(rank=rank, size=size), shuffle=shuffle
        )
        part.set_epoch(epoch)
        items.extend(part)
    assert sorted(items) == list(range(count))
