"""The command line: `arraycomm run`, `doctor`, `bench`, `trace`."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from textwrap import wrap
from typing import Final, NamedTuple, NoReturn

from arraycomm._launch import launched

_INTERRUPTED: Final = 130
_UNREAD: Final = 141
_USAGE_ERROR: Final = 2


class _Command(NamedTuple):
    """A module, a summary, an example.

    The module has `add_arguments(parser)` and `run(arguments) -> int`; `arguments.words` are those
    of the command line, from the command on.
    """

    module: str
    summary: str
    example: str


_COMMANDS: Final = {
    "run": _Command(
        "arraycomm.cli.run",
        "run a program on several ranks, and end all of them once one fails",
        "arraycomm run -n 3 --prefix train.py --epochs 10",
    ),
    "doctor": _Command(
        "arraycomm.cli.doctor.command",
        "say what there is on this machine, and what is wrong with it",
        "arraycomm doctor --ranks 2",
    ),
    "bench": _Command(
        "arraycomm.cli.bench.command", "time collectives", "arraycomm bench latency --sizes 8,1K"
    ),
    "trace": _Command(
        "arraycomm.cli.trace.command",
        "show who waited for whom in a recorded trace",
        "arraycomm trace run.json -o run.png",
    ),
}

# What earlier versions had, and what to do instead.
_REMOVED: Final = {"demo": "clone the repository, and run `make demo` there"}


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Lays out the help, and breaks names such as torch-nccl nowhere."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_long_words=False, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser whose help ends with an example, and which says in one line what is wrong."""

    def __init__(self, *, example: str, **options: object) -> None:
        super().__init__(
            **options,  # type: ignore[arg-type]
            epilog=f"example:\n  {example}",
            formatter_class=_Formatter,
            # Scripts would break once another option begins alike, and a mistyped one would pass.
            allow_abbrev=False,
        )

    def refuse_unknown(self, words: Sequence[str]) -> None:
        """End if there are words that no option takes, and name the one that may be meant."""
        if not words:
            return
        known = [name for name in self._option_string_actions if name.startswith("--")]
        close = get_close_matches(words[0].partition("=")[0], known, 1)
        meant = f"; did you mean {close[0]}?" if close else ""
        self.error(f"unrecognized arguments: {' '.join(words)}{meant}")

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE_ERROR, f"{self.prog}: {message}; see: {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, with this process's arguments by default, and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    _prepare_streams()
    if "_ARGCOMPLETE" in os.environ:
        _complete(os.environ["COMP_LINE"])
    try:
        return _run(argv)
    except KeyboardInterrupt:
        if launched(os.environ) is not None:
            raise  # a rank: the others, and the launcher, have to know
        print(f"\n{argv[0]}: ended by Ctrl-C", file=sys.stderr)
        return _INTERRUPTED
    except FileNotFoundError:
        if launched(os.environ) is not None or _has_directory():
            raise
        print(
            f"arraycomm {argv[0]}: the working directory has been removed; change to another one",
            file=sys.stderr,
        )
        return _USAGE_ERROR
    except BrokenPipeError:
        if launched(os.environ) is not None:
            raise
        # Nobody reads on, as behind `| head`; Python would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD


def _has_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _complete(line: str) -> None:
    """Tell a shell how a line may go on, and end, if argcomplete is installed."""
    with suppress(ImportError):
        argcomplete = importlib.import_module("argcomplete")
        argcomplete.autocomplete(_parser(line.split()[1:])[0])


def _prepare_streams() -> None:
    """Let every character be printed somehow, and a closed stream take what nobody reads."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(argv: Sequence[str]) -> int:
    try:
        parser, words = _parser(argv)
        arguments, unknown = parser.parse_known_args(words or ["--help"])
        arguments.parser.refuse_unknown(unknown)
        status: int = arguments.run(arguments)
        return status
    finally:
        sys.stdout.flush()


def _parser(argv: Sequence[str]) -> tuple[_Parser, list[str]]:
    """Return the parser of all commands, with the arguments of the one asked for; and its words."""
    words = list(argv)
    parser = _Parser(
        prog="arraycomm",
        description="Collectives on any array, over MPI.",
        example=_COMMANDS["run"].example,
    )
    parser.add_argument("--version", action=_Version, help="print the version, and end")
    if words and words[0] in _REMOVED:
        parser.error(f"{words[0]} was removed; {_REMOVED[words[0]]}")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    for name, (module_name, summary, example) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, example=example)
        # Import only the requested command: another one may need packages that are not installed.
        if name in argv[:1]:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.run, words=words, parser=command)
            if hasattr(module, "arrange"):
                words[1:] = module.arrange(words[1:])
    return parser, words


class _Version(argparse.Action):
    """Prints the version, which takes long to look up, only if it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from arraycomm import __version__

        print(f"arraycomm {__version__}")
        parser.exit()
