"""Losses that are means over their targets, as a model calls torch for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_PLAIN = ("weight", "size_average", "ignore_index", "reduce", "reduction")
# The losses that are means over targets, and the names of their arguments after these.
_LOSSES: dict[Callable[..., Any], tuple[str, ...]] = {
    functional.cross_entropy: (*_PLAIN, "label_smoothing"),
    functional.nll_loss: _PLAIN,
}


@dataclass(frozen=True)
class TargetMean:
    """A call of a loss that wants the mean over its targets.

    `options` are all its arguments but logits and targets, by name.
    """

    function: Callable[..., Any]
    logits: Tensor
    target: Tensor
    options: dict[str, Any]

    @property
    def counted(self) -> Tensor:
        """Which targets are not ignored; one entry per row where targets are probabilities."""
        if self.target.is_floating_point():
            return torch.ones_like(self.target.select(self._class_dim, 0), dtype=torch.bool)
        ignored: int = self.options.get("ignore_index", -100)
        return torch.ne(self.target, ignored)

    @property
    def _class_dim(self) -> int:
        return min(self.logits.dim() - 1, 1)

    def divisor(self) -> Tensor:
        """What torch's mean divides by, a fp64 scalar: the targets that count, or the sum of
        their class weights."""
        weight = self.options.get("weight")
        if weight is None or self.target.is_floating_point():
            return self.counted.sum(dtype=torch.float64)
        weights: Tensor = weight[self.target.clamp(0, len(weight) - 1)]
        return (weights * self.counted).sum(dtype=torch.float64)

    def sum(self) -> Tensor:
        """Over my targets, in fp32 for halves: one of their factors is a count."""
        logits = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))
        options = {**self.options, "reduction": "sum"}
        total: Tensor = self.function(logits, self.target, **options)
        return total

    def correct(self) -> Tensor:
        """How many targets are the largest logit of their row."""
        target = self.target
        if target.is_floating_point():
            target = target.argmax(self._class_dim)
        return ((self.logits.argmax(self._class_dim) == target) & self.counted).sum()


def target_mean(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> TargetMean | None:
    """None for everything that is not the mean of a loss we know."""
    names = _LOSSES.get(function)
    if names is None:
        return None
    options = {**dict(zip(("input", "target", *names), args, strict=False)), **kwargs}
    logits, target = options.pop("input"), options.pop("target")
    legacy = (options.pop("size_average", None), options.pop("reduce", None))
    reduction = options.get("reduction", "mean")
    if legacy != (None, None):  # torch's deprecated pair, which overrules `reduction`
        reduction = "other" if False in legacy else "mean"
    return TargetMean(function, logits, target, options) if reduction == "mean" else None
