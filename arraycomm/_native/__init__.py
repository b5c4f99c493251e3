"""The door to the part in C: `compiled`, or None if it was not built or is not to be used."""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any, Final

# Set to 0, everything runs in Python; set to 1, it is an error if the native part is not there.
SETTING: Final = "ARRAYCOMM_NATIVE"


def load() -> ModuleType | None:
    """Return the native part, or None; see `SETTING`."""
    wanted = os.environ.get(SETTING, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"{SETTING} must be 0, 1 or empty; got {wanted!r}")
    if wanted == "0":
        return None
    try:
        return importlib.import_module(f"{__name__}.compiled")
    except (ImportError, SystemError) as error:
        # The latter if Python without the GIL finds a build for one with it.
        if wanted == "1":
            raise ImportError(
                f"{SETTING} is 1, and arraycomm was installed without its native part: install it "
                f"again with a C compiler on the PATH, or set {SETTING}=0"
            ) from error
        return None


# Typed as anything: whoever uses it has asked whether it is there.
compiled: Final[Any] = load()
