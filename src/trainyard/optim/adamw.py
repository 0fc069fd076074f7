"""AdamW with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainyard.config.precisions import STATES
from trainyard.config.run import Optimizer
from trainyard.parallel.model import LocalParameter
from trainyard.parallel.placement import local_part


class AdamW:
    """Torch's fused AdamW as an `optim.optimizer.LocalOptimizer`.

    Its kernel divides gradients by `grad_scale` and skips when `found_inf` is 1, which
    torch.amp.GradScaler uses for loss scaling. Here they also carry the clipping, so gradients are
    read once without a device sync.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], settings: Optimizer) -> None:
        self.fused = build_adamw(parameters, settings)

    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Updates all weights."""
        for group in self.fused.param_groups:
            group["lr"] = learning_rate
        self.fused.grad_scale, self.fused.found_inf = divisor, skip  # type: ignore[attr-defined]
        self.fused.step()

    def state_of(self, local: LocalParameter) -> dict[str, Tensor]:
        """Returns this rank's moments of a parameter; none before the first update."""
        return self.moments_of(local.parameter)

    def moments_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Returns the moments of a parameter that belongs to no `LocalParameter`."""
        state = self.fused.state.get(parameter, {})
        return {name: local_part(state[name]) for name in STATES if name in state}

    def prepare_state(self, n_updates: int | None) -> None:
        """Makes zero moments for a checkpoint to fill; None for none, as at the start."""
        self.fused.state.clear()
        if n_updates is None:
            return
        for parameter in (each for group in self.fused.param_groups for each in group["params"]):
            done = torch.tensor(float(n_updates), device=parameter.device)
            moments = {name: torch.zeros_like(parameter) for name in STATES}
            self.fused.state[parameter] = {"step": done, **moments}


def build_adamw(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> torch.optim.AdamW:
    """Builds fused AdamW; one-dimensional parameters (biases and norms) are not decayed."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.epsilon,
        fused=True,
    )
