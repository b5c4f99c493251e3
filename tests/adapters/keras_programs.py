"""Programs of Keras, each in a process of its own: its backend is chosen when it is imported.

`python -m tests.adapters.keras_programs fit` trains by `fit` on the ranks of a job, `table` takes steps with
every optimizer there, `virtual` trains as several numbers of ranks, and `steps` takes steps on threads.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import pytest

import arraycomm as ac
from arraycomm.testing import run
from tests.adapters import keras_table

ROWS, BATCH = 48, 12


def model_with(optimizer: Any) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((5,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fitted(optimizer: Any, rank: int, size: int) -> list[Any]:
    """Return the weights after training on this rank's rows of each batch."""
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, 5)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    share = BATCH // size
    rows = np.arange(ROWS).reshape(-1, BATCH)[:, rank * share : (rank + 1) * share].reshape(-1)
    model = model_with(optimizer)
    model.fit(x[rows], y[rows], batch_size=share, epochs=2, shuffle=False, verbose=0)
    weights: list[Any] = model.get_weights()
    return weights


def fit() -> None:
    """Compare training on all ranks with training in this process alone."""
    comm = ac.init()
    for wrap in (lambda plain: plain, keras.optimizers.LossScaleOptimizer):
        plain = wrap(keras.optimizers.Adam(0.01))
        optimizer = ac.DistributedOptimizer(wrap(keras.optimizers.Adam(0.01)))
        assert type(optimizer).__name__ == type(plain).__name__
        together = fitted(optimizer, comm.rank, comm.size)
        bits = comm.allgather_object(b"".join(weight.tobytes() for weight in together))
        assert len(set(bits)) == 1
        for weight, expected in zip(together, fitted(plain, 0, 1), strict=True):
            np.testing.assert_allclose(weight, expected, atol=1e-5)


def virtual() -> None:
    """Train as five ranks on all ranks, on each alone, and on five threads: by `fit`, and by loops over variables."""
    comm = ac.init()
    alone = comm.split(comm.rank)
    plain, scaled = (lambda plain: plain), keras.optimizers.LossScaleOptimizer
    ways = [(virtually_applied, plain)]
    if keras.backend.backend() != "numpy":
        ways += [(virtually_fitted, plain), (virtually_fitted, scaled)]
    for train, wrap in ways:
        found = [train(each, wrap) for each in (comm, alone)]
        assert found[0] == found[1]
        assert comm.allgather_object(found) == [found] * comm.size
    if comm.rank == 0:
        assert run(5, virtually_applied, plain) == [virtually_applied(alone, plain)] * 5


def made_virtual(comm: ac.Communicator, wrap: Any) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    data = {"x": random.normal(size=(33, 5)).astype("float32")}
    plain = wrap(keras.optimizers.Adam(0.01, clipnorm=0.1))
    share = ac.DistributedDataContainer(data, comm=comm, shuffle=True, virtual_ranks=5)
    return share, ac.DistributedOptimizer(plain, comm=comm, virtual_ranks=5)


def virtually_fitted(comm: ac.Communicator, wrap: Any) -> list[bytes]:
    """Return the weights after `fit` with the batches of virtual ranks."""
    share, optimizer = made_virtual(comm, wrap)
    model = model_with(optimizer)
    for epoch in range(2):
        share.set_epoch(epoch)
        batches = (
            (items["x"], items["x"].sum(axis=1, keepdims=True), weights)
            for items, weights in share.batches(2, pad=True)
        )
        model.fit(batches, verbose=0)
    return [weight.tobytes() for weight in model.get_weights()]


def virtually_applied(comm: ac.Communicator, wrap: Any) -> list[bytes]:
    """Return the weights after steps with gradients that are missing on some virtual ranks."""
    share, optimizer = made_virtual(comm, wrap)
    variables = [keras.Variable(np.zeros(5, np.float32)) for _ in range(2)]
    for items, _ in share.batches(2, pad=True):
        grad = keras.ops.convert_to_tensor(items["x"].sum(axis=0))
        optimizer.apply([grad, None if share.virtual_rank % 2 else grad], variables)
        if share.completes_step:
            optimizer.save_own_variables({})
        else:
            with pytest.raises(RuntimeError, match="rounds of virtual ranks are done"):
                optimizer.save_own_variables({})
    assert int(optimizer.iterations) == share.num_batches(2) // -(-5 // comm.size)
    return [keras.ops.convert_to_numpy(variable.value).tobytes() for variable in variables]


def table() -> None:
    """Take steps with every optimizer, as one process with the sum of all gradients."""
    comm = ac.init()
    found = [keras_table.check(row, comm) for row in keras_table.rows()]
    if comm.rank == 0:
        print(f"{sum(found)} programs compared, {len(found) - sum(found)} refused by Keras")
    assert sum(found) > 0.9 * len(found)


def steps() -> None:
    """Take steps with gradients that differ between ranks, and with mistakes."""
    assert run(2, means_of_steps) == [[-1.5, -4.0]] * 2
    run(2, mistakes)
    run(2, skip)
    run(2, entries)
    run(2, around)
    for options, value, says in (
        ({"learning_rate": 0.1}, 0.0, r"learning_rate('\])? is not the same"),
        ({"momentum": 0.9}, 0.0, "momentum is not the same"),
        ({}, 1.0, "call arraycomm.synchronize"),
    ):
        run(3, diverge, options, value, says)


def diverge(comm: ac.Communicator, options: dict[str, float], value: float, says: str) -> None:
    """Take a step that another rank would take otherwise, with other options or from another value."""
    wrong = comm.rank == 2
    plain = keras.optimizers.SGD(**({"learning_rate": 1.0} | (options if wrong else {})))
    variable = keras.Variable(np.full(1, value * wrong, np.float32))
    optimizer = ac.DistributedOptimizer(plain, comm=comm)
    with pytest.raises(ac.MismatchError, match=says):
        optimizer.apply([keras.ops.ones(1)], [variable])
    assert keras.ops.convert_to_numpy(variable.value)[0] == value * wrong


def means_of_steps(comm: ac.Communicator) -> list[float]:
    # As Keras names them on a rank that has made other ones before.
    plain = keras.optimizers.SGD(1.0, name=f"sgd_{comm.rank + 1}")
    optimizer = ac.DistributedOptimizer(plain, comm=comm)
    variables = [
        keras.Variable(np.zeros(1, np.float32), name=f"kernel_{comm.rank + n}") for n in range(2)
    ]
    for step in (1, 2):
        # Whoever has no gradient counts with zeros.
        other = keras.ops.ones(1) * 4 if comm.rank else None
        grads = [keras.ops.ones(1) * comm.rank * step, other]
        if step == 1:
            optimizer.apply(grads, variables)
        else:
            optimizer.apply_gradients(zip(grads, variables, strict=True))
    assert int(optimizer.iterations) == 2
    return [float(keras.ops.convert_to_numpy(v.value)[0]) for v in variables]


def mistakes(comm: ac.Communicator) -> None:
    for wrong, options in [
        (ValueError, {"accumulate": 2}),
        (TypeError, {"compression": ac.Compression()}),
        (TypeError, {"shard": True}),
    ]:
        with pytest.raises(wrong, match=r"(?i)keras"):
            ac.DistributedOptimizer(keras.optimizers.SGD(1.0), comm=comm, **options)
    made = ac.DistributedOptimizer(keras.optimizers.SGD(1.0), comm=comm, compression="float16")
    for again in (made, keras.optimizers.LossScaleOptimizer(made)):
        with pytest.raises(ValueError, match="distributed already"):
            ac.DistributedOptimizer(again, comm=comm)


def entries(comm: ac.Communicator) -> None:
    """Call what is no entry of Keras's, or an entry outside of what is distributed."""
    optimizer = ac.DistributedOptimizer(keras_table.Around(keras.optimizers.SGD(1.0)), comm=comm)
    variable = keras.Variable(np.zeros(1, np.float32))
    grad = keras.ops.ones(1) * comm.rank
    optimizer.apply_by_another_name([grad], [variable])
    assert keras.ops.convert_to_numpy(variable.value)[0] == -0.5
    if comm.rank == 0:
        with pytest.raises(TypeError, match=r"call apply\(grads, variables\), which reduces"):
            optimizer.inner.update_step(grad, variable, 1.0)
    else:
        with pytest.raises(ac.PeerError, match="update_step would apply this rank's own"):
            optimizer.inner.apply([grad], [variable])
    variable.overwrite_with_gradient = True
    with pytest.raises(TypeError, match=r"leave the layer in float32, float16 or bfloat16"):
        optimizer.apply([grad], [variable])


def around(comm: ac.Communicator) -> None:
    """Put a loss scale, which decides from gradients, around a distributed optimizer."""
    inner = ac.DistributedOptimizer(keras.optimizers.SGD(1.0), comm=comm)
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    variable = keras.Variable(np.zeros(1, np.float32))
    with pytest.raises(TypeError, match=r"put it inside: DistributedOptimizer\(LossScaleOpt"):
        scaled.apply([keras.ops.ones(1)], [variable])
    divided = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(inner))
    divided.apply([keras.ops.ones(1) * comm.rank], [variable])
    assert keras.ops.convert_to_numpy(variable.value)[0] == -0.5


def skip(comm: ac.Communicator) -> None:
    """Apply the gradients of one step more on rank 0, which the next step tells all ranks."""
    optimizer = ac.DistributedOptimizer(keras.optimizers.SGD(1.0), comm=comm)
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer.apply([keras.ops.ones(1)], [variable])
    if comm.rank == 1:
        optimizer.iterations.assign(5)
    with pytest.raises(ac.MismatchError, match=r"sgd/iteration('\])? is not the same"):
        optimizer.apply([keras.ops.ones(1)], [variable])


if __name__ == "__main__":
    {"fit": fit, "steps": steps, "table": table, "virtual": virtual}[sys.argv[1]]()
