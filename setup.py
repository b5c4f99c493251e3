"""What stands in no field of pyproject.toml: the native part, and the README for package indexes.

The native part is optional: without a C compiler, which is said, or with ARRAYCOMM_NATIVE=0,
arraycomm is built in Python alone. Package indexes get the README with whole addresses for its
links and pictures.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
NATIVE = "arraycomm/_native"
# Loops are to be vectorized, and no operation fused with another or left out: bits would differ.
# Totals are memory in which several types take turns.
OPTIONS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-strict-aliasing"]
# A link of Markdown or a picture of HTML, unless it is an address or a part of this page.
LINK = re.compile(r'(?P<before>\]\(|src=")(?!https?:|#)(?P<path>[^)"#]+)(?P<part>#[^)"]*)?')


def read_by_itself(text: str, urls: dict[str, str]) -> str:
    """Return the README as it reads apart from the repository: what docs/ holds is on the site."""

    def whole(link: re.Match[str]) -> str:
        page = re.fullmatch(r"docs/(?P<name>.*?)(?P<markdown>\.md)?", link["path"])
        if page is None:
            address = urls["Source"] + link["path"]
        else:
            address = urls["Documentation"] + page["name"] + (".html" if page["markdown"] else "")
        return f"{link['before']}{address}{link['part'] or ''}"

    return LINK.sub(whole, text)


def compiles() -> bool:
    """Return whether there is a C compiler with Python's headers; if not, say so.

    The wheel is then for any platform.
    """
    # Those of setuptools, which takes the place of the module that Python no longer has.
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler, get_python_inc

    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "probe.c")
        source.write_text("#include <Python.h>\nint probe;\n", encoding="utf-8")
        compiler = new_compiler()
        customize_compiler(compiler)
        try:
            compiler.compile([str(source)], output_dir=place, include_dirs=[get_python_inc()])
        except Exception as error:
            why = f"since C cannot be compiled here: {error}"
            sys.stderr.write(f"arraycomm: built without its native part, {why}\n")
            return False
    return True


def sources() -> str:
    """Return the digest of the native part's sources, which is built in: see the file."""
    build = runpy.run_path(str(ROOT / NATIVE / "build.py"))
    return str(build["digest"](build["native_sources"](ROOT / NATIVE)))


def native_part() -> dict[str, Any]:
    """Return what has setuptools build the native part, unless it is not wanted."""
    from setuptools import Extension

    if os.environ.get("ARRAYCOMM_NATIVE") == "0" or not compiles():
        return {}
    # Python without the GIL has no limited API, and a build for each of its versions.
    threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
    limited = [] if threaded else [("Py_LIMITED_API", "0x030B0000")]
    extension = Extension(
        "arraycomm._native.compiled",
        sources=[
            f"{NATIVE}/{name}.c"
            for name in (
                "module",
                "chunks",
                "device",
                "ending",
                "exact",
                "exchange",
                "folds",
                "leaves",
                "nodes",
                "pool",
                "segment",
                "slots",
                "turns",
            )
        ],
        depends=[
            f"{NATIVE}/{name}.h"
            for name in (
                "chunks",
                "device",
                "ending",
                "exact",
                "exchange",
                "folds",
                "kernels",
                "leaves",
                "nodes",
                "pool",
                "segment",
                "slots",
                "turns",
            )
        ],
        define_macros=[*limited, ("SOURCES", f'"{sources()}"')],
        extra_compile_args=[*OPTIONS, "-fvisibility=hidden", "-pthread"],
        extra_link_args=["-pthread"],
        py_limited_api=bool(limited),
        optional=True,
    )
    options = {"bdist_wheel": {"py_limited_api": "cp311"}} if limited else {}
    return {"ext_modules": [extension], "options": options}


def main() -> None:
    """Build what the arguments of this process say."""
    from setuptools import setup

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=read_by_itself(readme, project["urls"]),
        long_description_content_type="text/markdown",
        **native_part(),
    )


if __name__ == "__main__":
    main()
