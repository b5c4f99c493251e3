"""Laws of the data container, and of lines that ranks print."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import arraycomm as ac
from arraycomm import _launch
from arraycomm._trees import pytrees
from arraycomm.testing import run
from arraycomm.testing.strategies import installed_frameworks

pytestmark = pytest.mark.skipif(
    _launch.detect(os.environ) is not None, reason="runs where pytest is alone"
)

COUNTS = st.integers(0, 200)
SIZES = st.integers(1, 9)


@st.composite
def settings_of_containers(draw: st.DrawFn, uneven: Any = ("exact", "pad", "drop")) -> Any:
    return {
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**24 - 1)),
        "uneven": draw(st.sampled_from(uneven)),
    }


class Leg(NamedTuple):
    """A run between two interruptions; without `steps` it goes on to the end of the epoch."""

    size: int
    batch: int
    steps: int | None
    counted_by_hand: bool


LEGS = st.builds(Leg, SIZES, st.integers(1, 40), st.integers(0, 5), st.booleans())
LAST_LEG = st.builds(Leg, SIZES, st.integers(1, 40), st.none(), st.booleans())


def global_order(count: int, epoch: int, settings: Any) -> list[int]:
    """Return the items in the order in which one rank would see them."""

    def items(comm: ac.Communicator) -> list[int]:
        container = ac.DistributedDataContainer(range(count), comm=comm, **settings)
        container.set_epoch(epoch)
        return list(container)

    [order] = run(1, items)
    return order


def consume(comm: ac.Communicator, count: int, settings: Any, state: Any, leg: Leg) -> Any:
    """Return this rank's (item, weight) pairs, batch by batch, and the state after the last."""
    container = ac.DistributedDataContainer(range(count), comm=comm, **settings)
    container.load_state_dict(state)
    container.set_epoch(state["epoch"])
    got = []
    if leg.counted_by_hand:
        steps = -(-comm.allreduce(len(container), "max") // leg.batch)
        for number in range(steps if leg.steps is None else min(steps, leg.steps)):
            own = slice(number * leg.batch, (number + 1) * leg.batch)
            got.append(list(zip(container[own], container.weights[own], strict=True)))
            container.advance(len(container[own]))
    elif leg.steps != 0:
        for batch in container.batches(leg.batch):
            got.append(list(zip(*batch, strict=True)))
            if len(got) == leg.steps:
                break
    return got, container.state_dict()


def in_rounds(parts: list[list[list[tuple[int, float]]]]) -> list[tuple[int, float]]:
    """Return what the ranks have got, one item of each rank after the other."""
    ranks = [[pair for batch in part for pair in batch] for part in parts]
    return [
        ranks[rank][i]
        for i in range(max(map(len, ranks)))
        for rank in range(len(ranks))
        if i < len(ranks[rank])
    ]


@given(count=COUNTS, size=SIZES, settings=settings_of_containers(), epoch=st.integers(0, 3))
def test_container_holds_every_item_exactly_once(count, size, settings, epoch) -> None:
    def share(comm: ac.Communicator) -> list[tuple[int, float]]:
        container = ac.DistributedDataContainer(range(count), comm=comm, **settings)
        container.set_epoch(epoch)
        assert len(container) == len(container.weights)
        return list(zip(container, container.weights.tolist(), strict=True))

    parts = run(size, share)
    lengths = {len(part) for part in parts}
    assert max(lengths) - min(lengths) <= (settings["uneven"] == "exact")
    order = global_order(count, epoch, settings)
    assert sorted(order) == list(range(count))
    if settings["shuffle"]:
        # Of 20 items, a permutation is that of another epoch or seed once in 2e18 times.
        others = [(epoch + 1, settings), (epoch, settings | {"seed": settings["seed"] + 1})]
        drawn = [list(range(count)), *(global_order(count, *other) for other in others)]
        assert count < 20 or order not in drawn
    else:
        assert order == list(range(count))
    got = in_rounds([[part] for part in parts])
    expected = [(item, 1.0) for item in order]
    if settings["uneven"] == "drop":
        del expected[count - count % size :]
    if settings["uneven"] == "pad":
        expected += [(order[i % count], 0.0) for i in range(-count % size)]
    assert got == expected


@given(
    lines=st.lists(st.text("ab\u00e9 ", max_size=5), min_size=1, max_size=6),
    chosen=st.sets(st.integers(0, 5)),
    sep=st.sampled_from((None, "-")),
    end=st.sampled_from((None, "", "!\n")),
)
def test_lines_are_printed_in_the_order_of_ranks(lines, chosen, sep, end) -> None:
    ranks = [rank for rank in chosen if rank < len(lines)]
    files = [io.StringIO() for _ in lines]

    def check(comm: ac.Communicator) -> None:
        values, file = (lines[comm.rank], comm.rank), files[comm.rank]
        options = {"sep": sep, "end": end, "file": file, "ranks": ranks, "timestamp": False}
        ac.println(*values, comm=comm, **options)

    run(len(lines), check)
    between, after = " " if sep is None else sep, "\n" if end is None else end
    printed = [f"[{r}/{len(lines)}] {lines[r]}{between}{r}{after}" for r in sorted(ranks)]
    assert [file.getvalue() for file in files] == ["".join(printed), *[""] * (len(lines) - 1)]


@given(count=COUNTS, size=SIZES, settings=settings_of_containers(), n=st.integers(1, 40))
def test_padded_batches_are_the_others_filled_up_with_items_of_no_weight(
    count, size, settings, n
) -> None:
    def check(comm: ac.Communicator) -> None:
        container = ac.DistributedDataContainer(np.arange(count), comm=comm, **settings)
        plain = list(container.batches(n))
        padded = container.batches(n, pad=True)
        assert len(padded) == len(plain) == container.num_batches(n)
        for batch, other in zip(padded, plain, strict=True):
            own = len(other.items)
            assert batch.items.shape == batch.weights.shape == (n,)
            assert (batch.items[:own] == other.items).all()
            assert batch.weights.tolist() == [*other.weights, *[0.0] * (n - own)]
            # The rank's own items come first.
            kept = set(other.items.tolist() or list(container)[:1] or range(count))
            assert set(batch.items[own:].tolist()) <= kept
        assert len(padded) == len(plain)
        with pytest.raises(RuntimeError, match="this loop has ended"):
            iter(padded)

        loaded = container.batches(n, load=lambda batches: (len(own) for own in batches))
        assert [batch.items for batch in loaded] == [len(batch.items) for batch in plain]

    run(size, check)


@given(
    count=COUNTS,
    settings=settings_of_containers(),
    epoch=st.integers(0, 3),
    legs=st.lists(LEGS, max_size=4),
    last=LAST_LEG,
)
def test_epoch_resumed_anywhere_by_any_number_of_ranks(count, settings, epoch, legs, last) -> None:
    order = global_order(count, epoch, settings)
    state = {"count": count, **settings, "epoch": epoch, "consumed": 0}
    seen: list[int] = []
    for leg in (*legs, last):
        results = run(leg.size, consume, count, settings, state, leg)
        parts = [got for got, _ in results]
        assert len({len(part) for part in parts}) == 1, "ranks are out of step"
        pairs = in_rounds(parts)
        seen += [item for item, weight in pairs if weight]
        assert seen == order[: len(seen)]
        # All that is repeated comes at the end, and only there.
        assert [weight for _, weight in pairs] == sorted((w for _, w in pairs), reverse=True)
        states = [after for _, after in results]
        if not leg.counted_by_hand:
            assert states == states[:1] * leg.size
        state = states[0]
        assert state["consumed"] == len(seen)
    dropped = count - len(seen)
    assert dropped < last.size if settings["uneven"] == "drop" else dropped == 0


@given(count=COUNTS, size=SIZES, batch=st.integers(1, 40), settings=settings_of_containers(["pad"]))
def test_weighted_mean_is_exact(count, size, batch, settings) -> None:
    values = np.arange(count) ** 2

    def total(comm: ac.Communicator) -> list[float]:
        container = ac.DistributedDataContainer(values, comm=comm, **settings)
        sums = np.zeros(2)
        for items, weights in container.batches(batch):
            assert len(items) == len(weights)
            sums += comm.allreduce(np.array([(weights * items).sum(), weights.sum()]))
        return sums.tolist()

    assert run(size, total) == [[values.sum(), count]] * size


class Pair(NamedTuple):
    """Two arrays."""

    number: Any
    rows: Any


@dataclass(frozen=True)
class Columns:
    """Two arrays."""

    number: Any
    rows: Any


# Data sets of two arrays, or of the second one.
TREES: dict[str, Callable[[Any, Any], Any]] = {
    "array": lambda _, rows: rows,
    "dict": lambda number, rows: {"number": number, "rows": (rows, None)},
    "named tuple": Pair,
    "dataclass": Columns,
    "nested": lambda number, rows: {"in": [number, (rows, None)]},
}


@given(
    count=st.integers(1, 200),
    size=SIZES,
    batch=st.integers(1, 40),
    form=st.sampled_from(sorted(TREES)),
    framework=st.sampled_from([n for n in installed_frameworks() if n not in ("buffer", "dlpack")]),
    shape=st.sampled_from(((), (2, 3), (0,))),
    settings=settings_of_containers(),
)
def test_batches_of_a_tree_are_those_of_its_arrays(
    count, size, batch, form, framework, shape, settings
) -> None:
    """They are of its kinds, or NumPy's, also if they are empty, or slices of a rank's part."""
    whole = np.arange(count * math.prod(shape), dtype=np.int32).reshape(count, *shape)
    arrays = [np.arange(count, dtype=np.int32), whole]
    tree = TREES[form](*(ac.exchange(x, framework) for x in arrays))
    wholes, leaves = (pytrees.flatten(each).leaves for each in (TREES[form](*arrays), tree))

    def compare(got: Any, wanted: Any) -> None:
        assert type(got) is type(tree) or form == "array"
        for leaf, like, rows in zip(pytrees.flatten(got).leaves, leaves, wholes, strict=True):
            assert isinstance(leaf, (type(like), np.ndarray, np.generic))
            if like is None:
                continue
            found = np.asarray(ac.exchange(leaf, "numpy"))
            np.testing.assert_array_equal(found, rows[wanted], strict=True)

    def check(comm: ac.Communicator) -> None:
        numbers = ac.DistributedDataContainer(range(count), comm=comm, **settings)
        trees = ac.DistributedDataContainer(tree, comm=comm, **settings)
        own = np.array(list(numbers), int)
        compare(trees[1:], own[1:])
        if len(own):
            compare(trees[len(own) - 1], own[-1])
        for few, many in zip(numbers.batches(batch), trees.batches(batch), strict=True):
            compare(many.items, np.array(few.items, int))
            assert (many.weights == few.weights).all()

    run(size, check)
