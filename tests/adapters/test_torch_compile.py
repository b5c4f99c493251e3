"""Calls in a function that `torch.compile` compiles: torch's graph ends there, and begins anew behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm._communicator import Communicator
from tests.support.on_ranks import each_rank_of

torch = pytest.importorskip("torch")
calls = pytest.importorskip("arraycomm.adapters.torch._collectives")

# Torch's own, on its import.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def compiled_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect the files of the frames that torch looks at."""
    from torch._dynamo import convert_frame, reset

    files: list[str] = []
    look = convert_frame.CatchErrorsWrapper.__call__

    def note(self: Any, frame: Any, *args: Any) -> Any:
        files.append(frame.f_code.co_filename)
        return look(self, frame, *args)

    monkeypatch.setattr(convert_frame.CatchErrorsWrapper, "__call__", note)
    yield files
    reset()


def _collectives(c: Communicator, x: Any) -> Any:
    request = c.iallreduce(x * 2)
    gathered = c.allgather(x + 1)[0] + c.alltoall(x[None])[0] + c.bcast(x)
    c.barrier()
    return c.allreduce(x) + request.wait() + gathered + c.rank


def _messages(c: Communicator, x: Any) -> Any:
    sent = c.isend(x + 1, 0)
    received = c.recv(0, like=x)
    while not sent.test():
        pass
    ac.waitall([sent])
    return received * 2


def _trees(c: Communicator, x: Any) -> Any:
    reduced = ac.allreduce_tree({"a": x * 3}, "sum", comm=c)["a"]
    gradients = ac.allreduce_gradients([x], comm=c)[0]
    mean = ac.mean_metrics({"l": x}, 2.0, comm=c)["l"]
    return reduced + ac.synchronize([x], comm=c)[0] + gradients + mean


def _blocks(c: Communicator, x: Any) -> Any:
    with ac.raise_together(c):
        y = x + 1
    return c.allreduce(y)


STEPS: dict[str, tuple[Callable[[Communicator, Any], Any], float]] = {
    "collectives": (_collectives, 7.0),
    "messages": (_messages, 4.0),
    "trees": (_trees, 6.0),
    "blocks": (_blocks, 2.0),
}


@pytest.mark.parametrize(("step", "expected"), STEPS.values(), ids=STEPS)
@each_rank_of(1)
def test_library_is_called_and_not_compiled(
    comm: Communicator,
    compiled_files: list[str],
    step: Callable[[Communicator, Any], Any],
    expected: float,
) -> None:
    compiled = torch.compile(lambda x: step(comm, x), backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(4)).tolist() == [expected] * 4
    _assert_only_the_test_was_compiled(compiled_files)


@each_rank_of(1)
def test_plan_and_optimizer_work_in_a_compiled_step(
    comm: Communicator, compiled_files: list[str]
) -> None:
    plan = comm.plan([torch.ones(4)], "sum")
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = ac.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), comm=comm)

    @torch.compile(backend="eager")
    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = (parameter * x).sum()
        loss.backward()
        optimizer.step()
        return plan([x + 1])[0]

    for _ in range(3):
        assert step(torch.ones(4)).tolist() == [2.0] * 4
    assert np.allclose(parameter.detach().numpy(), -0.5)
    _assert_only_the_test_was_compiled(compiled_files)


@each_rank_of(1)
def test_error_in_a_compiled_function_names_its_line(
    comm: Communicator, compiled_files: list[str]
) -> None:
    compiled = torch.compile(lambda x: comm.iallreduce(x + 1), backend="eager")
    assert os.path.basename(__file__) in repr(compiled(torch.ones(3)))
    wrong = torch.compile(lambda x: comm.allreduce(x + 1, "nope"), backend="eager")
    with pytest.raises(ValueError, match="op must be one of"):
        wrong(torch.ones(3))
    _assert_only_the_test_was_compiled(compiled_files)


def _assert_only_the_test_was_compiled(files: list[str]) -> None:
    package = os.path.dirname(ac.__file__)
    ours = (package + os.sep, os.path.join(os.path.dirname(package), "adapters") + os.sep)
    assert __file__ in files
    assert not [file for file in files if file.startswith(ours)]


def test_adapter_is_left_out_of_graphs_by_a_torch_that_cannot_be_told_of_code(
    compiled_files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "can_be_hidden", lambda: False)
    is_linear = calls.outside_graphs(calls._is_linear)
    assert torch.compile(lambda x: (x * 2, is_linear("sum")), backend="eager")(torch.ones(3))[1]
    _assert_only_the_test_was_compiled(compiled_files)
