"""How many examples each law tries: `EXAMPLES=500 python -m pytest properties`."""

from __future__ import annotations

import os

import hypothesis
import pytest

from tests import conftest as of_tests

# So that a failed assertion in a law shows the values that it compared.
pytest.register_assert_rewrite("arraycomm.testing.conformance")

hypothesis.settings.register_profile(
    "properties",
    max_examples=int(os.environ.get("EXAMPLES") or "15"),
    deadline=None,
    print_blob=True,
    # Hypothesis would have continuous integration try the same examples again and again.
    derandomize=False,
    **({"database": None} if "CI" in os.environ else {}),
)
hypothesis.settings.load_profile("properties")


# Adapters look for names among all objects of the process: fewer are to be seen.
pytest_collection = of_tests.pytest_collection


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Report under `mpiexec` as the other tests do, where that is not seen to already."""
    if not config.pluginmanager.is_registered(of_tests):
        of_tests.pytest_configure(config)
