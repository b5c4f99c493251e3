"""What a call takes along from its caller's thread, with frameworks that stand in for those with CUDA."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from arraycomm._cuda.callers import Caller, Waiters


class _Streams(threading.local):
    """The current stream of each thread; that of a new one is the default stream."""

    current = 0

    @contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def _in_a_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result()


def test_a_request_works_in_its_own_stream_and_who_takes_its_result_waits(monkeypatch) -> None:
    torch, waiting, recorded = _Streams(), list[int](), list[int]()
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda _: SimpleNamespace(cuda_stream=torch.current),
        stream=lambda stream: torch.within(stream.cuda_stream),
        ExternalStream=lambda stream, device: SimpleNamespace(cuda_stream=stream),
    )
    raw = SimpleNamespace(_cuda_getCurrentRawStream=lambda _: torch.current)
    fake = SimpleNamespace(cuda=cuda, _C=raw, is_grad_enabled=bool)
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    caller = Caller(0, 5)
    with caller.here():
        assert torch.current == 5
    memory: Any = SimpleNamespace(device=0, stream=5)
    event: Any = SimpleNamespace(wait_on=waiting.append)
    waiters = Waiters(memory)
    waiters.wait(event)
    assert not waiting
    waiters.add(object(), [7, 5])
    waiters.add(SimpleNamespace(record_stream=lambda stream: recorded.append(stream.cuda_stream)))
    with torch.within(3):
        waiters.wait(event)
    assert (waiting, recorded) == ([7, 3], [3])
    waiters.add(object(), [9])
    memory.record = lambda: event
    del waiters
    assert waiting[2:] == [9]


def test_another_thread_has_the_callers_grad_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    off = _Streams()
    fake = SimpleNamespace(
        cuda=SimpleNamespace(is_initialized=lambda: False),
        is_grad_enabled=lambda: not off.current,
        set_grad_enabled=lambda enabled: off.within(int(not enabled)),
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    with off.within(1):
        caller = Caller(None)

    def work() -> tuple[bool, bool]:
        with caller.here():
            inside = fake.is_grad_enabled()
        return inside, fake.is_grad_enabled()

    assert _in_a_thread(work) == (False, True)


@pytest.mark.parametrize("framework", ["", "torch", "cupy"])
def test_a_framework_that_is_not_there_yet_is_not_asked(framework, monkeypatch) -> None:
    """None is, or another thread imports one."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    if framework:
        begun = ModuleType(framework)
        spec: Any = ModuleSpec(framework, None)
        begun.__spec__, spec._initializing = spec, True
        monkeypatch.setitem(sys.modules, framework, begun)
    with Caller(0).here():
        pass
