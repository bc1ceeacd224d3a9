"""Optimizers such as users bring, in a file of their own."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Lars(Optimizer):
    """Layer-wise rates (You, Gitman and Ginsburg 2017, arXiv 1708.03888), with momentum."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.02,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                decayed = parameter.grad + group["weight_decay"] * parameter
                weight, length = parameter.norm(), decayed.norm()
                if weight > 0 and length > 0:
                    decayed = decayed * (group["trust"] * weight / length)
                state = self.state[parameter]
                if "velocity" not in state:
                    state["velocity"], state["updates"] = torch.zeros_like(parameter), 0
                state["updates"] += 1
                state["velocity"].mul_(group["momentum"]).add_(decayed, alpha=group["lr"])
                parameter.sub_(state["velocity"])


class Counting(Optimizer):
    """Gradient descent whose rate falls with a count that it keeps for itself."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.updates = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.updates += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / self.updates)


class Noisy(Optimizer):
    """Gradient descent with noise, as in Langevin dynamics."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    noisy = parameter.grad + torch.randn_like(parameter)
                    parameter.sub_(noisy, alpha=group["lr"])


def langevin(parameters: list[dict[str, Any]], lr: float) -> Noisy:
    """Make one, as a function that says what it returns."""
    return Noisy(parameters, lr)  # type: ignore[arg-type]
