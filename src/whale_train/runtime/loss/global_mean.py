"""Make losses means over the global batch, although replicas hold different parts of it.

A training loop weights each replica's loss by its share of the samples, n_r / n. That is exact for
a mean over samples. A cross-entropy is a mean over *targets*, of which replicas hold different
numbers when some are ignored: `GlobalMeans` turns each such term of a loss into

    sum over the replica's targets * (n / n_r) / targets of all replicas

so that the weighted terms add up to the mean over the global batch, whatever other terms the loss
has. The model is not edited: a torch-function mode sees torch's own functions as they are called.

With several micro-batches per step, the step's number of targets is not known when the first of
them runs. `TargetCounter` counts the targets in advance, with the part of the exported graph that
computes targets from the inputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from whale_train.models.batch_parts.target_means import (
    RecomputedLosses,
    TargetMean,
    scaled,
    target_mean,
)
from whale_train.models.batch_parts.value_losses import ValueLoss, loss_operands
from whale_train.models.export.export import model_path
from whale_train.models.loss_module import LossModule
from whale_train.runtime.base.answers import Answers
from whale_train.runtime.base.step_types import EvaluationBatch
from whale_train.runtime.comms.forward_agreement import ForwardAgreement
from whale_train.runtime.loss.graph_losses import targets_graph


@dataclass(frozen=True)
class Targets:
    """The divisors of the losses, in the order of their calls, as fp64 [losses].

    mine: the divisors in one micro-batch of this rank.
    whole: the divisors in all micro-batches of the step, of all replicas.
    """

    mine: Tensor
    whole: Tensor


class TargetCounter:
    """A counter of the targets of a step's micro-batches, before any of them runs.

    `graph` is the result of `graph_losses.targets_graph`: called with inputs of the model, it
    returns the divisor of every loss. `group` has the replicas.
    """

    def __init__(self, graph: fx.GraphModule, group: dist.ProcessGroup) -> None:
        self._graph, self._group = graph, group
        self._inputs = [str(x.target) for x in graph.graph.nodes if x.op == "placeholder"]
        self.losses: tuple[str, ...] = graph.meta["losses"]

    @torch.no_grad()
    def mine(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of targets in one micro-batch of this rank, fp64 [losses].

        Nothing is summed over ranks.
        """
        counts = self._graph(*(batch[name] for name in self._inputs))
        return torch.stack(list(counts)) if counts else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def whole(self, held: Iterable[EvaluationBatch]) -> Tensor:
        """Return the number of targets in all batches of `held`, of all replicas, fp64 [losses].

        One all-reduce; all replicas must call it.
        """
        total = torch.zeros(len(self.losses), dtype=torch.float64)
        for held_batch in held if self.losses else ():
            for batch in held_batch.micro_batches:
                targets = held_batch.weight * self.mine(batch)
                total = total.to(targets.device) + targets
        if self.losses and self._group.size() > 1:
            dist.all_reduce(total, group=self._group)
        return total

    @torch.no_grad()
    def count(self, batches: Sequence[Mapping[str, Tensor]]) -> list[Targets]:
        """Return the numbers of targets of each of this rank's micro-batches, and of the step in
        all replicas.

        One all-reduce; all replicas must call it.
        """
        device = next(iter(batches[0].values())).device
        counts = torch.zeros(len(batches), len(self.losses), dtype=torch.float64, device=device)
        if self.losses:
            for row, batch in zip(counts, batches, strict=True):
                row += self.mine(batch)
        totals = counts.sum(0)
        if self.losses and self._group.size() > 1:
            dist.all_reduce(totals, group=self._group)
        return [Targets(row, totals) for row in counts]


def target_counter(
    module: LossModule, graph: fx.GraphModule, group: dist.ProcessGroup, device: torch.device
) -> TargetCounter:
    """Return the counter of the targets of the losses in `graph`, the export of `module`."""
    held = (
        *module.named_buffers(remove_duplicate=False),
        *(p for p in module.named_parameters(remove_duplicate=False) if not p[1].requires_grad),
    )
    targets = targets_graph(graph, device, {model_path(path): tensor for path, tensor in held})
    assert targets is not None, "the resolver refuses targets that parameters have a part in"
    return TargetCounter(targets, group)


class GlobalMeans(TorchFunctionMode):
    """A mode in which means of `cross_entropy` and `nll_loss` are means over the global batch.

    `group` has the replicas; the caller multiplies the loss of this forward by `weight`. All
    members of the group must call the same losses in the same order; counts are all-reduced at each
    call. With several micro-batches per step, `targets` are the targets of this micro-batch,
    counted in advance; other losses than the counted ones raise RuntimeError. A replica without
    targets gets a term of 0 that still has a gradient.

    With `accuracy` (evaluation), these attributes accumulate over the calls of this rank since the
    mode was made:

    correct: the number of targets that are the largest logit of their row.
    targets: the number of targets that count.
    answers: the answers of the calls, with probabilities if `predicts`.
    made: the means of the calls.
    divisors: the divisor of each mean on this rank, fp64 scalars.

    With an `agreement`, all ranks check before each count, and at the end of the forward, that they
    are at the same point. The backward must run in `made_again.in_backward()`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        weight: float,
        targets: Targets | None = None,
        *,
        accuracy: bool = False,
        predicts: bool = False,
        agreement: ForwardAgreement | None = None,
    ) -> None:
        super().__init__()
        self._agreement = agreement
        self.correct: Tensor | int = 0
        self.targets: Tensor | int = 0
        self.answers: list[Answers] = []
        self._predicts = predicts
        self.made: list[Tensor] = []
        self.divisors: list[Tensor] = []
        self._group = group
        self._inverse_weight = 1.0 / weight if weight else 0.0
        self._accuracy = accuracy
        self.made_again = RecomputedLosses()
        self._counted, self._calls = targets, 0

    def __enter__(self) -> Self:
        self._calls = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None and self._agreement is not None:
            self._agreement.at("the end of its forward")
        if error is None and self._counted is not None and self._calls < len(self._counted.mine):
            counted = len(self._counted.mine)
            raise RuntimeError(f"{counted} losses were counted beforehand, {self._calls} called")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        call = target_mean(func, args, kwargs)
        if call is None:
            if self._predicts and (loss := ValueLoss.of_function(func)) is not None:
                self._record_values(loss, *loss_operands(args, dict(kwargs)))
            return func(*args, **kwargs)
        mean = self._mean(call)
        if self._accuracy:
            self._record(call, mean)
        return mean

    def _mean(self, call: TargetMean) -> Tensor:
        """Return this rank's term of the mean over all replicas' targets."""
        if self._counted is None and self._group.size() == 1:
            mean: Tensor = call.function(call.logits, call.target, **call.options)
            return mean
        divisor, work = self._whole_divisor(call.divisor())
        total = call.sum()
        if work is not None:
            work.wait()
        factor = self._inverse_weight / divisor
        self.made_again.note(call, total, factor)
        return scaled(call, total, factor)

    @torch.no_grad()
    def _whole_divisor(self, divisor: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Return the divisor over all replicas, and the all-reduce that completes it, or None if it
        is complete."""
        if self._counted is None:
            if self._agreement is not None:
                self._agreement.at("a loss over targets")
            return divisor, dist.all_reduce(divisor, group=self._group, async_op=True)
        if self._calls == len(self._counted.mine):
            raise RuntimeError(f"more than the {self._calls} losses that were counted beforehand")
        same = torch.isclose(divisor, self._counted.mine[self._calls], rtol=1e-6, atol=0.0)
        torch._assert_async(same, "a loss has other targets than were counted beforehand")
        self._calls += 1
        return self._counted.whole[self._calls - 1], None

    @torch.no_grad()
    def _record_values(self, loss: ValueLoss, values: Tensor, target: Tensor) -> None:
        """Store the values of a loss as answers."""
        predicted, probabilities = loss.predicted(values)
        counted = torch.ones_like(target, dtype=torch.bool)
        self.answers.append(Answers(predicted, target, counted, probabilities))

    @torch.no_grad()
    def _record(self, call: TargetMean, mean: Tensor) -> None:
        """Store the call's mean, divisor and answers, and add its counts to those of the
        evaluation."""
        self.made.append(mean)
        self.divisors.append(call.divisor())
        predicted, target, counted = call.answers()
        probability = call.probability(predicted) if self._predicts else None
        self.answers.append(Answers(predicted, target, counted, probability))
        self.correct = self.correct + ((predicted == target) & counted).sum()
        self.targets = self.targets + counted.sum()
