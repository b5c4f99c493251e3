"""Numbers in the arguments of commands."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Return the positive integer that a text says."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return int(text)
