"""Coverage by pytest-cov: each rank measures and saves, and rank 0 combines and reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def combine_on_rank_0(config: pytest.Config, rank: int, meet: Callable[[], object]) -> None:
    """Let rank 0 combine what all ranks have saved; do nothing without pytest-cov.

    Each rank saves a file of its own. `meet` returns when all ranks have called it. If another
    process has started one job of many, that one combines.
    """
    rank = rank or int(config.getoption("mpiexec_per") is not None)
    plugin: Any = config.pluginmanager.get_plugin("_cov")
    controller = getattr(plugin, "cov_controller", None)
    if controller is None:
        return
    combine = controller.finish

    def finish() -> None:
        meet()
        combine()

    def save() -> None:
        controller.cov.stop()
        controller.cov.save()
        meet()

    controller.finish = save if rank else finish
    if rank:
        plugin._should_report = lambda: False
