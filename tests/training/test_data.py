from __future__ import annotations

import collections
import copy
import json
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import DistributedDataContainer
from arraycomm._training.batches.order import order_of
from arraycomm._transports.threads import make_group
from arraycomm.testing import run
from tests.support import internals
from tests.support.on_ranks import each_rank_of


def containers(size: int, data: Any, **options: Any) -> list[DistributedDataContainer]:
    """Return each rank's container; nothing collective can be called on them any more."""
    return run(size, lambda comm: DistributedDataContainer(data, comm=comm, **options))


def alone(data: Any, **options: Any) -> DistributedDataContainer:
    """Return the container of one rank, which still has its communicator."""
    comm = internals.communicator(make_group(1)[0])
    return DistributedDataContainer(data, comm=comm, **options)


# The order; who has what is stated by properties/test_data_laws.py -----------------------------------


def test_order_is_the_same_in_every_version() -> None:
    """States that were saved stand for these items: NumPy guarantees the bits of PCG64."""
    assert order_of(8, seed=5, epoch=2).tolist() == [4, 6, 1, 2, 0, 7, 5, 3]


# What data can be --------------------------------------------------------------------------------


def _memmap(rows: np.ndarray, path: Path) -> Any:
    np.save(path / "rows.npy", rows)
    return np.load(path / "rows.npy", mmap_mode="r")


def _bfloat16(rows: np.ndarray, _: Path) -> Any:
    torch = pytest.importorskip("torch")
    return torch.tensor(rows).to(torch.bfloat16)


KINDS: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "numpy": lambda rows, _: rows,
    "memmap": _memmap,
    "torch": lambda rows, _: pytest.importorskip("torch").tensor(rows),
    "bfloat16": _bfloat16,
    "jax": lambda rows, _: pytest.importorskip("jax.numpy").asarray(rows),
    "strict": lambda rows, _: pytest.importorskip("array_api_strict").asarray(rows),
}


@pytest.fixture(params=KINDS)
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[np.ndarray], Any]:
    return lambda values: KINDS[request.param](values, tmp_path)


def test_batches_are_copies_and_weights_too(rows) -> None:
    data = rows(np.zeros((4, 2), np.float32))
    container = alone(data)
    container.weights[:] = 7
    [batch] = container.batches(4)
    batch.weights[:] = 7
    assert container.weights.tolist() == [1, 1, 1, 1]
    if isinstance(batch.items, np.ndarray):
        assert not np.shares_memory(batch.items, np.asarray(data))
    elif hasattr(batch.items, "data_ptr"):
        assert batch.items.data_ptr() != data.data_ptr()


def test_memory_map_is_read_where_items_are_and_nowhere_else(tmp_path) -> None:
    """The file is sparse, and larger than memory: it could not be read whole."""
    rows, columns = 1 << 16, 1 << 20
    data = np.memmap(tmp_path / "rows.bin", np.int32, "w+", shape=(rows, columns))
    container = alone({"x": data}, shuffle=True)
    wanted = container._index[:2].tolist()
    data[wanted, 0] = [5, 6]
    batch = next(container.batches(2))
    assert type(batch.items["x"]) is np.ndarray
    assert batch.items["x"].shape == (2, columns)
    assert batch.items["x"][:, 0].tolist() == [5, 6]
    assert container[1]["x"][0] == 6


def test_rows_of_a_strided_array_are_read_without_a_copy_of_the_whole() -> None:
    data = np.zeros((100, 20_000)).T
    container = alone(data)
    tracemalloc.start()
    batch = next(container.batches(8))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert batch.items.shape == (8, 100)
    assert peak < data.nbytes / 10


def test_random_keys_of_jax() -> None:
    jax = pytest.importorskip("jax")
    keys = jax.random.split(jax.random.key(0), 5)
    [batch] = alone({"key": keys}).batches(5)
    assert (jax.random.key_data(batch.items["key"]) == jax.random.key_data(keys)).all()


X, Y = np.arange(10.0).reshape(5, 2), np.arange(5)


SEQUENCES = {
    "list": [3, "a", None],
    "list of pairs": [(np.zeros(2), 0), (np.zeros(2), 1)],
    "range": range(4),
    "deque": collections.deque([1, 2]),
    "text": "abc",
}


@pytest.mark.parametrize("data", SEQUENCES.values(), ids=SEQUENCES)
def test_sequence_of_items(data) -> None:
    container = alone(data)
    [batch] = container.batches(9)
    assert type(batch.items) is list
    for items in (batch.items, list(container), container[:]):
        assert len(items) == len(data)
        assert all(got is data[i] or got == data[i] for i, got in enumerate(items))


def test_is_a_sequence_of_arrays_rows_too() -> None:
    data = np.arange(12).reshape(6, 2)
    container = containers(2, data)[1]
    assert len(container) == 3
    assert container[-1].tolist() == [10, 11]
    assert container[:2].tolist() == [[2, 3], [6, 7]]
    assert [type(item) for item in alone(np.arange(2.0))] == [np.float64] * 2
    with pytest.raises(IndexError, match="rank 1 has 3 of 6 items"):
        container[3]
    with pytest.raises(IndexError, match="index -4"):
        container[-4]
    with pytest.raises(TypeError, match="an index must be an integer or a slice; got 'x'"):
        container["x"]


def test_only_own_items_are_read() -> None:
    class Files:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, item: int) -> int:
            read.append(item)
            return item

    read: list[int] = []
    container = containers(3, Files())[1]
    [batch] = container._pass(9)
    assert read == batch.items == [1, 4, 7]
    assert all(type(item) is int for item in read)


class Frame:
    """What a pandas data frame looks like: its integer indices are labels."""

    iloc = None

    def __len__(self) -> int:
        return 3

    def __getitem__(self, label: Any) -> Any:
        raise KeyError(label)


REFUSED = {
    "iterator": (iter([1]), TypeError, "must have a length"),
    "set": ({1, 2}, TypeError, "take integer indices"),
    "number": (3, TypeError, "got int"),
    "0-d": (np.ones(()), ValueError, "data has no axis 0"),
    "0-d leaf": ({"a": X, "b": np.ones(())}, ValueError, r"data\['b'\] has no axis 0"),
    "lengths": (
        {"a": X, "b": [Y, Y[:4]]},
        ValueError,
        r"data\['a'\] has 5, data\['b'\]\[0\] has 5, data\['b'\]\[1\] has 4",
    ),
    "text": ({"a": X, "b": "text"}, TypeError, r"data\['b'\] is a str; .* must be arrays"),
    "pairs": (((X, 3), (Y, 4)), TypeError, r"data\[0\]\[1\] is a int; .* Pass a list"),
    "empty": ({}, TypeError, "a dict without any array"),
    "frame": (Frame(), TypeError, r"to_numpy\(\)"),
    "tuple of frames": ((Frame(), Frame()), TypeError, r"data\[0\] is a Frame; .* arrays"),
    "tuple of lists": (("ab", [3, 4]), TypeError, r"data\[1\] is a list; .* otherwise a list"),
}


@pytest.mark.parametrize(("data", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_data_set(data, error, match) -> None:
    with pytest.raises(error, match=f"^DistributedDataContainer: .*{match}"):
        alone(data)


def test_iterable_data_set_of_torch_is_refused_by_name() -> None:
    utils = pytest.importorskip("torch.utils.data")

    class Lines(utils.IterableDataset):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def __len__(self) -> int:
            return 3

    with pytest.raises(TypeError, match=r"Lines, an IterableDataset of torch: .* not indexed"):
        alone(Lines())


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match="uneven must be one of exact, pad, drop; got 'truncate'"):
        alone([1], uneven="truncate")
    with pytest.raises(TypeError, match="shuffle must be True or False; got 'no'"):
        alone([1], shuffle="no")
    with pytest.raises(TypeError, match=r"seed must be an integer; got 1\.5"):
        alone([1], seed=1.5)
    with pytest.raises(ValueError, match="seed must be at least 0; got -1"):
        alone([1], seed=-1)
    if not ac.is_initialized():
        with pytest.raises(ac.NotInitializedError, match="init"):
            DistributedDataContainer([1])


# Batches -----------------------------------------------------------------------------------------


@each_rank_of(4)
def test_loaded_batches_are_those_of_the_container_and_count_when_the_loop_gets_them(
    comm: ac.Communicator,
) -> None:
    container = DistributedDataContainer(range(10), comm=comm, shuffle=True, uneven="pad")
    expected = list(container.batches(2))

    def read_ahead(indices: Any) -> list[Any]:
        return [container[own.start : own.stop] for own in indices]

    for number, batch in enumerate(container.batches(2, load=read_ahead), 1):
        wanted = expected[number - 1]
        assert batch.items == wanted.items
        assert batch.weights.tolist() == wanted.weights.tolist()
        assert container.state_dict()["consumed"] == min(2 * 4 * number, 10)
    assert number == len(expected)


@each_rank_of(3)
def test_load_gets_the_rest_of_a_resumed_epoch_with_an_empty_batch(comm: ac.Communicator) -> None:
    container = DistributedDataContainer(range(12), comm=comm)
    container.load_state_dict({**container.state_dict(), "consumed": 5})
    assert container.num_batches(1) == 3
    batches = container.batches(1, load=lambda indices: map(list, indices))
    assert [batch.items for batch in batches] == [[0], [1], [] if comm.rank else [2]]


def test_load_gets_the_indices_of_filled_batches() -> None:
    def check(comm: ac.Communicator, size: int) -> list[Any]:
        container = DistributedDataContainer(range(size), comm=comm)
        return [
            batch.items for batch in container.batches(3, pad=True, load=lambda own: map(list, own))
        ]

    assert run(2, check, 5) == [[[0, 1, 2]], [[0, 1, 0]]]
    with pytest.raises(ValueError, match="load cannot fill up the batches of rank 1, which has no"):
        run(2, check, 1)
    with pytest.raises(TypeError, match="batches: pad must be True or False; got 1"):
        alone(range(5)).batches(2, pad=1)
    with pytest.raises(ac.MismatchError, match=r"batches\(n=2, pad=False\).*pad=True"):
        run(2, lambda comm: DistributedDataContainer([1], comm=comm).batches(2, pad=comm.rank == 1))


def test_load_that_is_wrong() -> None:
    container = alone(range(5))
    with pytest.raises(TypeError, match="batches: load must be a function; got 7"):
        container.batches(2, load=7)
    few = container.batches(2, load=lambda indices: [next(indices)])
    next(few)
    with pytest.raises(ValueError, match="the items of all 3 batches of rank 0; it returned 1"):
        next(few)
    assert container.state_dict()["consumed"] == 2


def test_number_of_batches_is_known_before_and_during_the_loop() -> None:
    def check(comm: ac.Communicator) -> list[int]:
        container = DistributedDataContainer(range(10), comm=comm)
        said = [container.num_batches(2)]
        said += [container.num_batches(2) for _ in container.batches(2)]
        container.load_state_dict({**container.state_dict(), "consumed": 9})
        said.append(container.num_batches(2))
        container.set_epoch(1)
        return [*said, container.num_batches(1)]

    assert run(4, check) == [[2, 2, 2, 1, 3]] * 4
    with pytest.raises(ValueError, match="num_batches: n must be at least 1; got 0"):
        alone([1]).num_batches(0)


def test_every_rank_has_an_example() -> None:
    own = [container.example() for container in containers(4, ["a", "b"])]
    assert own == ["a", "b", "a", "a"]
    with pytest.raises(ValueError, match="example: the data set has no items"):
        alone([]).example()


def test_each_pass_begins_the_epoch_anew() -> None:
    container = alone(range(5))
    for _ in range(2):
        assert [batch.items for batch in container.batches(2)] == [[0, 1], [2, 3], [4]]
    for batch in container.batches(2):
        assert batch.items == [0, 1]
        break
    assert next(container.batches(3)).items == [0, 1, 2]


@pytest.mark.parametrize(
    "meddle",
    [
        lambda c: c.set_epoch(1),
        lambda c: c.advance(0),
        lambda c: c.batches(1),
        lambda c: c.load_state_dict(c.state_dict()),
    ],
    ids=["set_epoch", "advance", "batches", "load_state_dict"],
)
def test_loop_ends_where_its_container_is_moved_on(meddle) -> None:
    container = alone(range(5))
    loop = container.batches(2)
    next(loop)
    meddle(container)
    with pytest.raises(RuntimeError, match="batches: the container was moved on during the loop"):
        next(loop)


def test_numbers_that_are_none() -> None:
    container = alone(range(5))
    for wrong, error in [(0, ValueError), (-1, ValueError), (1.5, TypeError), (None, TypeError)]:
        with pytest.raises(error, match=r"batches: n must be .*got"):
            container.batches(wrong)
    for wrong, error in [(-1, ValueError), (6, ValueError), ("2", TypeError)]:
        with pytest.raises(error, match=r"advance: n must be .*got"):
            container.advance(wrong)
    for wrong, error in [(-1, ValueError), (1 << 63, ValueError), (0.5, TypeError)]:
        with pytest.raises(error, match=r"set_epoch: epoch must be .*got"):
            container.set_epoch(wrong)
    assert container.state_dict()["consumed"] == 0
    container.advance(np.int64(5))
    with pytest.raises(ValueError, match=r"at most 0, what is left .* epoch 0; got 1.*set_epoch"):
        container.advance(1)


# States ------------------------------------------------------------------------------------------


def test_state_is_plain_and_says_where_the_loop_is() -> None:
    container = alone(range(5), shuffle=True, seed=np.int64(3), uneven="pad")
    container.set_epoch(np.int64(2))
    next(container.batches(2))
    state = container.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert state == {
        "count": 5,
        "shuffle": True,
        "seed": 3,
        "uneven": "pad",
        "epoch": 2,
        "consumed": 2,
    }


def test_loaded_epoch_goes_on_once_and_the_next_is_whole() -> None:
    container = alone(range(6), shuffle=True)
    container.set_epoch(1)
    whole = list(container)
    next(container.batches(4))
    state = container.state_dict()
    container.set_epoch(5)
    container.load_state_dict(state)
    assert container.epoch == 1
    container.set_epoch(1)
    assert list(container) == whole[4:]
    assert [b.items for b in container.batches(4)] == [whole[4:]]
    assert [b.items for b in container.batches(4)] == [whole[:4], whole[4:]]
    container.load_state_dict(state)
    container.advance(1)
    container.set_epoch(1)
    assert list(container) == whole
    container.set_epoch(2)
    assert sorted(container) == list(range(6))


STATE = {"count": 5, "shuffle": True, "seed": 3, "uneven": "pad", "epoch": 1, "consumed": 2}
OTHERS = {
    "count": (6, ValueError, "count=6; this one has count=5"),
    "shuffle": (False, ValueError, "shuffle=False; this one has shuffle=True"),
    "seed": (4, ValueError, "seed=4; this one has seed=3"),
    "uneven": ("drop", ValueError, "uneven='drop'; this one has uneven='pad'"),
    "epoch": (-1, ValueError, r'state\["epoch"\] must be 0 to'),
    "consumed": (6, ValueError, r'state\["consumed"\] must be 0 to 5; got 6'),
}


@pytest.mark.parametrize("key", OTHERS)
def test_state_of_another_container(key) -> None:
    value, error, match = OTHERS[key]
    container = alone(range(5), shuffle=True, seed=3, uneven="pad")
    container.load_state_dict(STATE)
    with pytest.raises(error, match=f"^load_state_dict: .*{match}"):
        container.load_state_dict({**STATE, key: value})
    missing = {name: kept for name, kept in STATE.items() if name != key}
    with pytest.raises(ValueError, match=f"it has no '{key}'"):
        container.load_state_dict(missing)
    with pytest.raises(TypeError, match=r"got NoneType.*synchronize"):
        container.load_state_dict(None)
    assert container.state_dict() == STATE


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))]
)
def test_copy_keeps_its_items_and_has_no_communicator(duplicate) -> None:
    container = alone({"x": np.arange(6)}, shuffle=True)
    made = duplicate(container)
    assert [item["x"] for item in made] == [item["x"] for item in container]
    with pytest.raises(RuntimeError, match="set_epoch: this container was copied"):
        made.set_epoch(1)
    container.set_epoch(1)
    assert [item["x"] for item in made] != [item["x"] for item in container]
