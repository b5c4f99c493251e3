"""Whose line is named as that of a call, and which frames an error shows."""

from __future__ import annotations

import functools
import os
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._callsite import call_site, trim
from arraycomm._communicator import Communicator

HERE = Path(__file__).name
FRAMEWORKS = [
    *("torch.optim.optimizer", "jax._src.callback", "jaxlib.xla", "optax._src.base", "flax.linen"),
    *("equinox._module", "optree.ops", "scipy.optimize._minimize", "sklearn.base", "thinc.model"),
    *("keras.src.trainers.trainer", "mlx.optimizers.optimizers"),
    *("hypothesis.core", "_pytest.python", "pluggy._callers", "arraycomm.testing._ranks.run"),
    *("concurrent.futures.thread", "threading", "functools", "contextlib"),
]


def _calling(module: str) -> Callable[..., Any]:
    """Return a function of a module that calls the function it gets."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile("def call(function): return function()", f"/{module}.py", "exec"), names)
    call: Callable[..., Any] = names["call"]
    return call


def test_line_of_a_call_is_outside_frameworks_and_in_the_users_module() -> None:
    for module in FRAMEWORKS:
        assert _calling(module)(call_site).startswith(f"{HERE}:"), module
    mine = (
        "torchvision_of_mine",
        "train",
        "arraycomm.testing.conformance.x",
        "arraycomm.cli.bench.x",
    )
    for module in mine:
        assert _calling(module)(call_site) == f"{module}.py:1"


def test_call_in_a_thread_without_a_frame_of_the_user_is_named_by_what_there_is() -> None:
    with ThreadPoolExecutor(1, thread_name_prefix="pool") as pool:
        assert pool.submit(call_site).result() == "thread pool_0"
        inner, outer = _calling("jax.inner"), _calling("jax.outer")
        assert pool.submit(outer, lambda: 0).result() == 0
        # Not through a lambda of this file, which would be a frame of the user.
        both = ExitStack().callback(call_site)
        assert pool.submit(outer, both).result() == "jax.outer.py:1"
        assert inner(call_site).startswith(HERE)


def test_mismatch_in_an_optimizers_step_names_the_users_line(on_ranks) -> None:
    torch = pytest.importorskip("torch")

    def check(comm: Communicator) -> None:
        parameter = torch.nn.Parameter(torch.ones(2 + comm.rank))
        parameter.grad = torch.ones_like(parameter)
        optimizer = ac.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), comm=comm)
        with pytest.raises(ac.MismatchError, match=rf"at {HERE}:\d+") as caught:
            optimizer.step()
        assert "optimizer.py" not in str(caught.value)

    on_ranks(2, check)


# Errors


def _divide(a: Any, b: Any) -> Any:
    raise ZeroDivisionError("the user's")


def _differ(comm: Communicator) -> Any:
    other = comm.dup()
    other.allreduce(np.ones(3))
    return other.allreduce(np.ones(3 + comm.rank))


class _Updating:
    def update(self, params: Any, grads: Any) -> Any:
        return params


FAILING: dict[str, Callable[[Communicator], Any]] = {
    "collective": lambda c: c.allreduce("text"),
    "fast path": _differ,
    "function of the user": lambda c: c.dup().allreduce(np.ones(3), ac.op(_divide)),
    "request": lambda c: c.dup().iallreduce(np.ones(3), ac.op(_divide)).wait(),
    "several requests": lambda c: ac.waitall([c.dup().ireduce(np.ones(3), ac.op(_divide))]),
    "object": lambda c: c.gather_object(lambda: 0),
    "split": lambda c: c.split("a"),
    "message": lambda c: c.send(np.ones(3), c.size),
    "tree": lambda c: ac.allreduce_tree({"a": "x"}, comm=c),
    "plan": lambda c: c.plan([1.0])([1.0, 2.0]),
    "metrics": lambda c: ac.mean_metrics("x", 1.0, comm=c),
    "optimizer": lambda c: ac.DistributedOptimizer(object(), comm=c),
    "step": lambda c: ac.DistributedOptimizer(_Updating(), comm=c).update([1.0], ["x"]),
    "data": lambda c: ac.DistributedDataContainer([1], comm=c, uneven="no"),
    "exchange": lambda c: ac.exchange(None, "numpy"),
    "init": lambda c: ac.init("no"),
}


def _frames_of(error: BaseException) -> tuple[list[str], list[str]]:
    """Return the files of the user's frames, and of the library's."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    package = os.path.dirname(ac.__file__)
    adapters = os.path.join(os.path.dirname(package), "adapters")
    ours = [file for file in files if file.startswith((package, adapters))]
    return [file for file in files if file not in ours], ours


@pytest.mark.parametrize("call", FAILING.values(), ids=FAILING)
def test_error_shows_the_users_frames_and_one_of_the_library(on_ranks, call) -> None:
    def check(comm: Communicator) -> None:
        with pytest.raises(Exception) as caught:
            call(comm)
        users, ours = _frames_of(caught.value)
        assert len(ours) <= 1, ours
        assert set(users) == {__file__}
        if isinstance(caught.value, ZeroDivisionError):
            assert caught.value.__traceback__ is not None
            assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "_divide"
        linked = caught.value.__cause__ or caught.value.__context__
        assert linked is None or not _frames_of(linked)[1]

    on_ranks(2, check)


def test_methods_that_are_no_entries_leave_errors_to_the_runner() -> None:
    """It trims them: whoever calls something else trims them itself, or has to be marked with `entry`."""
    for kind in Communicator.__mro__[:-1]:
        for name, method in vars(kind).items():
            public = isinstance(method, FunctionType) and not name.startswith("_")
            if public and not hasattr(method, "__wrapped__"):
                assert {"call", "call_within", "start", "leave_by"} & {*method.__code__.co_names}, (
                    name
                )


def test_error_raised_twice_does_not_show_the_first_time(on_ranks) -> None:
    def check(comm: Communicator) -> None:
        request = comm.iallreduce(np.ones(3), ac.op(_divide))
        for time in range(3):
            with pytest.raises((ZeroDivisionError, ac.PeerError)) as caught:
                request.wait()
            frames = traceback.extract_tb(caught.value.__traceback__)
            # Kept no longer than for the first time: frames keep arrays.
            own = time == 0 and isinstance(caught.value, ZeroDivisionError)
            assert [frame.name for frame in frames] == ["check", "_divide"][: 1 + own]

    on_ranks(2, check)


def test_developers_see_all_frames(on_ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARRAYCOMM_TRACEBACK", "full")

    def check(comm: Communicator) -> None:
        with pytest.raises(TypeError) as caught:
            comm.allreduce("text")
        assert len(_frames_of(caught.value)[1]) > 3

    on_ranks(2, check)


def test_traceback_for_other_ranks_shows_the_users_frames_only(on_ranks) -> None:
    def check(comm: Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises(TypeError):
                comm.allreduce("text")
            return
        with pytest.raises(ac.PeerError) as caught:
            comm.allreduce(1.0)
        assert 'comm.allreduce("text")' in caught.value.traceback
        assert os.path.join("arraycomm", "_collectives") not in caught.value.traceback

    on_ranks(2, check)


def test_public_names_are_the_packages_and_errors_keep_what_they_carry_in_a_pickle() -> None:
    for name in ac.__all__:
        value = getattr(ac, name)
        if isinstance(value, type | FunctionType):
            assert (value.__module__, value.__qualname__) == ("arraycomm", name)
        assert pickle.loads(pickle.dumps(value)) is value
    error = pickle.loads(pickle.dumps(ac.PeerError("gone", rank=3, traceback="text")))
    assert (str(error), error.rank, error.traceback) == ("gone", 3, "text")
    assert traceback.format_exception_only(error) == ["arraycomm.PeerError: gone\n"]


def test_an_error_of_the_users_own_keeps_every_frame() -> None:
    @functools.singledispatch
    def fail(x: object) -> None:
        raise ValueError(x)

    def files(error: BaseException) -> list[str]:
        return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]

    with pytest.raises(ValueError, match="1") as caught:
        fail(1)
    before = files(caught.value)
    trim(caught.value)
    assert files(caught.value) == before
    assert any(file.endswith("functools.py") for file in before)
