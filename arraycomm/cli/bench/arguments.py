"""The arguments of `arraycomm bench`, and what they ask to measure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from arraycomm.cli.bench import device
from arraycomm.cli.bench.contenders import FRAMEWORKS, TITLES, installed, parse_dtype
from arraycomm.cli.bench.trees import TREES
from arraycomm.cli.numbers import positive

_SIZES: Final = {
    "latency": (8, 64, 1 << 10, 16 << 10),
    "bandwidth": (64 << 10, 1 << 20, 8 << 20, 64 << 20),
}
_MODES: Final = (*_SIZES, "trees")
# If sizes are given without a mode, smaller ones are measured for their latency.
_LARGE: Final = 64 << 10
_SUFFIXES: Final = {"K": 10, "M": 20, "G": 30}


@dataclass(frozen=True, slots=True)
class Request:
    """One line of the results, to be measured."""

    mode: str
    dtype: str
    nbytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _add_contenders(parser)
    add = parser.add_argument
    add("--repeats", type=positive, metavar="N", default=25, help="samples of each; default 25")
    add("--seconds", type=float, metavar="S", default=2.0, help="for each array; default 2")
    _add_files(parser)
    add("--ranks", type=positive, default=2, metavar="N", help="without mpiexec; default 2")


def _add_contenders(parser: argparse.ArgumentParser) -> None:
    """Declare what is measured."""
    add = parser.add_argument
    add(
        "mode",
        nargs="?",
        choices=list(_MODES),
        help="small arrays, large ones, or trees of float32; by default all of these",
    )
    add("--sizes", type=_sizes, metavar="N,…", help="bytes of the arrays, for example 8,64K,1M")
    add(
        "--dtypes",
        type=_dtypes,
        metavar="NAME,…",
        default=["float32", "bfloat16"],
        help="default float32,bfloat16",
    )
    add(
        "--frameworks",
        type=_frameworks,
        metavar="NAME,…",
        help=f"any of {','.join(FRAMEWORKS)}; default numpy, and torch if it is installed; with "
        "--device cuda, any of cupy,torch",
    )
    add(
        "--only",
        type=_keys,
        metavar="NAME,…",
        default=list(TITLES),
        help=f"contenders; default {','.join(TITLES)}",
    )
    add(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where the arrays are; on cuda the frameworks are cupy and torch; default cpu",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    """Declare what is written, and what is compared."""
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write every sample to this file")
    add(
        "--compare",
        nargs=2,
        type=_paths,
        metavar=("BEFORE", "AFTER"),
        help="measure nothing, but compare what --json has written; each may be several files: "
        "a.json,b.json",
    )
    add(
        "--at-most",
        type=float,
        metavar="R",
        help="with --compare: fail if anything takes more than R times as long after",
    )


def command(arguments: argparse.Namespace) -> list[str]:
    """Return the command line of these arguments, without `--ranks`, which the launcher gets."""
    words = ["bench", *([arguments.mode] if arguments.mode else [])]
    words += ["--device", "cuda"] if arguments.device == "cuda" else []
    for name in ("sizes", "dtypes", "frameworks", "only"):
        if (values := getattr(arguments, name)) is not None:
            words += [f"--{name}", ",".join(map(str, values))]
    words += ["--repeats", str(arguments.repeats), "--seconds", str(arguments.seconds)]
    return words if arguments.json is None else [*words, "--json", str(arguments.json)]


def refusal(arguments: argparse.Namespace) -> str:
    """Say why this cannot be measured here, and what would help; empty if it can be measured."""
    names = arguments.frameworks or ()
    if arguments.device == "cuda":
        return device.refusal(names, arguments.mode)
    return "arrays of cupy are on a device; pass --device cuda" if "cupy" in names else ""


def requests(mode: str | None, sizes: Sequence[int] | None, dtypes: Sequence[str]) -> list[Request]:
    """Return what to measure: every size of every dtype, small arrays first."""
    return [
        Request(name, dtype, nbytes)
        for name in _SIZES
        for dtype in dtypes
        for nbytes in _sizes_of_mode(name, mode, sizes)
    ]


def _sizes_of_mode(name: str, mode: str | None, sizes: Sequence[int] | None) -> Sequence[int]:
    if mode not in {None, name}:
        return ()
    if sizes is None:
        return _SIZES[name]
    if mode is None:
        return [nbytes for nbytes in sizes if (nbytes >= _LARGE) == (name == "bandwidth")]
    return sizes


def requested_trees(arguments: argparse.Namespace) -> Sequence[str]:
    """Return the names of the trees to measure; they have fixed sizes, and are of float32."""
    wanted = arguments.mode == "trees" or (arguments.mode is None and arguments.sizes is None)
    if not wanted or "float32" not in arguments.dtypes or arguments.device == "cuda":
        return ()
    return tuple(TREES)


def host_frameworks(arguments: argparse.Namespace) -> list[str]:
    """Return the frameworks whose arrays are measured in host memory."""
    names: list[str] | None = arguments.frameworks
    return [n for n in ("numpy", "torch") if installed(n)] if names is None else names


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _paths(text: str) -> list[Path]:
    paths = [Path(word) for word in _words(text)]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing or not paths:
        raise argparse.ArgumentTypeError(f"no such file: {', '.join(missing) or text!r}")
    return paths


def _sizes(text: str) -> list[int]:
    return [_size(word) for word in _words(text)]


def _size(word: str) -> int:
    shift = _SUFFIXES.get(word[-1].upper(), 0)
    try:
        return positive(word[:-1] if shift else word) << shift
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of bytes") from None


def _dtypes(text: str) -> list[str]:
    try:
        return [parse_dtype(word) for word in _words(text)]
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _keys(text: str) -> list[str]:
    return [_known(word, list(TITLES)) for word in _words(text)]


def _frameworks(text: str) -> list[str]:
    names = [_known(word, (*FRAMEWORKS, "cupy")) for word in _words(text)]
    missing = [name for name in names if not installed(name)]
    if missing:
        raise argparse.ArgumentTypeError(f"not installed: {', '.join(missing)}")
    return names


def _known(word: str, choices: Sequence[str]) -> str:
    if word not in choices:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}")
    return word
