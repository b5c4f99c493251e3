"""Each kind of data set that people have: its rows are the items, or the error says what to pass."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run

COLUMNS = {name: np.arange(4.0) + number for number, name in enumerate("abcdef")}


# Stand-ins for libraries that are not installed ---------------------------------------------------


class Column:
    """As pyarrow's arrays."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, item: int) -> Any:
        return self._data[item]

    def to_numpy(self) -> Any:
        return self._data

    def __arrow_c_array__(self, requested: Any = None) -> Any:
        raise NotImplementedError


class Table:
    """As pyarrow's tables: an integer is the number of a column."""

    column_names = (*COLUMNS,)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: Any) -> Column:
        return Column(COLUMNS[item] if isinstance(item, str) else [*COLUMNS.values()][item])

    def __arrow_c_stream__(self, requested: Any = None) -> Any:
        raise NotImplementedError


class Later:
    """As Dask's arrays and frames."""

    shape = (4,)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: Any) -> Any:
        return self

    def __dask_graph__(self) -> Any:
        return {}

    def compute(self) -> Any:
        return COLUMNS["a"]


class Frame:
    """As a LazyFrame of polars."""

    def collect(self) -> Table:
        return Table()


class File(Mapping[str, Any]):
    """As those of h5py."""

    def __len__(self) -> int:
        return len(COLUMNS)

    def __iter__(self) -> Iterator[str]:
        return iter(COLUMNS)

    def __getitem__(self, item: str) -> Any:
        return COLUMNS[item]


class Group:
    """As those of zarr, which are mappings and do not say so."""

    __len__, __iter__, __getitem__ = File.__len__, File.__iter__, File.__getitem__

    def keys(self) -> Any:
        return iter(COLUMNS)


class Rows:
    """As zarr's arrays: a shape and no length."""

    shape = (4,)

    def __getitem__(self, item: int) -> Any:
        return COLUMNS["a"][item]


class Tensor:
    """As TensorFlow's, which take no array of indices."""

    shape = (4,)

    def __dlpack__(self, **options: Any) -> Any:
        return COLUMNS["a"].__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return COLUMNS["a"].__dlpack_device__()

    def __array__(self, *args: Any, **options: Any) -> Any:
        return COLUMNS["a"]

    def __getitem__(self, item: Any) -> Any:
        raise TypeError("only integers, slices and ellipsis are valid indices")


# The table -----------------------------------------------------------------------------------------


def _hugging_face(library: Any) -> Any:
    rows = library.table.InMemoryTable(importlib.import_module("pyarrow").table(COLUMNS))
    return library.Dataset(rows, fingerprint="x")


def _h5py(library: Any) -> Any:
    file = library.File("in memory", "w", driver="core", backing_store=False)
    for name, column in COLUMNS.items():
        file[name] = column
    return file


def _zarr(library: Any) -> Any:
    group = library.group()
    for name, column in COLUMNS.items():
        group[name] = column
    return group


# Which are taken as they are, and which with what their errors say.
Make = Callable[[Any], Any]
TAKEN: dict[str, Make] = {
    "builtins list": lambda _: [*COLUMNS["a"]],
    "builtins rows": lambda _: Rows(),
    "numpy structured": lambda np: np.zeros(4, [("a", "f8"), ("b", "i4")]),
    "numpy masked": lambda np: np.ma.masked_equal(COLUMNS["a"], 2),
    "numpy records": lambda np: np.rec.array(np.zeros(4, [("a", "f8")])),
    "torch.utils.data pairs": lambda data: data.TensorDataset(*map(_tensor, COLUMNS.values())),
    "pandas index": lambda pandas: pandas.Index(COLUMNS["a"]),
    "h5py dataset": lambda h5py: _h5py(h5py)["a"],
    "zarr array": lambda zarr: _zarr(zarr)["a"],
    "datasets dataset": _hugging_face,
    "awkward array": lambda awkward: awkward.Array([{"a": n} for n in range(4)]),
    "paddle tensor": lambda paddle: paddle.to_tensor(COLUMNS["a"]),
}
REFUSED: dict[str, Make] = {
    "builtins table": lambda _: Table(),
    "builtins column": lambda _: Column(COLUMNS["a"]),
    "builtins later": lambda _: Later(),
    "builtins frame": lambda _: Frame(),
    "builtins file": lambda _: File(),
    "builtins group": lambda _: Group(),
    "builtins tensor": lambda _: Tensor(),
    "builtins generator": lambda _: (n for n in range(4)),
    "builtins set": lambda _: {1, 2, 3, 4},
    **{
        f"scipy.sparse {form}": lambda sparse, form=form: getattr(sparse, form)(np.eye(4))
        for form in (
            *("csr_array", "csc_array", "coo_array", "bsr_array"),
            *("dia_array", "dok_array", "lil_array", "csr_matrix"),
        )
    },
    "pyarrow table": lambda pyarrow: pyarrow.table(COLUMNS),
    "pyarrow batch": lambda pyarrow: pyarrow.record_batch(COLUMNS),
    "pyarrow array": lambda pyarrow: pyarrow.array(COLUMNS["a"]),
    "pyarrow chunks": lambda pyarrow: pyarrow.chunked_array([COLUMNS["a"][:2], COLUMNS["a"][2:]]),
    "polars frame": lambda polars: polars.DataFrame(COLUMNS),
    "polars series": lambda polars: polars.Series(COLUMNS["a"]),
    "polars lazy": lambda polars: polars.LazyFrame(COLUMNS),
    "pandas frame": lambda pandas: pandas.DataFrame(COLUMNS),
    "pandas series": lambda pandas: pandas.Series(COLUMNS["a"]),
    "dask.array": lambda array: array.ones((4, 2)),
    "dask.bag": lambda bag: bag.from_sequence(range(4)),
    "xarray array": lambda xarray: xarray.DataArray(np.eye(4)),
    "xarray dataset": lambda xarray: xarray.Dataset({"a": ("x", COLUMNS["a"])}),
    "h5py file": _h5py,
    "zarr group": _zarr,
    "tensordict": lambda tensordict: tensordict.TensorDict(
        {"a": _tensor(COLUMNS["a"])}, batch_size=[4]
    ),
    "tensorflow tensor": lambda tensorflow: tensorflow.constant(COLUMNS["a"]),
    "tensorflow dataset": lambda tensorflow: tensorflow.data.Dataset.range(4),
    "warp array": lambda warp: warp.array(COLUMNS["a"], dtype=float, device="cpu"),
}


def _tensor(x: Any) -> Any:
    return pytest.importorskip("torch").tensor(x)


def _made(kind: str, make: Make) -> Any:
    return make(pytest.importorskip(kind.partition(" ")[0]))


def _items(data: Any) -> list[int]:
    """Return the lengths of the batches of each of two ranks."""

    def share(comm: ac.Communicator) -> list[int]:
        container = ac.DistributedDataContainer(data, comm=comm, uneven="drop")
        assert len(container) == 2
        assert container[0] is not None
        return [_length(batch.items) for batch in container.batches(1)]

    return [length for lengths in run(2, share) for length in lengths]


def _length(items: Any) -> int:
    [length] = {len(leaf) for leaf in items.values()} if isinstance(items, dict) else {len(items)}
    return length


def _instead(message: str, data: Any) -> Any:
    """Return what an error says to pass."""
    way = message.partition("; pass ")[2]
    way = way[way.index("{") :] if "{" in way else way.partition(", or ")[0]
    return eval(way, {"data": data, "numpy": np})


@pytest.mark.parametrize("kind", TAKEN)
def test_rows_are_the_items(kind: str) -> None:
    assert _items(_made(kind, TAKEN[kind])) == [1, 1, 1, 1]


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_at_once_with_what_to_pass(kind: str) -> None:
    data = _made(kind, REFUSED[kind])
    for _ in range(3):
        name = type(data).__name__
        with pytest.raises(TypeError, match=rf"^DistributedDataContainer: data .*{name}") as raised:
            _items(data)
        data = _instead(str(raised.value), data)
        try:
            assert _items(data) == [1, 1, 1, 1]
        except TypeError:
            # What is computed may be a table, which names its own way.
            continue
        return
    raise AssertionError(f"nothing that the errors say to pass is taken: {data}")


class Bare:
    """As pyarrow's arrays, which say their length and no shape."""

    def __dlpack__(self, **options: Any) -> Any:
        return COLUMNS["a"].__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return COLUMNS["a"].__dlpack_device__()


LEAVES: dict[str, Make] = {
    "builtins bare": lambda _: Bare(),
    "builtins tensor": lambda _: Tensor(),
    "h5py dataset": TAKEN["h5py dataset"],
    **{kind: REFUSED[kind] for kind in ("pyarrow array", "polars series", "pandas series")},
    **{kind: REFUSED[kind] for kind in ("dask.array", "xarray array", "tensorflow tensor")},
}


@pytest.mark.parametrize("kind", LEAVES)
def test_leaves_that_are_no_arrays_say_what_to_pass(kind: str) -> None:
    data = {"a": _made(kind, LEAVES[kind])}
    words = r"data\['a'\] is a .*[Pp]ass numpy\.(\w+)\(data\['a'\]\)"
    with pytest.raises(TypeError, match=words) as raised:
        _items(data)
    [way] = re.findall(words, str(raised.value))
    assert _items({"a": getattr(np, way)(data["a"])}) == [1, 1, 1, 1]


def test_data_sets_may_have_keys() -> None:
    class Texts(list[Any]):
        def keys(self) -> list[str]:
            return ["a", "b"]

    class Named(Rows):
        keys = ("a", "b")

        def __iter__(self) -> Iterator[Any]:
            raise AssertionError("an item was read")

    assert _items(Texts(["u", "v", "w", "x"])) == [1, 1, 1, 1]
    assert _items(Texts([np.ones(2)] * 4)) == [1, 1, 1, 1]
    assert _items(Named()) == [1, 1, 1, 1]


def test_items_are_not_read_when_the_container_is_made() -> None:
    class Files:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, item: int) -> Any:
            raise AssertionError("an item was read")

    assert run(2, lambda comm: len(ac.DistributedDataContainer(Files(), comm=comm))) == [2, 2]
