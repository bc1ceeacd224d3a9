"""Losses that are means over the global batch, though replicas hold different parts of it.

A training loop weights each replica's loss by its share of the samples, n_r / n. That is exact
for a mean over samples. A cross-entropy is a mean over *targets*, of which replicas hold
different numbers when some are ignored: `GlobalMeans` makes each such term of a loss

    sum over my targets * (n / n_r) / targets of all replicas

so that the weighted terms add up to the mean over the global batch, whatever else the loss is made
of. The model is not edited: the mode sees torch's own functions as they are called.

With several micro-batches a step, the number of targets in the step is not known when the first
of them is run. Targets depend on the batch only, so `count_targets` finds them beforehand by
running the model with parameters on the meta device, where what they touch costs nothing.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from whale_train.errors import ConfigError, Fault
from whale_train.runtime.casts import ShardGroup
from whale_train.runtime.cross_entropy import split_cross_entropy, split_top1

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Loss:
    """How a loss function is called: the names of its arguments, its words for mean and sum."""

    arguments: tuple[str, ...]
    mean: str | int = "mean"
    sum: str | int = "sum"


_PLAIN = ("weight", "size_average", "ignore_index", "reduce", "reduction")
_ATEN = ("weight", "reduction", "ignore_index")
_LOSSES: dict[Callable[..., Any], _Loss] = {
    functional.cross_entropy: _Loss((*_PLAIN, "label_smoothing")),
    functional.nll_loss: _Loss(_PLAIN),
    split_cross_entropy: _Loss(("shards", "ignore_index", "label_smoothing", "reduction")),
    # What an exported graph calls. Reductions are numbers there: ATen/core/Reduction.h.
    _aten.cross_entropy_loss.default: _Loss((*_ATEN, "label_smoothing"), mean=1, sum=2),
    _aten.nll_loss_nd.default: _Loss(_ATEN, mean=1, sum=2),
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
        options = {**self.options, "reduction": _LOSSES[self.function].sum}
        total: Tensor = self.function(logits, self.target, **options)
        return total

    def correct(self) -> Tensor:
        """How many targets are the largest logit of their row."""
        shards, ignored = self.options.get("shards"), self.options.get("ignore_index", -100)
        if isinstance(shards, ShardGroup):
            return split_top1(self.logits, self.target, shards, ignored)[0]
        target = self.target
        if target.is_floating_point():
            target = target.argmax(self._class_dim)
        return ((self.logits.argmax(self._class_dim) == target) & self.counted).sum()


def _mean_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Call | None:
    """None for everything that is not the mean of a loss we know."""
    loss = _LOSSES.get(function)
    if loss is None:
        return None
    first = "logits" if function is split_cross_entropy else "input"
    options = {**dict(zip((first, "target", *loss.arguments), args, strict=False)), **kwargs}
    logits, target = options.pop(first), options.pop("target")
    legacy = (options.pop("size_average", None), options.pop("reduce", None))
    reduction = options.get("reduction", loss.mean)
    if legacy != (None, None):  # torch's deprecated pair, which overrules `reduction`
        reduction = "other" if False in legacy else "mean"
    return _Call(function, logits, target, options) if reduction == loss.mean else None


@dataclass(frozen=True)
class StepTargets:
    """What each loss of a micro-batch divides by, in the order they are called: fp64 [calls].

    `mine` is this micro-batch's part, `whole` that of all micro-batches of all replicas.
    """

    mine: Tensor
    whole: Tensor


class GlobalMeans(TorchFunctionMode):
    """Inside it, means of `cross_entropy` and `nll_loss` are those of the global batch.

    `group` joins the replicas; `samples` are those of this forward, `global_samples` those of the
    step over all replicas. The caller weights the loss by `samples / global_samples`. All members
    of the group call the same losses in the same order. With one micro-batch a step, counts are
    all-reduced at each call; with more, `targets` has them (see `count_targets`); without it every
    target must count and every sample have as many as any other, or the call raises ConfigError.
    A replica without targets gets a term of 0 that still has a gradient. A loss that backward
    recomputes (inside a checkpointed part) needs the backward inside the mode too, and no
    `targets`.

    With `accuracy` (evaluation), `correct`, `targets` and `loss_sum` add up, over the calls of
    this rank since the mode was made: targets that are the largest logit of their row, targets
    that count, and the sum of their losses (times their class weights, where there are any).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        samples: int,
        global_samples: int,
        *,
        micro_batches: int = 1,
        targets: StepTargets | None = None,
        accuracy: bool = False,
    ) -> None:
        super().__init__()
        self.correct: Tensor | int = 0
        self.targets: Tensor | int = 0
        self.loss_sum: Tensor | float = 0.0
        self._group, self._micro_batches, self._step = group, micro_batches, targets
        self._global_samples = global_samples
        self._inverse_share = global_samples / samples if samples else 0.0
        self._accuracy, self._calls = accuracy, 0
        self._is_whole = micro_batches == 1 and group.size() == 1

    def __enter__(self) -> Self:
        self._calls = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None and self._step is not None and self._calls < len(self._step.mine):
            counted = len(self._step.mine)
            raise RuntimeError(f"{counted} losses were counted beforehand, {self._calls} called")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        call = _mean_call(func, args, kwargs)
        if call is None or (self._is_whole and not self._accuracy):
            return func(*args, **kwargs)
        if self._accuracy:
            self._record(call)
        if self._micro_batches > 1 and self._step is None:
            self._refuse_unequal(call)
            return func(*args, **kwargs)
        if self._is_whole:
            return func(*args, **kwargs)
        total = call.sum()
        scale = self._inverse_share / self._whole_divisor(call.divisor())
        return (total * scale.to(total.dtype)).to(call.logits.dtype)

    @torch.no_grad()
    def _record(self, call: _Call) -> None:
        self.correct = self.correct + call.correct()
        self.targets = self.targets + call.counted.sum()
        self.loss_sum = self.loss_sum + call.sum().double()

    def _whole_divisor(self, mine: Tensor) -> Tensor:
        if self._step is None:
            if self._group.size() > 1:
                dist.all_reduce(mine, group=self._group)
            return mine
        if self._calls == len(self._step.mine):
            raise RuntimeError(f"more than the {self._calls} losses that were counted beforehand")
        expected = self._step.mine[self._calls].to(mine.device)
        same = torch.isclose(mine, expected, rtol=1e-6, atol=0.0)
        torch._assert_async(same, "a loss has other targets than were counted beforehand")
        whole = self._step.whole[self._calls].to(mine.device)
        self._calls += 1
        return whole

    def _refuse_unequal(self, call: _Call) -> None:
        if call.options.get("weight") is None and bool(call.counted.all()):
            return
        rule = (
            f"is run in {self._micro_batches} micro-batches a step whose loss ignores or weights "
        )
        rule += "targets, and this model does not let them be counted before the first is run"
        remedy = "lower it until each replica's share is one micro-batch"
        raise ConfigError([Fault("train.global_batch", str(self._global_samples), rule, remedy)])


def count_targets(
    model: Callable[..., object],
    micro_batches: Sequence[Mapping[str, Tensor]],
    group: dist.ProcessGroup,
) -> list[StepTargets]:
    """The targets of each of my micro-batches of a step, and of the whole step over `group`.

    `model` is the unsharded model in the mode it is trained in, its parameters on the meta
    device (in bf16 if in doubt: torch's meta kernel of grouped experts takes nothing else); its
    buffers too, unless targets or class weights come from them. Micro-batches are the model's
    keyword arguments, on the device the group communicates from. What only depends on them is
    computed, everything else only has its shape worked out; the random state of the CPU is left
    as it was. One all-reduce. Raises whatever the model raises where it wants the value
    of what is on the meta device, and ValueError where a loss's targets do.
    """
    divisors = []
    for micro_batch in micro_batches:
        counting = _Counting(next(iter(micro_batch.values())).device)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), counting:
            model(**micro_batch)
        divisors.append(counting.divisors)
    if len({len(found) for found in divisors}) > 1:
        raise ValueError("the model calls a different number of losses in each micro-batch")
    if not divisors[0]:
        nothing = torch.zeros(0, dtype=torch.float64)
        return [StepTargets(nothing, nothing)] * len(divisors)
    mine = torch.stack([torch.stack(found) for found in divisors])
    whole = mine.sum(0)
    if group.size() > 1:
        dist.all_reduce(whole, group=group)
    return [StepTargets(row, whole) for row in mine]


_MOVES = (torch.Tensor.to, torch.Tensor.type_as, _aten.to, _aten._to_copy)


class _Counting(TorchFunctionMode):
    """Runs on the meta device whatever meets a meta tensor, and notes the divisors of losses.

    What meets none is computed on `device`, where the batch is, even if the model asks for the
    device of its logits.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.divisors: list[Tensor] = []
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        call = _mean_call(func, args, kwargs)
        if call is not None:
            weight = call.options.get("weight")
            if call.target.is_meta or (weight is not None and weight.is_meta):
                raise ValueError("the targets of a loss depend on more than the batch")
            self.divisors.append(call.divisor())
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if getattr(func, "overloadpacket", func) in _MOVES and not given[0].is_meta:
            moved: Tensor = func(*args, **kwargs)
            return given[0].to(moved.dtype) if moved.is_meta else moved
        if any(tensor.is_meta for tensor in given):
            args, kwargs = pytree.tree_map_only(Tensor, _to_meta, (args, kwargs))
        else:
            if kwargs.get("device") == "meta":
                kwargs = {**kwargs, "device": self._device}
            args, kwargs = pytree.tree_map_only(torch.device, self._real, (args, kwargs))
        return func(*args, **kwargs)

    def _real(self, device: torch.device) -> torch.device:
        return self._device if device.type == "meta" else device


def _to_meta(x: Tensor) -> Tensor:
    return x if x.is_meta else x.to("meta")
