"""joblib's tasks over ranks, against joblib in one process."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import arraycomm as ac
from arraycomm import Communicator
from tests.support.launched import start_numbered
from tests.support.launcher import LAUNCHED
from tests.support.on_ranks import OnRanks, alone, each_rank_of

pytest.importorskip("sklearn")

import joblib
from joblib import Parallel, delayed, parallel_config
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.svm import SVC

from arraycomm.adapters.joblib import run

X, Y = (part[:240] for part in load_digits(return_X_y=True))
BIG = np.ones(200_000)


def _learnt(comm: Communicator) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        svc = GridSearchCV(SVC(), {"C": [1, 10], "gamma": [1e-3, 1e-4]}, n_jobs=-1).fit(X, Y)
        logistic = GridSearchCV(LogisticRegression(max_iter=9), {"C": [0.1, 1]}).fit(X, Y)
        forest = RandomForestClassifier(7, n_jobs=-1, random_state=0).fit(X, Y)
    scores = cross_val_score(SVC(), X, Y)
    found = [svc.cv_results_["mean_test_score"], svc.best_estimator_.dual_coef_, scores]
    found += [logistic.best_estimator_.coef_, forest.predict_proba(X)]
    return [array.tobytes() for array in found]


def _raises(number: int) -> int:
    if number == 3:
        raise KeyError("three")
    return number


def _refuses(array: Any) -> float:
    assert not array.flags.writeable
    return float(array.sum())


def _squares(count: int) -> Any:
    assert joblib.effective_n_jobs(-1) == 1
    return Parallel(n_jobs=-1)(delayed(pow)(number, 2) for number in range(count))


class TestOnProcesses:
    def test_searches_and_forests_find_what_one_process_finds(
        self, on_ranks: OnRanks, few: int
    ) -> None:
        with parallel_config("sequential"):
            expected = _learnt(None)
        assert on_ranks(few, lambda comm: run(_learnt, None, comm=comm)) == [expected] * few

    @each_rank_of(3)
    def test_errors_end_the_call_on_all_ranks(self, comm: Communicator) -> None:
        def fails() -> None:
            raise ZeroDivisionError

        def interrupted() -> None:
            Parallel()(_interrupting(comm.size))

        for kind, fn in (
            (KeyError, lambda: Parallel()(delayed(_raises)(number) for number in range(9))),
            (ZeroDivisionError, fails),
            (KeyboardInterrupt, interrupted),
            (TypeError, threading.Lock),
            (TimeoutError, lambda: Parallel(timeout=0.05)([delayed(time.sleep)(0.3)])),
        ):
            with pytest.raises(kind if comm.rank == 0 else ac.PeerError) as caught:
                run(fn, comm=comm)
            if comm.rank == 0 and kind is KeyError:
                (note, *_) = caught.value.__notes__
                assert note.startswith("raised by a task of joblib on rank ")
                assert "in _raises" in note
            assert comm.allreduce(1) == comm.size
        assert run(lambda: "none calls joblib", comm=comm) == "none calls joblib"

    def test_tasks_get_large_arrays_once_and_cannot_write_to_them(
        self, on_ranks: OnRanks, several: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sent: list[Any] = []
        send = Communicator.send_object

        def recorded(self: Communicator, obj: Any, dest: int) -> None:
            sent.append(obj)
            send(self, obj, dest)

        def sums() -> list[list[float]]:
            array, found = BIG.copy(), []
            for factor in (1, 2):
                # Between calls it may change.
                array *= factor
                found.append(Parallel(batch_size=1)(delayed(_refuses)(array) for _ in range(16)))
            return found

        monkeypatch.setattr(Communicator, "send_object", recorded)
        found = on_ranks(several, lambda comm: run(sums, comm=comm))
        assert found == [[[200_000.0] * 16, [400_000.0] * 16]] * several
        arrays = [array for task in sent if isinstance(task, tuple) for array in task[1].values()]
        assert len(arrays) <= 2 * (several - 1)

    @each_rank_of(3)
    def test_calls_inside_a_task_are_sequential(self, comm: Communicator) -> None:
        def nested() -> Any:
            return Parallel()(delayed(_squares)(count) for count in range(4))

        assert run(nested, comm=comm) == [[0, 1, 4][:count] for count in range(4)]


def _interrupting(size: int) -> Iterator[Any]:
    """Yield tasks on which the other ranks still work when Ctrl-C comes."""
    for _ in range(size - 1):
        yield delayed(time.sleep)(0.2)
    raise KeyboardInterrupt


DONE = threading.Event()
LEFT: list[int] = []


def _takes_until_all_others_are_done(number: int) -> None:
    if number == 0:
        assert DONE.wait(60)
        return
    LEFT.append(number)
    if len(LEFT) == 20:
        DONE.set()


@alone
def test_rank_that_is_done_gets_the_next_task(on_ranks: OnRanks) -> None:
    def drive() -> None:
        Parallel(batch_size=1)(delayed(_takes_until_all_others_are_done)(n) for n in range(21))

    on_ranks(2, lambda comm: run(drive, comm=comm))


@alone
def test_backend_says_where_it_works() -> None:
    with pytest.raises(RuntimeError, match=r"pass what uses the backend to that, on all ranks"):
        joblib.parallel_config("arraycomm")


DIES = """
import os, arraycomm as ac
from contextlib import suppress
from joblib import Parallel, delayed
from arraycomm.adapters.joblib import run
def dies(number):
    if ac.world().rank == 1: os.kill(os.getpid(), 9)
ac.init()
for _ in range(8):
    with suppress(ZeroDivisionError, ac.PeerError):
        run(lambda: Parallel()(delayed(divmod)(1, number - 4) for number in range(9)))
try: run(lambda: Parallel()(delayed(dies)(number) for number in range(9)))
except ac.PeerError as error: os.write(1, f"PeerError: {ac.world().rank}: {error}\\n".encode())
"""


@pytest.mark.skipif(LAUNCHED, reason="launches programs of its own")
def test_rank_that_dies_ends_the_call() -> None:
    job, statuses = start_numbered(3, "-c", DIES)
    assert statuses[1] == -9
    assert "PeerError: 0: rank 1 has died without a word" in job.stdout
    assert "PeerError: 2: " in job.stdout
    # Nor did the tasks that were given up before leave a warning.
    assert "never waited" not in job.stdout
