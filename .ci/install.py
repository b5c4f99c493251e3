"""Do what `pip install` does with the same arguments, in the environment of this interpreter.

By uv, which takes a third of pip's time, and links what another environment has. It does not read
pip's settings, so it is told them. Where it cannot be had, has no word for a setting, or fails, pip
installs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

UV: Final = Path(sys.executable).with_name("uv")
PIP: Final = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# What uv calls pip's settings, and what separates several values.
WORDS: Final = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
# Which say nothing of what is installed, and from where.
OTHERS: Final = {
    *("cache-dir", "config-file", "default-timeout", "disable-pip-version-check", "no-color"),
    *("no-input", "progress-bar", "quiet", "retries", "root-user-action", "timeout", "verbose"),
}


def settings_of_pip() -> dict[str, str]:
    """Return pip's settings as uv's; KeyError is for one that uv does not know."""
    said = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    # As for pip, a variable counts more than a file; what another command is told does not count.
    sections = ("global.", "install.", ":env:.")
    lines = [line for of in sections for line in said.stdout.splitlines() if line.startswith(of)]
    given = [line.partition("=") for line in lines]
    named = {name.rpartition(".")[2]: ast.literal_eval(value) for name, _, value in given}
    told = {WORDS[name]: value for name, value in named.items() if name not in OTHERS}
    # As pip does, take the best version that any index has.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match"} | {
        word: separator.join(value.split()) for (word, separator), value in told.items()
    }


def install(arguments: list[str]) -> int:
    """Install, and return the status of what did it."""
    by_pip = [*PIP, "install", "--no-compile"]
    try:
        settings = settings_of_pip()
        if not UV.exists():
            subprocess.run([*by_pip, "--quiet", "uv"], check=True)
        by_uv = [str(UV), "pip", "install", "--python", sys.executable, *arguments]
        subprocess.run(by_uv, env=os.environ | settings, check=True)
    except (KeyError, OSError, subprocess.CalledProcessError) as error:
        print(f"by pip, since uv is not to be had: {error!r}", file=sys.stderr)
        return subprocess.run([*by_pip, *arguments], check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
