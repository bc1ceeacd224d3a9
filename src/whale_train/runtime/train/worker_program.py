"""The program of a rank that runs logical workers, one after another.

Whatever a step computes from several workers is put together in the order of the workers: their
gradients (`runtime/engines/worker_sums.py`), the numbers of their targets, and their losses. So no
bit depends on which rank ran a worker (docs/adr/084).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.runtime.base.step_types import (
    Batch,
    Evaluation,
    EvaluationBatches,
    PendingLoss,
    scaled_ones,
)
from whale_train.runtime.base.trace import Trace, span
from whale_train.runtime.engines.base import Engine
from whale_train.runtime.engines.worker_sums import WorkerSums
from whale_train.runtime.graph.expert_loads import ExpertLoads
from whale_train.runtime.graph.shard_rng import SharedRandom
from whale_train.runtime.loss.global_mean import GlobalMeans, TargetCounter, Targets
from whale_train.runtime.state.worker_states import WorkerStates
from whale_train.runtime.train.evaluation import EvaluatedCopies
from whale_train.strategies.plan.loss_weights import LossWeights
from whale_train.strategies.schedule.instructions import Instruction, Kind


class WorkerProgram:
    """The unmodified model, run once for each of this rank's logical workers.

    engine: the engine of the model, whose `reduction` is `sums`.
    sums: the sums of the workers' gradients.
    states: the states of this rank's workers.
    group: the ranks that run the workers.
    sums_group: a group of the same ranks, for sums that nothing overlaps with.
    workers: the numbers of this rank's workers, in the order of its micro-batches.
    count: the number of workers of a step.
    size: the number of samples of a worker.
    weights: gives the weights of the workers' losses.
    counter: counts the targets of a worker.
    loads: counts the rows of experts; None without experts.
    """

    def __init__(
        self,
        engine: Engine,
        sums: WorkerSums,
        states: WorkerStates,
        group: dist.ProcessGroup,
        sums_group: dist.ProcessGroup,
        workers: Sequence[int],
        count: int,
        size: int,
        weights: LossWeights,
        counter: TargetCounter,
        loads: ExpertLoads | None,
    ) -> None:
        self.states, self.loads = states, loads
        self._engine, self._sums = engine, sums
        self._group, self._sums_group = group, sums_group
        self._workers, self._count, self._size = workers, count, size
        self._weights, self._counter = weights, counter
        self.shared_random: Sequence[SharedRandom] = ()
        self.trace: Trace | None = None

    @property
    def engines(self) -> Sequence[Engine]:
        return (self._engine,)

    def forward_backward(
        self, batches: Sequence[Batch], loss_scale: Tensor | None = None
    ) -> PendingLoss:
        """Run all workers of this rank, and return the loss of all ranks' workers."""
        engine = self._engine
        watching: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.loads is not None:
            self.loads.begin()
            watching = self.loads.watching
        batches = [{name: x.clone() for name, x in batch.items()} for batch in batches]  # aligned
        targets, losses = self._counted(batches), list[Tensor]()
        with self.states.checking_others():
            for number, (worker, batch) in enumerate(zip(self._workers, batches, strict=True)):
                self.states.switch(worker)
                weight = self._weights.of_step(self._size)
                means = GlobalMeans(self._group, weight, targets[number])
                with span(self.trace, Instruction(Kind.FORWARD, 0, number)), watching(), means:
                    part = engine(**batch) * weight
                with (
                    span(self.trace, Instruction(Kind.BACKWARD, 0, number)),
                    means.made_again.in_backward(),
                ):
                    engine.backward([part], [scaled_ones(part, loss_scale)])
                losses.append(part.detach().float())
                self._sums.add()
        self.states.switch(self._workers[0])
        engine.finish_backward()
        return PendingLoss(self._of_workers(losses).sum(), None)

    def show_first_worker(self) -> None:
        """Give the buffers of worker 0 to all ranks, for good. A collective."""
        self.states.show_first(self._group)

    @torch.no_grad()
    def evaluate(self, held: EvaluationBatches) -> Evaluation:
        """Return the means over `held`, in evaluation mode and with the buffers of worker 0.

        A worker's samples are evaluated with its own random states, and training goes on with those
        of before.
        """
        module = self._engine.module
        sizes = [self._size] * len(self._workers)
        copies = EvaluatedCopies(
            *(self._engine, self._group, sizes, self._weights, self._counter),
            rows=(self._count, self._workers),
            begin=self.states.draw_as,
        )
        self.states.show_first(self._group)
        module.eval()
        try:
            return copies.evaluate(held)
        finally:
            module.train()
            self.states.hide_first()

    @torch.no_grad()
    def _counted(self, batches: Sequence[Batch]) -> list[Targets]:
        """Return the numbers of targets of each of this rank's workers, and of all workers.

        A collective of all ranks.
        """
        counts = [self._counter.mine(batch) for batch in batches]
        if not self._counter.losses:
            return [Targets(of_worker, of_worker) for of_worker in counts]
        totals = self._of_workers(counts).sum(0)
        return [Targets(of_worker, totals) for of_worker in counts]

    def _of_workers(self, values: Sequence[Tensor]) -> Tensor:
        """Return the values of all ranks' workers, [count, ...], from this rank's, [...] each.

        A collective. Adding zeros changes no value.
        """
        every = torch.zeros(self._count, *values[0].shape, dtype=values[0].dtype)
        every = every.to(values[0].device)
        for worker, value in zip(self._workers, values, strict=True):
            every[worker] = value
        if self._group.size() > 1:
            dist.all_reduce(every, group=self._sums_group)
        return every
