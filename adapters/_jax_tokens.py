"""The token of the programs that make calls, as it goes from one program to the next.

JAX puts the token of the last program on the devices of the next one, also if it is there already, which takes
longer than the rest of a small program.
"""

from __future__ import annotations

from typing import Any

from jax._src.core import Token
from jax._src.dispatch import RuntimeTokenSet


def leave_in_place(effect: Any) -> None:
    """Have JAX leave the token of an effect where it is if the next program runs there."""
    move = RuntimeTokenSet.get_token_input

    def get_token_input(self: Any, eff: Any, devices: list[Any]) -> Any:
        token = self.current_tokens.get(eff) if eff is effect else None
        if isinstance(token, Token) and _devices_of(token) == devices:
            return token
        return move(self, eff, devices)

    RuntimeTokenSet.get_token_input = get_token_input  # type: ignore[method-assign]


def _devices_of(token: Any) -> list[Any] | None:
    """Return the one device of a token, or None if it has more."""
    sharding = vars(token)["_buf"].sharding
    return list(sharding.device_set) if sharding.num_devices == 1 else None
