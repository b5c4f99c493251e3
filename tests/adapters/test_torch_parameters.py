"""Parameters that come, go and are swapped, and passes that raise: training is that of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

import arraycomm as ac
from arraycomm.testing import run

torch = pytest.importorskip("torch")

from torch.nn import Parameter  # noqa: E402

from arraycomm.adapters.torch import no_sync  # noqa: E402
from properties.test_torch_laws import SLACK, Doubled  # noqa: E402

SAMPLES, INPUTS = 12, 4


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A line, with rows that programs replace, prune and grow as the points of a cloud."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.linspace(-1, 1, INPUTS * 3, dtype=torch.float64)
        self.rows = Parameter(numbers.reshape(3, INPUTS).clone())
        self.scale = Parameter(torch.ones(1, dtype=torch.float64))

    def loss(self, step: int, mine: slice) -> Any:
        numbers = torch.arange(SAMPLES * INPUTS, dtype=torch.float64).reshape(SAMPLES, INPUTS)
        x = torch.sin(numbers * (step + 1))[mine].to(self.rows.dtype)
        return 10 * ((x @ self.rows.T).tanh().sum(1) * self.scale - x[:, 0]).square().mean()


def move_state(optimizer: Any, old: Any, new: Any, change: Callable[[Any], Any]) -> None:
    state = optimizer.state.pop(old, None)
    if state:
        sized = {k: change(v) if v.shape == old.shape else v for k, v in state.items()}
        optimizer.state[new] = sized


def exchange(model: Model, optimizer: Any, change: Callable[[Any], Any], how: str) -> None:
    """Put a parameter in the place of another, as programs do that prune and grow."""
    old, new = model.rows, Parameter(change(model.rows.detach()))
    group = optimizer.param_groups[0]
    params = [new if p is old else p for p in group["params"]]
    move_state(optimizer, old, new, change)
    if how == "item":
        group["params"][0] = new
    else:
        group["params"] = params
    model.rows = new


def load(model: Model, _: Any) -> None:
    model.load_state_dict({key: value * 0.9 for key, value in model.state_dict().items()})


# What programs do between two steps, beside what a law draws.
CHANGES: dict[str, Callable[[Model, Any], None]] = {
    "pruned": lambda m, o: exchange(m, o, lambda x: x[:-1].clone(), "item"),
    "grown": lambda m, o: exchange(m, o, lambda x: torch.cat([x, x[:1]]), "list"),
    "loaded": load,
    "converted": lambda m, _: m.float().double(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"op": "sum"},
    "sharded": {"shard": True},
    "compressed": {"compression": Doubled()},
}


def train(comm: ac.Communicator | None, change: str, options: str, *, rows_only: bool) -> Any:
    model = Model()
    trained = [model.rows] if rows_only else [model.rows, model.scale]
    optimizer = torch.optim.Adam(trained, lr=0.1, eps=0.1)
    size = 1 if comm is None else comm.size
    if comm is not None:
        ac.DistributedOptimizer(optimizer, comm=comm, verify_every=1, **OPTIONS[options])
    rank = 0 if comm is None else comm.rank
    mine = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)
    for step in range(5):
        divisor = size if options == "sum" else 1
        # In two passes, of which the second adds to what is reduced.
        for _ in range(2):
            (model.loss(step, mine) / divisor).backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 2):
            CHANGES[change](model, optimizer)
            trained = list(optimizer.param_groups[0]["params"])
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize(
    ("change", "options"),
    [
        *((change, "plain") for change in CHANGES),
        *((change, "sharded") for change in ("pruned", "loaded")),
        ("grown", "compressed"),
        ("converted", "sum"),
    ],
)
@pytest.mark.usefixtures("swapping")
def test_training_is_that_of_one_process(change: str, options: str) -> None:
    rows_only = options != "plain"
    want = train(None, change, options, rows_only=rows_only)
    for got in run(2, lambda comm: train(comm, change, options, rows_only=rows_only)):
        slack = 1e-6 if change == "converted" else SLACK
        torch.testing.assert_close(got, want, rtol=slack, atol=slack)


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"virtual_ranks": 4}], ids=str)
def test_sums_under_way_follow_their_parameters(options: dict[str, int]) -> None:
    def train(comm: ac.Communicator, *, drops: bool) -> Any:
        weights = [Parameter(torch.zeros(2)) for _ in range(3)]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        ac.DistributedOptimizer(optimizer, comm=comm, op="sum", verify_every=0, **options)
        for turn in range(4):
            if turn == 1 and drops:
                del optimizer.param_groups[0]["params"][0]
            used = weights[drops and turn > 0 :]
            sum(
                (2 + comm.rank + turn) ** n * w.sum() for n, w in enumerate(used, -len(used))
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [weight.tolist() for weight in weights[1:]]

    assert run(2, partial(train, drops=True)) == run(2, partial(train, drops=False))


# Passes that raise ------------------------------------------------------------------------------


def test_changed_gradients_of_a_pass_that_raised_are_refused() -> None:
    def train(comm: ac.Communicator) -> str:
        model = Model()
        optimizer = ac.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
        handle = model.rows.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.loss(0, slice(None)).backward()
        handle.remove()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with pytest.raises(RuntimeError, match="was not reduced by backward") as caught:
            optimizer.step()
        # What the message says.
        optimizer.zero_grad()
        return str(caught.value)

    for told in run(2, train):
        assert "backward() had raised; call optimizer.zero_grad() then" in told


# Parameters that no pass can know ---------------------------------------------------------------


def append(optimizer: Any) -> Any:
    new = Parameter(torch.ones(2, dtype=torch.float64))
    optimizer.param_groups[0]["params"].append(new)
    return new


def test_a_gradient_that_no_pass_has_reduced_is_refused() -> None:
    """A pass in which only new parameters take part calls no hook."""

    def train(comm: ac.Communicator) -> tuple[str, list[float]]:
        plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        optimizer = ac.DistributedOptimizer(plain, comm=comm)
        new = append(optimizer)
        (new * comm.rank).sum().backward()
        with pytest.raises(RuntimeError, match="backward") as caught:
            optimizer.step()
        optimizer.zero_grad()
        new = append(optimizer)
        optimizer.zero_grad()
        (new * (1 + comm.rank)).sum().backward()
        return str(caught.value), new.grad.tolist()

    for told, grad in run(2, train):
        assert "call optimizer.zero_grad() after such a change" in told
        assert grad == [1.5, 1.5]


def test_a_parameter_that_one_rank_replaces_is_an_error_on_all() -> None:
    def train(comm: ac.Communicator) -> str:
        model = Model()
        optimizer = ac.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm=comm)
        for step in range(2):
            if step and comm.rank == 1:
                exchange(model, optimizer, lambda x: x * 1.0, "item")
            try:
                model.loss(step, slice(None)).backward()
                optimizer.step()
            except ac.MismatchError as error:
                return str(error)
        return ""

    for told in run(3, train):
        assert "rank 1: step 2 with other parameters than before" in told
        assert "exchange parameters in the same ones" in told


# Compiled passes, and what is left behind -------------------------------------------------------


class TestProcesses:
    """On as many ranks as there are processes; `test_processes` runs them on more."""

    @pytest.mark.filterwarnings("ignore")
    def test_passes_that_torch_compiles_are_reduced_in_the_step(
        self, world: ac.Communicator
    ) -> None:
        """Autograd drops the callback at their end."""
        compiled = pytest.importorskip("torch._dynamo.compiled_autograd")

        def make_pass(model: Model, *ranks: int) -> None:
            sum(model.loss(rank, slice(None)) / len(ranks) for rank in ranks).backward()

        trained, alone = Model(), Model()
        plain = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (trained, alone)]
        optimizer = ac.DistributedOptimizer(plain[0], comm=world)
        for _ in range(2):
            with compiled._enable(torch.compile(backend="eager")):
                make_pass(trained, world.rank)
            make_pass(alone, *range(world.size))
            for each in plain:
                each.step()
            for each in plain:
                each.zero_grad()
        same = list(trained.parameters()), list(alone.parameters())
        torch.testing.assert_close(*same, rtol=SLACK, atol=SLACK)
        with compiled._enable(torch.compile(backend="eager")):
            make_pass(trained, world.rank)
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
        if world.size > 1:
            with pytest.raises(RuntimeError, match="compiled_autograd = False"):
                optimizer.step()
        optimizer.zero_grad()
        make_pass(trained, world.rank)
        with (
            pytest.raises(RuntimeError, match=r"call optimizer.zero_grad\(\) before"),
            compiled._enable(torch.compile(backend="eager")),
        ):
            make_pass(trained, world.rank)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("count", [6, 60_000])
def test_all_that_a_step_has_read_can_be_resized(options: str, count: int) -> None:
    def train(comm: ac.Communicator) -> list[bool]:
        given = Parameter(torch.ones(count)), Parameter(torch.ones(3))
        plain = torch.optim.Adam(given, lr=0.1)
        optimizer = ac.DistributedOptimizer(
            plain, comm=comm, verify_every=1, bucket_bytes=1, **OPTIONS[options]
        )
        for _ in range(2):
            sum(parameter.square().sum() for parameter in given).backward()
            with no_sync(optimizer):
                given[0].sum().backward()
            optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        tensors = [*given, *(parameter.grad for parameter in given), *states]
        return [tensor.untyped_storage().resizable() for tensor in tensors]

    assert all(all(each) for each in run(2, train))


def test_parameters_in_another_order_are_told_apart_by_their_shapes_too() -> None:
    def train(comm: ac.Communicator) -> list[Any]:
        # The bytes of these have equal digests.
        given = [Parameter(torch.zeros(count)) for count in (3, 4)]
        plain = torch.optim.SGD(given[:: 1 - 2 * comm.rank], lr=1.0)
        optimizer = ac.DistributedOptimizer(plain, comm=comm)
        sum((parameter * (comm.rank + 1)).sum() for parameter in given).backward()
        optimizer.step()
        return [parameter.tolist() for parameter in given]

    assert run(2, train) == [[[-1.5] * 3, [-1.5] * 4]] * 2
