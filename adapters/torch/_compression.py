"""What a compression remembers of torch parameters, as part of the optimizer's state dict."""

from __future__ import annotations

from typing import Any, Final

import optree
import torch

# The key beside torch's "state" and "param_groups", which plain optimizers ignore.
_KEY: Final = "compression"


def save_with_state_dict(optimizer: torch.optim.Optimizer, states: Any) -> None:
    """Make `state_dict` save what a compression remembers, and `load_state_dict` load it."""

    def save(_: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        saved[_KEY] = states.saved()

    def load(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states.load(
            {
                number: {**state, "value": _placed(state["value"], parameters[int(number)])}
                for number, state in saved.get(_KEY, {}).items()
                if int(number) < len(parameters)
            }
        )

    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


def _placed(value: Any, parameter: torch.Tensor) -> Any:
    """Return a state with its tensors copied to where the parameter is."""
    return optree.tree_map(
        lambda leaf: (
            leaf.detach().to(parameter.device, copy=True)
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        value,
    )
