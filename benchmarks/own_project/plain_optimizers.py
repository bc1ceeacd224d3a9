"""Define the optimizers of `every_plan.py`, as overrides of the command and as torch objects."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from my_code import Lars
from torch import nn
from torch.optim import Optimizer

# A gradient that is 0 except for rounding, as the gradient of a key's bias, gives Adam a step of
# full size unless eps is larger than the gradient.
EPS = 1e-3
_BESIDE_MUON = ("lm_head", "token", "position", "*norm.weight", "*.bias")


@dataclass(frozen=True)
class Updates:
    """An optimizer for the command and for a plain loop.

    name: name of the class.
    overrides: the overrides that choose the optimizer.
    make: creates the optimizers of a plain loop for a model.
    needs_whole: whether an update depends on the whole parameter, so that plans which shard a
        parameter are refused.
    """

    name: str
    overrides: tuple[str, ...]
    make: Callable[[nn.Module], Sequence[Optimizer]]
    needs_whole: bool = False


def sgd(model: nn.Module) -> list[Optimizer]:
    """Return plain gradient descent."""
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def _adamw(model: nn.Module) -> list[Optimizer]:
    """Return AdamW with a group for the head, and without weight decay on norms and biases."""
    named = dict(model.named_parameters())
    head = [named.pop("lm_head.weight")]
    spared = [x for x in named.values() if x.dim() < 2]
    others = [x for x in named.values() if x.dim() >= 2]
    groups = [
        {"params": head, "lr": 1e-3, "weight_decay": 0.2},
        {"params": spared, "weight_decay": 0.0},
        {"params": others},
    ]
    return [torch.optim.AdamW(groups, lr=2e-3, eps=EPS, weight_decay=0.1)]


def _muon(model: nn.Module) -> list[Optimizer]:
    """Return Muon for the matrices of blocks, and AdamW for all other parameters."""
    ends = ("lm_head.weight", "token.weight", "position.weight", "norm.weight", ".bias")
    beside = {name: x for name, x in model.named_parameters() if name.endswith(ends)}
    matrices = [x for name, x in model.named_parameters() if name not in beside]
    return [
        torch.optim.Muon(matrices, lr=2e-3, momentum=0.9),
        torch.optim.AdamW(beside.values(), lr=1e-3, eps=EPS),
    ]


OPTIMIZERS = {
    "AdamW, groups": Updates(
        "AdamW",
        (
            *("optimizer=adamw", "optimizer.lr=2e-3", f"optimizer.eps={EPS}"),
            "optimizer.weight_decay=0.1",
            "optimizer.groups=[{match: [lm_head], lr_scale: 0.5, weight_decay: 0.2}]",
        ),
        _adamw,
    ),
    "Muon beside AdamW": Updates(
        "Muon",
        (
            *("optimizer._target_=torch.optim.Muon", "optimizer.lr=2e-3", "optimizer.momentum=0.9"),
            f"optimizer.groups=[{{match: [{', '.join(map(repr, _BESIDE_MUON))}], "
            f"_target_: torch.optim.AdamW, eps: {EPS}, lr_scale: 0.5}}]",
        ),
        _muon,
        needs_whole=True,
    ),
    "Adafactor": Updates(
        "Adafactor",
        ("optimizer._target_=torch.optim.Adafactor", "optimizer.lr=0.02"),
        lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.02)],
        needs_whole=True,
    ),
    "SGD, Nesterov": Updates(
        "SGD",
        (
            *("optimizer._target_=torch.optim.SGD", "optimizer.lr=0.05", "optimizer.momentum=0.9"),
            *("optimizer.nesterov=true", "optimizer.weight_decay=0.05"),
        ),
        lambda model: [
            torch.optim.SGD(
                model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.05
            )
        ],
    ),
    "LARS, own class": Updates(
        "Lars",
        ("optimizer._target_=my_code.Lars", "optimizer.lr=0.1", "optimizer.weight_decay=0.01"),
        lambda model: [Lars(model.parameters(), lr=0.1, weight_decay=0.01)],
        needs_whole=True,
    ),
}
