"""Losses that are means over the global batch, though replicas hold different parts of it.

A training loop weights each replica's loss by its share of the samples, n_r / n. That is exact
for a mean over samples. A cross-entropy is a mean over *targets*, of which replicas hold
different numbers when some are ignored: `GlobalMeans` makes each such term of a loss

    sum over my targets * (n / n_r) / targets of all replicas

so that the weighted terms add up to the mean over the global batch, whatever else the loss is made
of. The model is not edited: the mode sees torch's own functions as they are called.

With several micro-batches a step, how many targets it has is not known when the first of them is
run: `TargetCounter` counts them before, by the part of the exported graph that makes them from the
inputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from whale_train.models.batch_parts.target_means import MadeAgain, TargetMean, scaled, target_mean
from whale_train.models.export.export import model_path
from whale_train.models.loss_module import LossModule
from whale_train.runtime.comms.forward_agreement import ForwardAgreement
from whale_train.runtime.loss.graph_losses import targets_graph


@dataclass(frozen=True)
class Targets:
    """What each loss divides by, in the order they are called, as fp64 [losses]: `mine` in one
    micro-batch, `whole` in all of the step's, of all replicas."""

    mine: Tensor
    whole: Tensor


class TargetCounter:
    """Counts the targets of a step's micro-batches before any is run.

    `graph` is `losses.targets_graph`'s: called with inputs of the model, it returns what every
    loss divides by. `group` joins the replicas.
    """

    def __init__(self, graph: fx.GraphModule, group: dist.ProcessGroup) -> None:
        self._graph, self._group = graph, group
        self._inputs = [str(x.target) for x in graph.graph.nodes if x.op == "placeholder"]
        self.losses: tuple[str, ...] = graph.meta["losses"]

    @torch.no_grad()
    def mine(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the targets of one micro-batch of this rank, fp64 [losses]; not added up over
        ranks."""
        counts = self._graph(*(batch[name] for name in self._inputs))
        return torch.stack(list(counts)) if counts else torch.zeros(0, dtype=torch.float64)

    @torch.no_grad()
    def whole(self, held: Iterable[tuple[float, Sequence[Mapping[str, Tensor]]]]) -> Tensor:
        """Return how many targets all batches of `held` have together, fp64 [losses]: each has a
        weight, and my micro-batches. One all-reduce; all replicas call it."""
        total = torch.zeros(len(self.losses), dtype=torch.float64)
        for weight, batches in held if self.losses else ():
            for batch in batches:
                mine = weight * self.mine(batch)
                total = total.to(mine.device) + mine
        if self.losses and self._group.size() > 1:
            dist.all_reduce(total, group=self._group)
        return total

    @torch.no_grad()
    def count(self, batches: Sequence[Mapping[str, Tensor]]) -> list[Targets]:
        """Return the targets of each of this rank's micro-batches, in all replicas. One all-reduce;
        all replicas call it."""
        device = next(iter(batches[0].values())).device
        mine = torch.zeros(len(batches), len(self.losses), dtype=torch.float64, device=device)
        if self.losses:
            for row, batch in zip(mine, batches, strict=True):
                row += self.mine(batch)
        whole = mine.sum(0)
        if self.losses and self._group.size() > 1:
            dist.all_reduce(whole, group=self._group)
        return [Targets(row, whole) for row in mine]


def target_counter(
    module: LossModule, graph: fx.GraphModule, group: dist.ProcessGroup, device: torch.device
) -> TargetCounter:
    """Return the counter of the targets of the losses in `graph`, which is `module` exported."""
    held = (
        *module.named_buffers(remove_duplicate=False),
        *(p for p in module.named_parameters(remove_duplicate=False) if not p[1].requires_grad),
    )
    targets = targets_graph(graph, device, {model_path(path): tensor for path, tensor in held})
    assert targets is not None, "the resolver refuses targets that parameters have a part in"
    return TargetCounter(targets, group)


class GlobalMeans(TorchFunctionMode):
    """Inside it, means of `cross_entropy` and `nll_loss` are those of the global batch.

    `group` joins the replicas; the caller multiplies the loss of this forward by `weight`. All
    members of the group call the same losses in the same order; counts are all-reduced at each
    call. With several micro-batches a step, `targets` are those of this one, counted before, and
    losses that are not those counted raise RuntimeError. A replica without targets gets a term of 0
    that still has a gradient.

    With `accuracy` (evaluation), `correct` and `targets` add up, over the calls of this rank since
    the mode was made: targets that are the largest logit of their row, and targets that count.
    `made` are the means of these calls, and `divisors` what each would divide by here, fp64. With
    an `agreement`, all ranks make sure before each count, and at the end of the forward, that they
    are at the same.
    The backward runs in `made_again.in_backward()`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        weight: float,
        targets: Targets | None = None,
        *,
        accuracy: bool = False,
        agreement: ForwardAgreement | None = None,
    ) -> None:
        super().__init__()
        self._agreement = agreement
        self.correct: Tensor | int = 0
        self.targets: Tensor | int = 0
        self.made: list[Tensor] = []
        self.divisors: list[Tensor] = []
        self._group = group
        self._inverse_weight = 1.0 / weight if weight else 0.0
        self._accuracy = accuracy
        self.made_again = MadeAgain()
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
            return func(*args, **kwargs)
        made = self._mean(call)
        if self._accuracy:
            self._record(call, made)
        return made

    def _mean(self, call: TargetMean) -> Tensor:
        """Return what the call makes here of the mean over all replicas' targets."""
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
    def _whole_divisor(self, mine: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Return the divisor of all replicas, perhaps still on its way."""
        if self._counted is None:
            if self._agreement is not None:
                self._agreement.at("a loss over targets")
            return mine, dist.all_reduce(mine, group=self._group, async_op=True)
        if self._calls == len(self._counted.mine):
            raise RuntimeError(f"more than the {self._calls} losses that were counted beforehand")
        same = torch.isclose(mine, self._counted.mine[self._calls], rtol=1e-6, atol=0.0)
        torch._assert_async(same, "a loss has other targets than were counted beforehand")
        self._calls += 1
        return self._counted.whole[self._calls - 1], None

    @torch.no_grad()
    def _record(self, call: TargetMean, made: Tensor) -> None:
        self.made.append(made)
        self.divisors.append(call.divisor())
        self.correct = self.correct + call.correct()
        self.targets = self.targets + call.counted.sum()
