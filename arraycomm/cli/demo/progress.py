"""The progress of a run: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, Final

_LINES: Final = 4
_WIDTH: Final = 79


class Progress:
    """Shows how many epochs have ended; this one shows nothing."""

    def epoch(self, number: int, loss: float) -> None:
        """Show that the epoch `number`, counted from 1, ended with this mean loss."""

    def close(self) -> None:
        """Show no more."""


def make_progress(how: str, epochs: int, *, visible: bool) -> Progress:
    """Return an object that shows the progress of this many epochs; `how` is "bar" or "lines"."""
    if not visible:
        return Progress()
    if how == "bar" and find_spec("tqdm") is not None:
        return _Bar(epochs)
    return _Lines(epochs)


class _Lines(Progress):
    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._every = -(-epochs // _LINES)

    def epoch(self, number: int, loss: float) -> None:
        if number % self._every == 0 or number == self._epochs:
            print(f"      epoch {number:3} of {self._epochs}: loss {loss:.3f}", flush=True)


class _Bar(Progress):
    def __init__(self, epochs: int) -> None:
        from tqdm import tqdm

        # The output goes through the launcher, so the width of the terminal is not known here.
        self._bar: Any = tqdm(total=epochs, desc="      epochs", ncols=_WIDTH, leave=False)

    def epoch(self, number: int, loss: float) -> None:
        self._bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
