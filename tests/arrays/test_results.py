"""Results belong to the caller alone, in the caller's framework."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from arraycomm._arrays.frameworks import BY_NAME as FRAMEWORKS
from arraycomm._arrays.results import to_framework
from arraycomm._arrays.views import view
from arraycomm._dtypes import BY_NAME
from tests.arrays.test_exchange import aligned
from tests.arrays.test_views import Named
from tests.support.frameworks import PAIRS, content, make, need, pointer, sample

SHARING = [(framework, name) for framework, name in PAIRS if framework != "mlx"]


@pytest.mark.parametrize(("framework", "name"), SHARING)
def test_result_is_handed_over_without_a_copy(framework: str, name: str) -> None:
    like = view(make(framework, sample(name)))
    assert FRAMEWORKS[framework].takes_over(BY_NAME[name].dtype)
    for shape in [(), (3,), (3, 5)]:
        array = aligned(name, shape)
        address = pointer(array)
        assert pointer(to_framework(array, like)) == address


def test_mlx_copies() -> None:
    array = aligned("float32")
    result = to_framework(array, view(make("mlx", sample("float32"))))
    before = content(result)
    array[...] = 0
    assert content(result) == before


@pytest.mark.parametrize(
    ("framework", "dtype"),
    [
        ("torch", "M8[s]"), ("torch", "S3"), ("jax", "M8[s]"), ("jax", "S3"),
        ("array_api_strict", "float16"), ("array_api_strict", ml_dtypes.bfloat16),
        ("mlx", "complex128"),
    ],
)  # fmt: skip
def test_dtypes_that_a_framework_lacks(framework: str, dtype: Any) -> None:
    like = view(make(framework, sample("float32")))
    with pytest.raises(TypeError, match=rf"^{framework} has no dtype .*; cast first"):
        to_framework(np.zeros(2, dtype), like)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "array_api_strict"])
def test_memory_is_freed_with_the_result(framework: str) -> None:
    array = aligned("float32", (1000,))
    memory = weakref.ref(array.base)
    result = to_framework(array, view(make(framework, sample("float32"))))
    del array
    gc.collect(0)
    assert memory() is not None
    assert content(result)[2] == sample("float32", (1000,)).tobytes()
    del result
    gc.collect(0)
    assert memory() is None


def test_arrays_without_dimensions_subclasses_and_unknown_namespaces_get_plain_arrays() -> None:
    for x in (np.array(3.0), np.ones(3).view(np.recarray), Named(np.ones(3))):
        assert type(to_framework(np.ones(3), view(x))) is np.ndarray


def test_torch_results_have_no_history() -> None:
    torch = need("torch")
    with torch.no_grad():
        like = view(torch.nn.Parameter(torch.ones(3)))
    result = to_framework(np.ones(3, np.float32), like)
    assert type(result) is torch.Tensor
    assert not result.requires_grad


class TestJax:
    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        self.jax = need("jax")
        assert not self.jax.config.jax_enable_x64

    @pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
    def test_64_bits_are_never_cut(self, name: str) -> None:
        like = view(self.jax.numpy.ones(3))
        with pytest.raises(TypeError, match=rf"^JAX would cut {name}.*jax_enable_x64"):
            to_framework(aligned(name), like)
        with self.jax.enable_x64(True):
            assert to_framework(aligned(name), like).dtype == name

    def test_64_bits_stay_where_the_source_has_them(self) -> None:
        with self.jax.enable_x64(True):
            x = self.jax.numpy.ones(3, "float64")
        assert to_framework(aligned("float64"), view(x)).dtype == np.float64
        assert not self.jax.config.jax_enable_x64

    @pytest.mark.parametrize("committed", [True, False])
    def test_results_are_as_free_to_move_as_the_source(self, committed: bool) -> None:
        x = self.jax.numpy.ones(3)
        if committed:
            x = self.jax.device_put(x, self.jax.devices()[0])
        assert to_framework(aligned("float32"), view(x)).committed is committed

    def test_results_work_under_jit_and_donation(self) -> None:
        result = to_framework(aligned("int32"), view(self.jax.numpy.ones(3, "int32")))
        expected = np.asarray(result) + 1
        added = self.jax.jit(lambda a: a + 1, donate_argnums=0)(result)
        assert (np.asarray(added) == expected).all()
