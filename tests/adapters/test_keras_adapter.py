from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.launcher import LAUNCHED, needs_mpiexec, run_python
from tests.support.pairwise import EVERY

pytestmark = [
    pytest.mark.skipif(find_spec("keras") is None, reason="needs Keras"),
    pytest.mark.skipif(LAUNCHED, reason="launches programs of its own"),
]
ONLY_WITH_EVERY = pytest.mark.skipif(not EVERY, reason="takes long: EVERY=1 runs it")


def check(program: str, backend: str, monkeypatch: pytest.MonkeyPatch, ranks: int | None) -> None:
    if backend != "numpy" and find_spec(backend) is None:
        pytest.skip(f"needs {backend}")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    done = run_python("-m", "tests.adapters.keras_programs", program, ranks=ranks, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "backend", ["numpy", *(pytest.param(name, marks=ONLY_WITH_EVERY) for name in ("torch", "jax"))]
)
def test_steps_take_the_mean_gradient_and_say_what_is_wrong(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("steps", backend, monkeypatch, None)


@needs_mpiexec
@pytest.mark.parametrize("backend", ["jax", pytest.param("torch", marks=ONLY_WITH_EVERY)])
def test_fit_trains_as_one_process_does(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check("fit", backend, monkeypatch, 2)


@needs_mpiexec
@pytest.mark.parametrize("backend", ["numpy", "jax", pytest.param("torch", marks=ONLY_WITH_EVERY)])
def test_every_optimizer_takes_the_steps_of_one_process(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("table", backend, monkeypatch, 2)


@needs_mpiexec
@pytest.mark.parametrize("backend", ["numpy", "jax", pytest.param("torch", marks=ONLY_WITH_EVERY)])
def test_virtual_ranks_train_alike_on_every_number_of_ranks(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check("virtual", backend, monkeypatch, 2)
