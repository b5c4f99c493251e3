"""Whether the native part is used."""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from arraycomm import _native

_COMPILED = "arraycomm._native.compiled"


@pytest.fixture(params=["", "0", "1", "yes"])
def setting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ARRAYCOMM_NATIVE", request.param)
    return str(request.param)


def _found() -> object:
    try:
        return _native.load()
    except (ImportError, ValueError) as error:
        return str(error)


def test_an_installation_beside_a_compiler_has_the_native_part() -> None:
    """A build goes on without it if it cannot be compiled, and would say so only here."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("there is no C compiler")
    if os.environ.get("ARRAYCOMM_NATIVE") == "0":
        pytest.skip("the native part is not to be used")
    assert _native.compiled is not None


def test_a_native_part_is_used_unless_it_is_refused(setting, monkeypatch) -> None:
    there = object()
    monkeypatch.setitem(sys.modules, _COMPILED, there)
    monkeypatch.setattr(_native, "compiled", there)
    wanted = {"": there, "0": None, "1": there}
    unknown = "ARRAYCOMM_NATIVE must be 0, 1 or empty; got 'yes'"
    assert _found() == wanted.get(setting, unknown)


def test_without_a_native_part_python_does_it_unless_that_is_refused(setting, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, _COMPILED, None)
    missing = (
        "ARRAYCOMM_NATIVE is 1, and arraycomm was installed without its native part: install it "
        "again with a C compiler on the PATH, or set ARRAYCOMM_NATIVE=0"
    )
    wanted = {"": None, "0": None, "1": missing}
    assert _found() == wanted.get(setting, "ARRAYCOMM_NATIVE must be 0, 1 or empty; got 'yes'")


def test_part_in_c_for_another_python_is_not_used(monkeypatch) -> None:
    """Python without the GIL finds a build for one with it, whose module it cannot make."""

    def refuse(_: str) -> None:
        raise SystemError("init function of compiled returned uninitialized object")

    monkeypatch.setenv("ARRAYCOMM_NATIVE", "")
    monkeypatch.setattr("importlib.import_module", refuse)
    assert _native.load() is None
