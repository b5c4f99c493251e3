"""`exchange` shares memory wherever that is safe, says why where it is not, and loses no bit."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

import numpy as np
import pytest

from arraycomm._arrays.buffer import allocate
from arraycomm._arrays.exchange import exchange
from arraycomm._dtypes import BY_NAME
from tests.arrays.test_dlpack import Producer
from tests.arrays.test_views import Described, Named
from tests.support.frameworks import (
    FRAMEWORKS,
    INSTALLED,
    PAIRS,
    content,
    make,
    need,
    pointer,
    sample,
)
from tests.support.pairwise import pairwise

_WIDE = ("int64", "uint64", "float64", "complex128")
# A dtype from one framework to another that has it.
TRIPLES = [
    (framework, other, name)
    for framework, name in PAIRS
    for other in INSTALLED
    if (other, name) in PAIRS
]


@pytest.fixture(autouse=True)
def _wide_jax() -> Any:
    """Let JAX keep 64 bits in these tests."""
    if importlib.util.find_spec("jax") is None:
        yield
        return
    with need("jax").enable_x64(True):
        yield


def aligned(name: str, shape: tuple[int, ...] = (3, 4, 5)) -> Any:
    array = allocate(shape, BY_NAME[name].dtype)
    array[...] = sample(name, shape)
    return array


def misaligned(name: str = "float32") -> Any:
    return aligned(name, (100,))[1:]


@pytest.mark.parametrize(
    ("framework", "other", "name"),
    # Torch takes no memory that it may not write to.
    pairwise(t for t in TRIPLES if "mlx" not in t and t[:2] != ("jax", "torch")),
)
def test_aligned_memory_is_shared(framework: str, other: str, name: str) -> None:
    need(framework)
    need(other)
    x = exchange(aligned(name), framework) if framework == "jax" else make(framework, aligned(name))
    there = exchange(x, other, copy=False)
    assert pointer(there) == pointer(x)
    assert pointer(exchange(x, other)) == pointer(x)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_same_framework_gets_the_same_object(framework: str) -> None:
    x = make(framework, sample("float32"))
    assert exchange(x, framework) is x
    assert exchange(x, x, copy=False) is x
    assert exchange(x, framework, copy=True) is not x


@pytest.mark.parametrize("framework", ["jax", "mlx"])
def test_immutable_arrays_are_read_only_in_numpy(framework: str) -> None:
    x = make(framework, sample("float32"))
    there = exchange(x, "numpy")
    assert pointer(there) == pointer(x)
    with pytest.raises(ValueError, match="read-only"):
        there[0, 0, 0] = 1
    assert exchange(x, "numpy", copy=True).flags.writeable


def read_only() -> Any:
    x = sample("float32")
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("other", "make_x", "words"),
    [
        ("torch", read_only, "read-only"),
        ("torch", lambda: sample("float32")[::-1], "negative strides"),
        ("torch", lambda: np.zeros(3, "i1,f8")["f1"], "aligned"),
        ("torch", lambda: np.frombuffer(bytearray(13), "f4", 3, 1), "aligned"),
        ("torch", lambda: make("jax", sample("float32")), "read-only"),
        ("jax", lambda: aligned("float32").T, "C-contiguous"),
        ("jax", misaligned, "64 bytes"),
        ("mlx", lambda: sample("float32"), "MLX copies"),
        ("numpy", lambda: 3.0, "a number has no memory"),
        ("numpy", lambda: np.float32(3), "a number has no memory"),
        ("numpy", lambda: np.arange(3, dtype=">i4"), "converted"),
        ("torch", lambda: np.arange(3, dtype=">i4"), "converted"),
    ],
)
def test_copy_false_says_why_not(other: str, make_x: Any, words: str) -> None:
    need(other)
    x = make_x()
    with pytest.raises(BufferError, match=rf"^exchange: copy=False, but .*{words}.*; pass copy="):
        exchange(x, other, copy=False)
    copied = exchange(x, other)
    assert content(copied)[1:] == content(np.asarray(x, np.asarray(x).dtype.newbyteorder("=")))[1:]


def test_a_jax_array_does_not_follow_memory_that_it_copied() -> None:
    need("jax")
    x = misaligned()
    there = exchange(x, "jax")
    before = content(there)
    x[...] = 0
    assert content(there) == before


def test_lazy_conjugation_is_resolved() -> None:
    x = need("torch").tensor([1 + 2j]).conj()
    assert exchange(x, "numpy").tolist() == [1 - 2j]
    with pytest.raises(BufferError, match="converted"):
        exchange(x, "numpy", copy=False)


def test_numbers_buffers_and_what_shows_memory_become_arrays() -> None:
    for number in (True, 3, 2.5, 1j, np.float32(2)):
        x = exchange(number, "numpy")
        assert type(x) is np.ndarray
        assert x[()] == number
    memory = bytearray(b"\1\2")
    exchange(memory, "numpy", copy=False)[0] = 9
    assert memory[0] == 9
    assert not exchange(b"\1\2", "numpy").flags.writeable
    x = np.arange(3.0)
    assert pointer(exchange(Described(x), "numpy")) == pointer(x)
    producer = Producer(x)
    assert exchange(producer, "numpy").tolist() == [0, 1, 2]
    assert len(producer.requests) == 1


def test_unknown_namespaces_are_given_their_own_arrays() -> None:
    class Other(Named):
        pass

    assert type(exchange(np.ones(3), Named(np.ones(1)))) is np.ndarray
    x = Named(np.ones(3))
    assert exchange(x, x) is x
    assert exchange(x, Other(np.ones(3))) is not x


def test_empty_arrays_never_need_a_copy() -> None:
    for other in ("numpy", "torch", "jax"):
        if importlib.util.find_spec(other):
            assert exchange(read_only()[:0, ::-1], other, copy=False).shape == (0, 4, 5)


@pytest.mark.parametrize("name", _WIDE)
def test_jax_never_cuts_64_bits(name: str) -> None:
    with (
        need("jax").enable_x64(False),
        pytest.raises(TypeError, match=r"^exchange: JAX would cut .*jax_enable_x64"),
    ):
        exchange(sample(name), "jax")


def test_history_is_not_dropped() -> None:
    torch = need("torch")
    x = torch.ones(3, requires_grad=True)
    for to in ("numpy", "torch"):
        with pytest.raises(TypeError, match=r"^exchange: x requires gradients"):
            exchange(x, to)
    with torch.no_grad():
        assert pointer(exchange(x, "numpy")) == x.data_ptr()
    # The model of a result may require them.
    assert type(exchange(np.ones(3), x)) is torch.Tensor


@pytest.mark.parametrize(
    ("x", "to", "copy", "error", "words"),
    [
        (np.ones(3), "tensorflow", None, ValueError, "to must be one of numpy, torch, jax"),
        (np.ones(3), "", None, ValueError, "to must be one of"),
        (np.ones(3), 3.0, None, TypeError, "to must be the name of a framework or an array; got f"),
        (np.ones(3), None, None, TypeError, "to must be an array"),
        (np.ones(3), "cupy", None, ImportError, "to='cupy' needs cupy.*install it"),
        (np.ones(3), "numpy", "never", ValueError, "copy must be None, True or False"),
        (np.ones(3, ">f8"), "numpy", np.False_, BufferError, "copy=False, but"),
        ([1, 2], "numpy", None, TypeError, "x must be an array"),
    ],
)
def test_wrong_arguments_are_named(x: Any, to, copy, error, words, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(error, match=rf"^exchange: {words}"):
        exchange(x, to, copy=copy)


def test_the_page_of_pairs_is_current() -> None:
    for framework in ("torch", "jax", "array_api_strict"):
        need(framework)
    if importlib.util.find_spec("mlx"):
        pytest.skip("the page is made without MLX")
    page = importlib.import_module("docs.studies.interop.page")
    assert page.written() == page.PAGE.read_text(encoding="utf-8")
