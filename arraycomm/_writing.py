"""How lines for the user are written to a stream, whatever this can encode."""

from __future__ import annotations

import sys
from typing import Any


def write(text: str, file: Any = None) -> None:
    """Write in one piece, to standard output by default; what cannot be encoded as escapes."""
    file = sys.stdout if file is None else file
    if file is None:
        # Programs without a console have no standard output.
        return
    try:
        file.write(text)
    except UnicodeEncodeError as error:
        file.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
    if callable(flush := getattr(file, "flush", None)):
        flush()
