"""Run by every interpreter that the tests start, before all else; see `tests/conftest.py`.

Most of what such a program takes is the import of frameworks, which leaves much behind that is never freed. Garbage
collections look through all of it, many times during the imports and once more at the end.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

gc.set_threshold(1_000_000, 20, 20)
atexit.register(gc.freeze)


class _NoCompiler(ModuleType):
    """What torch asks of its compiler in programs that compile nothing."""

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)

    @staticmethod
    def disable(fn: Any = None, *_: Any, **__: Any) -> Any:
        return fn or (lambda later: later)

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        pass


# The compiler takes as long to import as torch, and the first optimizer imports it.
if os.environ.get("TESTS_COMPILE_TORCH") == "0":
    sys.modules["torch._dynamo"] = _NoCompiler("torch._dynamo")
