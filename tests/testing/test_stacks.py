"""Only a process that is known to write its stack is asked for it: the signal would end others."""

from __future__ import annotations

import os
import subprocess
import tempfile

import pytest

from arraycomm._launch.places import known_by
from arraycomm.testing._ranks import stacks
from arraycomm.testing._ranks.stacks import Address, stacks_of


def test_another_process_of_that_number_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another PID namespace, where it has another file open at that descriptor."""
    monkeypatch.setattr(stacks, "_WRITING", 0.05)
    with tempfile.TemporaryFile() as file, subprocess.Popen(["sleep", "20"]) as other:
        try:
            file.write(b"Thread 1:\n  File one")
            file.flush()
            mine = known_by(os.fstat(file.fileno()))
            assert stacks_of([Address(other.pid, 1, mine)]) == [""]
            assert other.poll() is None
        finally:
            other.kill()


def test_process_is_not_asked_if_its_number_is_not_that_in_proc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacks, "_WRITING", 0.05)
    monkeypatch.setattr(stacks, "proc_is_own", lambda: False)
    with tempfile.TemporaryFile() as file:
        known = known_by(os.fstat(file.fileno()))
        assert stacks_of([Address(os.getpid(), file.fileno(), known)]) == [""]
