"""NVRTC by ctypes, from pip's package: it compiles for devices without a driver, and without CuPy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Of nvidia-cuda-nvrtc-cu12, and of nvidia-cuda-nvrtc for CUDA 13.
_PACKAGES = {"nvidia.cuda_nvrtc": "libnvrtc.so.12", "nvidia.cu13": "libnvrtc.so.13"}


@cache
def library() -> Any:
    """Return the library, or None if it is not installed."""
    for package, name in _PACKAGES.items():
        try:
            found = find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (found.submodule_search_locations or ()) if found else ():
            path = Path(folder) / "lib" / name
            if path.exists():
                return ctypes.CDLL(str(path))
    return None


def compile_to_ptx(source: str, options: Sequence[str]) -> str:
    """Return what NVRTC makes of a source, down to machine code; raise with its log if it cannot."""
    nvrtc, program = library(), ctypes.c_void_p()
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
        )
    )
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
            raise RuntimeError(_text(program, "ProgramLog"))
        # An architecture with machine code (sm_90) is compiled to the end.
        assert _text(program, "CUBIN")[1:4] == "ELF"
        return _text(program, "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, what: str) -> str:
    nvrtc, size = library(), ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, text))
    return text.raw.rstrip(b"\0").decode("latin-1")


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"NVRTC reported error {status}")
