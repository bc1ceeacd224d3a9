"""Losses that are means over the global batch, though replicas hold different parts of it.

A training loop weights each replica's loss by its share of the samples, n_r / n. That is exact
for a mean over samples. A cross-entropy is a mean over *targets*, of which replicas hold
different numbers when some are ignored: `GlobalMeans` makes each such term of a loss

    sum over my targets * (n / n_r) / targets of all replicas

so that the weighted terms add up to the mean over the global batch, whatever else the loss is made
of. The model is not edited: the mode sees torch's own functions as they are called.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_PLAIN = ("weight", "size_average", "ignore_index", "reduce", "reduction")
# The losses that are means over targets, and the names of their arguments after these.
_LOSSES: dict[Callable[..., Any], tuple[str, ...]] = {
    functional.cross_entropy: (*_PLAIN, "label_smoothing"),
    functional.nll_loss: _PLAIN,
}


@dataclass(frozen=True)
class _Call:
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


def _mean_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Call | None:
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
    return _Call(function, logits, target, options) if reduction == "mean" else None


class GlobalMeans(TorchFunctionMode):
    """Inside it, means of `cross_entropy` and `nll_loss` are those of the global batch.

    `group` joins the replicas; `samples` are those of this forward, `global_samples` those of the
    step over all replicas. The caller weights the loss by `samples / global_samples`. All members
    of the group call the same losses in the same order; counts are all-reduced at each call. A
    replica without targets gets a term of 0 that still has a gradient.

    With `accuracy` (evaluation), `correct` and `targets` add up, over the calls of this rank since
    the mode was made: targets that are the largest logit of their row, and targets that count.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        samples: int,
        global_samples: int,
        *,
        accuracy: bool = False,
    ) -> None:
        super().__init__()
        self.correct: Tensor | int = 0
        self.targets: Tensor | int = 0
        self._group = group
        self._inverse_share = global_samples / samples if samples else 0.0
        self._accuracy = accuracy

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        call = _mean_call(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        if self._accuracy:
            self._record(call)
        if self._group.size() == 1:
            return func(*args, **kwargs)
        divisor = call.divisor()
        work = dist.all_reduce(divisor, group=self._group, async_op=True)
        total = call.sum()
        work.wait()
        scale = self._inverse_share / divisor
        return (total * scale.to(total.dtype)).to(call.logits.dtype)

    @torch.no_grad()
    def _record(self, call: _Call) -> None:
        self.correct = self.correct + call.correct()
        self.targets = self.targets + call.counted.sum()
