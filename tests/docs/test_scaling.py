"""Many ranks on paper: the page is current, and what it says follows from its formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from arraycomm._collectives import selection
from arraycomm._transports.control import PAYLOAD, SharedControl, message_slot
from docs.studies import figure
from docs.studies.scaling import fit, measure, model, rounds
from docs.studies.scaling import page as scaling
from docs.studies.scaling.large import cluster
from docs.studies.scaling.network import Network
from docs.studies.scaling.simulated import transports
from tests.support import internals

ALPHA, BETA, GAMMA = 2e-6, 1e-10, 3e-10
SIZES = [2, 3, 4, 7, 8, 64, 100, 257]
SCHEDULES = [
    "pairwise",
    "ring",
    "bruck",
    "bruck_alltoall",
    "doubling",
    "rabenseifner",
]


def machine(per_node: int = 1, **more: float):
    return model.Machine(ALPHA, BETA, ALPHA / 4, BETA / 2, GAMMA, per_node=per_node, **more)


def played(name: str, size: int, nbytes: float, per_node: int = 1) -> float:
    return rounds.play(getattr(rounds, name)(size, nbytes), size, machine(per_node))


def closed(name: str, size: int, nbytes: float, per_node: int = 1) -> float:
    on = machine(per_node)
    folding = {"doubling": model.by_doubling, "rabenseifner": model.by_halving}
    if name in folding:
        return folding[name](size, nbytes, on)
    return model.seconds(getattr(model, name)(size, nbytes, per_node), on)


@pytest.fixture(autouse=True)
def slots_of_users() -> Iterator[None]:
    """Let as many bytes travel with headers as the page says, and not as few as in other tests."""
    few = internals.slots()
    internals.set_slots(*internals.SLOTS)
    yield
    internals.set_slots(*few)


# The page


def test_the_page_is_what_the_stored_measurements_give() -> None:
    assert scaling.PAGE.read_text(encoding="utf-8") == scaling.written(scaling.stored())


def test_the_figure_is_what_the_stored_measurements_give() -> None:
    assert scaling.FIGURE.read_text(encoding="utf-8") == scaling.drawn(scaling.stored())


def test_the_figure_is_well_formed_and_has_a_curve_for_each_entry_of_its_legend() -> None:
    root = ET.fromstring(scaling.drawn(scaling.stored()))
    curves = [e.get("class", "").split()[1] for e in root.iter() if "curve" in e.get("class", "")]
    panels = len(scaling.SIZES) * len(scaling.NODES)
    assert len(set(curves)) == 4
    assert all(curves.count(style) == panels + 1 for style in curves)


def test_axes_are_logarithmic() -> None:
    scale = figure.Scale(1.0, 1000.0, 0.0, 30.0)
    assert [scale(value) for value in scale.decades()] == pytest.approx([0, 10, 20, 30])


@pytest.mark.parametrize(
    ("seconds", "text"), [(1e-6, "1 µs"), (1e-4, "100 µs"), (1e-2, "10 ms"), (10.0, "10 s")]
)
def test_times_have_units(seconds, text) -> None:
    assert figure.time_text(seconds) == text


# The formulas, as the textbooks have them


@pytest.mark.parametrize("size", SIZES)
def test_pairwise_and_ring_move_each_byte_once_in_many_rounds(size) -> None:
    for name in ("pairwise", "ring"):
        expected = (size - 1) * ALPHA + 1e6 * BETA * (size - 1) / size
        assert closed(name, size, 1e6) == pytest.approx(expected)


@pytest.mark.parametrize("size", SIZES)
def test_bruck_moves_each_byte_once_in_few_rounds(size) -> None:
    expected = np.ceil(np.log2(size)) * ALPHA + 1e6 * BETA * (size - 1) / size
    assert closed("bruck", size, 1e6) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_an_all_to_all_in_few_rounds_moves_half_of_the_array_in_each(size) -> None:
    expected = np.log2(size) * (ALPHA + 1e6 * BETA / 2)
    assert closed("bruck_alltoall", size, 1e6) == pytest.approx(expected)


@pytest.mark.parametrize("size", [2, 8, 64])
def test_recursive_doubling_and_halving(size) -> None:
    n, few, share = 1e6, np.log2(size), (size - 1) / size
    assert closed("doubling", size, n) == pytest.approx(few * (ALPHA + n * BETA + n * GAMMA))
    expected = 2 * few * ALPHA + 2 * n * share * BETA + n * share * GAMMA
    assert closed("rabenseifner", size, n) == pytest.approx(expected)


@pytest.mark.parametrize("size", SIZES)
def test_headers(size) -> None:
    on = machine(slot=1e-8, call=3e-6, seen=5e-7)
    few = np.ceil(np.log2(size))
    assert model.header_in_shared_memory(size, on) == pytest.approx(3.5e-6 + size * 1e-8)
    assert model.header_of_messages(size, on) == pytest.approx(3e-6 + few * (ALPHA + 128 * BETA))


@pytest.mark.parametrize("size", [2, 3, 64])
def test_what_is_sent_with_the_header_is_paid_by_the_byte(size) -> None:
    on = machine(row=1e-7, slot=1e-8)
    moved = (size - 1) * 1e3 * (BETA + GAMMA)
    assert model.in_header(size, 1e3, on, shared=False) == pytest.approx(moved + size * 1e-7)


@pytest.mark.parametrize("size", [128, 1024])
def test_only_the_first_rank_of_a_node_sends_its_header(size) -> None:
    on = machine(per_node=64, slot=1e-8, seen=5e-7, seen_byte=1e-11)
    few, nodes = np.ceil(np.log2(size / 64)), size // 64
    expected = few * (ALPHA + 128 * BETA) + 1e-6
    assert model.header_of_messages(size, on) == pytest.approx(expected)
    brought = (nodes - 1) * 64 * 1000 * BETA + (size - 1) * 1000 * (1e-11 + GAMMA)
    assert model.in_header(size, 1000, on, shared=False) == pytest.approx(brought)


def test_slices_are_paid_chunk_by_chunk_in_shared_memory() -> None:
    chunk, on = selection.CHUNK_BYTES, machine(part=1e-6, begin=1e-5)
    one = model.in_slices(16, chunk, on, shared=True)
    share = 15 / 16 * chunk
    local = 2e-5 + 16e-6 + share * GAMMA
    assert one == pytest.approx(2 * (15 * ALPHA + share * BETA) + local)
    assert model.in_slices(16, 3 * chunk, on, shared=True) == pytest.approx(3 * one)
    assert model.in_slices(16, 3 * chunk + 16, on, shared=True) > 3 * one + 15 * ALPHA


def test_between_nodes_folds_hide_behind_messages_or_messages_behind_folds() -> None:
    nbytes, share = 4 << 20, 15 / 16 * (1 << 20)
    moved = 15 * ALPHA + share * BETA
    for gamma, expected in (
        (1e-12, 8 * moved),
        (1e-8, 2 * moved + 4 * share * 1e-8),
    ):
        on = replace(machine(), fold_byte=gamma)
        assert model.in_slices(16, nbytes, on, chunk=1 << 20) == pytest.approx(expected)
    on = machine(part=1e-6, begin=1e-5)
    python, bare = (model.in_slices(16, nbytes, m, chunk=1 << 20) for m in (on, machine()))
    assert python - bare == pytest.approx(4 * (2e-5 + 16e-6))


def test_the_library_cuts_arrays_about_as_well_as_can_be() -> None:
    """No number of chunks is much faster on the machine that is assumed, whatever the ranks and the bytes."""
    worst = 0.0
    for per_node in (1, 64):
        on = cluster(scaling.stored(), per_node)
        for size in (1 << k for k in range(2, 18)):
            for nbytes in (1 << 20, 8 << 20, 100_000_000, 1 << 29):
                if size <= per_node:
                    continue
                best = min(
                    model.in_slices(size, nbytes, on, chunk=chunk)
                    for count in (1, 2, 4, 8, 16, 32, 64, 128)
                    if 64 << 10 <= (chunk := -(-nbytes // count)) <= 256 << 20
                )
                worst = max(worst, model.in_slices(size, nbytes, on) / best)
    assert worst < 1.2


def test_ranks_of_a_node_share_its_link() -> None:
    n, size, per_node = 1e6, 64, 8
    crowded, alone = closed("pairwise", size, n, per_node), closed("pairwise", size, n)
    assert (crowded - 63 * ALPHA) / (alone - 63 * ALPHA) == pytest.approx(8 * 56 / 63)


# The messages, played


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("nbytes", [8, 1 << 20])
def test_the_closed_formula_is_what_playing_the_messages_takes(name, size, nbytes) -> None:
    assert closed(name, size, nbytes) == pytest.approx(played(name, size, nbytes), rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", [64, 128, 512])
def test_so_it_is_with_several_ranks_a_node(name, size) -> None:
    assert closed(name, size, 1 << 20, 64) == pytest.approx(played(name, size, 1 << 20, 64), 0.02)


@pytest.mark.parametrize("name", SCHEDULES)
def test_so_it_is_on_thousands_of_ranks(name) -> None:
    assert closed(name, 2048, 1 << 20) == pytest.approx(played(name, 2048, 1 << 20), rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_everyone_hears_of_everyone(name, size) -> None:
    knows = np.eye(size, dtype=bool)
    for step in getattr(rounds, name)(size, 1.0):
        source = np.flatnonzero(step.to != rounds.NOBODY)
        heard = knows.copy()
        np.logical_or.at(heard, step.to[source], knows[source])
        knows = heard
    assert knows.all()


@pytest.mark.parametrize("size", SIZES)
def test_pairwise_sends_one_message_to_each_other_rank(size) -> None:
    partners = np.array([step.to for step in rounds.pairwise(size, 1.0)])
    for rank in range(size):
        assert sorted(partners[:, rank]) == [other for other in range(size) if other != rank]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_nobody_gets_two_messages_at_once_or_one_from_itself(name, size) -> None:
    for step in getattr(rounds, name)(size, 1.0):
        source = np.flatnonzero(step.to != rounds.NOBODY)
        assert len(set(step.to[source])) == len(source)
        assert (step.to[source] != source).all()


def test_a_rank_that_waits_for_a_late_one_is_late() -> None:
    nobody = rounds.NOBODY
    first = rounds.Step(np.array([1, nobody, nobody]), np.array([1e6, 0, 0]))
    second = rounds.Step(np.array([nobody, 2, nobody]), np.array([0, 0.0, 0]))
    assert rounds.play([first, second], 3, machine()) == pytest.approx(2 * ALPHA + 1e6 * BETA)


# The library's choice


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [2, 3, 8, 64, 1024, 131072])
def test_the_model_chooses_what_the_library_chooses(size, shared) -> None:
    slot = message_slot(size)
    if shared:
        slot = 0
        if size <= 1024:
            slot = SharedControl(0, size, np.zeros(SharedControl.nbytes(size), np.uint8)).slot
    for nbytes in (8, 128, 129, 4096, 64 << 10, 1 << 20, 100_000_000):
        payload = model.payload(size, shared)
        assert not slot or payload == slot - PAYLOAD
        chosen = selection.choose(nbytes, size, payload, shared)
        if chosen == "slices" and not shared and size in (2, 1024):
            (link,) = transports(Network(size, machine()), [0])
            chosen = selection.select(link, "sum", np.dtype(np.float32), nbytes)
        elif chosen == "slices" and not shared and size == 131072:
            chosen = "grid"
        assert model.chosen(size, nbytes, shared) == chosen
        assert chosen in model.ALGORITHMS


def test_a_reduction_takes_its_header_and_its_algorithm() -> None:
    on = machine(row=1e-7, slot=1e-8, part=1e-6, step=1e-6)
    for nbytes, shared, algorithm in (
        (8, True, model.in_header),
        (8, False, model.in_header),
        (256 << 10, True, model.in_steps),
        (1000, False, model.in_header),
        (1 << 20, False, model.in_slices),
    ):
        expected = model.header(8, on, shared) + algorithm(8, nbytes, on, shared)
        assert model.allreduce(8, nbytes, on, shared=shared) == expected


# The measurements


@pytest.mark.parametrize("shared", [True, False])
def test_one_process_can_pretend_to_be_many_ranks(shared) -> None:
    comm = measure.communicator(measure.Pretended(64, shared=shared))
    comm.barrier()
    assert comm.allreduce(np.ones(2, np.float32)).tolist() == [64, 64]
    # All others have answered: nothing is waited for.
    assert comm.allreduce(np.ones(1 << 15, np.float32)).shape == (1 << 15,)


def test_what_was_fitted_is_met() -> None:
    for prediction in fit.predictions(scaling.stored()):
        if prediction.fitted:
            assert prediction.predicted == pytest.approx(prediction.best, rel=0.05)


def test_more_ranks_than_cores_take_turns() -> None:
    here = fit.Here(machine(1 << 30), machine(1 << 30), {"shared": 1e-5}, cores=2)
    two = fit.predicted(here, "shared", 2, 8)
    assert two == pytest.approx(model.allreduce(2, 8, here.machine, shared=True))
    alone = model.allreduce(8, 8, here.machine, shared=True)
    assert fit.predicted(here, "shared", 8, 8) == pytest.approx(4 * (alone + 1e-5))
