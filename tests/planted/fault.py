"""A fault: an exact piece of the library's text, and what takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# Where a checkout keeps what a copy has as one package.
_ELSEWHERE = {"arraycomm/adapters": "adapters"}


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes
    ----------
    says : str
        What the table calls it, a colon, and what is wrong with it.
    file : str
        The module, as in the installed package.
    before, after : str
        The right text, which the file has once, and the wrong one.
    laws : tuple of str
        The tests that are tried first; all others follow if they pass.
    run : str
        Where: "threads", "mpi" for what only processes show, with or without files, or the files of tests.
    frameworks : bool
        Whether arrays of torch and JAX are drawn as well, not only NumPy's.
    compiled : bool
        Whether it is in what runs only beside the native part.
    """

    says: str
    file: str
    before: str
    after: str
    laws: tuple[str, ...]
    run: str = "threads"
    frameworks: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.says.partition(": ")[0]

    @property
    def what(self) -> str:
        """What is wrong with it."""
        return self.says.partition(": ")[2]

    @property
    def native(self) -> bool:
        """Whether it needs the native part."""
        return self.compiled or self.file.endswith(".c")

    def source(self, root: Path) -> Path:
        """Return the file in a checkout."""
        for package, folder in _ELSEWHERE.items():
            if self.file.startswith(package):
                return root / folder / self.file[len(package) + 1 :]
        return root / self.file

    def applied(self, text: str) -> str:
        """Return the text with the fault; raise if it does not fit the text any more."""
        found = text.count(self.before)
        if found != 1:
            raise StaleFaultError(
                f"the fault {self.name!r} is stale: {self.file} has its text {found} times, not once; "
                "give it the text of today, or plant another in its place"
            )
        return text.replace(self.before, self.after)


class StaleFaultError(Exception):
    """The library no longer has the text that a fault replaces."""
