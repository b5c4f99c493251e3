"""A group in a forked child, which has no part in its parent's communication."""

from __future__ import annotations

from typing import Final

from arraycomm._protocol.engine import Engine
from arraycomm._protocol.group import Group

# Not thrown away: what is outstanding there is the parent's, and its programs would begin to clean up.
_of_parents: Final[list[Engine]] = []


def refuse(group: Group, reason: str) -> None:
    """Make no call any more; another thread of the parent may have held the locks of its engine."""
    _of_parents.append(group.engine)
    group.engine.refusal = reason
    group.engine = Engine(0, False, lambda waited: None, lambda: None, lambda: None)
    group.engine.refusal = reason
    group.end(RuntimeError(reason))
