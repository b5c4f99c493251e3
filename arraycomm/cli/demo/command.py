"""`arraycomm demo`: its arguments, and whether this process launches the job or is a rank of it."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from arraycomm._launch import detect
from arraycomm.cli.demo.runs import take_part
from arraycomm.cli.launch import launch
from arraycomm.cli.numbers import positive

# The modules that each framework's part of the demonstration imports, and what installs them.
_NEEDS: Final = {
    "numpy": (("numpy",), "numpy"),
    "torch": (("torch",), "'arraycomm[torch]'"),
    "jax": (("jax", "optax"), "'arraycomm[jax]'"),
}
_DATA: Final = (("sklearn",), "'arraycomm[demo]'")
_USAGE_ERROR: Final = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `arraycomm demo`."""
    parser.add_argument(
        "--frameworks",
        type=_frameworks,
        default=tuple(_NEEDS),
        metavar="NAMES",
        help=f"any of {','.join(_NEEDS)}, separated by commas; all by default",
    )
    parser.add_argument("--ranks", type=positive, default=3, metavar="N", help="3 by default")
    parser.add_argument("--epochs", type=positive, default=40, metavar="N", help="40 by default")
    parser.add_argument(
        "--picture",
        type=Path,
        default=Path("arraycomm-demo.svg"),
        metavar="PATH",
        help="where to draw the losses; arraycomm-demo.svg by default",
    )
    # Set by the process that launches the job: how a rank shows progress.
    parser.add_argument("--worker", choices=("bar", "lines"), help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Launch the demonstration, or take part in it if a launcher started this process."""
    missing = _missing(arguments.frameworks)
    if missing:
        print(missing, file=sys.stderr)
        return _USAGE_ERROR
    progress = "bar" if sys.stderr.isatty() else "lines"
    if arguments.worker is None and arguments.ranks > 1 and detect(os.environ) is None:
        return launch(
            arguments.ranks,
            ["demo", "--worker", progress, *arguments.words[1:]],
            otherwise=", or run in one process: --ranks 1",
        )
    ranks = None if arguments.worker is None else arguments.ranks
    how = arguments.worker or progress
    return take_part(arguments.frameworks, ranks, arguments.epochs, how, arguments.picture)


def _frameworks(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in _NEEDS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(_NEEDS)}; got {text!r}")
    return names


def _missing(frameworks: tuple[str, ...]) -> str:
    """Say what is not installed, and how to install it; empty if nothing is missing."""
    for name, (modules, package) in [
        ("scikit-learn, whose digits the model learns,", _DATA),
        *((name, _NEEDS[name]) for name in frameworks),
    ]:
        absent = [module for module in modules if find_spec(module) is None]
        if absent:
            installed = [name for name in frameworks if all(map(find_spec, _NEEDS[name][0]))]
            without = f", or leave it out: --frameworks {','.join(installed)}" if installed else ""
            return (
                f"demo: {name} is not there; got no module {' and no '.join(absent)}; "
                f"install it with: pip install {package}{'' if modules == _DATA[0] else without}"
            )
    return ""
