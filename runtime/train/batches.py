"""This rank's samples of every global batch, and the held-back ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from whale_train.config import Request
from whale_train.data.dataset import Dataset
from whale_train.data.order import evaluation_batches, indices_from
from whale_train.runtime.train.evaluation import EvaluationBatches
from whale_train.strategies.plan.plan import Plan


@dataclass(frozen=True)
class _HeldBack:
    """Held-back samples whose batches are read each time they are iterated over."""

    samples: int
    read: Callable[[], Iterator[tuple[float, list[dict[str, Tensor]]]]]

    def __iter__(self) -> Iterator[tuple[float, list[dict[str, Tensor]]]]:
        return self.read()


class RankBatches:
    """This rank's micro-batches of every global batch, read when asked for."""

    def __init__(
        self, request: Request, plan: Plan, dataset: Dataset, rank: int, device: torch.device
    ) -> None:
        self._request, self._plan, self._dataset = request, plan, dataset
        self._device = device
        self.num_samples = dataset.num_samples
        self._mine = [slice(*interval) for interval in plan.ranks[rank].samples]
        self._names = {field.name for field in dataset.fields}
        self._first_step = self._first_sample = 0

    def go_on(self, step: int, samples: int) -> None:
        """Take up where a run left off that had seen `samples` samples in `step` steps."""
        self._first_step, self._first_sample = step, samples

    def seen(self, step: int) -> int:
        """Return how many samples the run has seen after `step` steps, of the `num_samples` there
        are, as often as it takes."""
        return self._first_sample + (step - self._first_step) * self._plan.global_batch

    def training(self, step: int) -> list[dict[str, Tensor]]:
        seed, shuffle = self._request.seed, self._request.data.shuffle
        batch = self._plan.global_batch
        indices = indices_from(self.seen(step), self.num_samples, batch, seed, shuffle)
        return [self._tensors(self._dataset.samples(indices[mine])) for mine in self._mine]

    def evaluation(self) -> EvaluationBatches:
        """Return the first held-back samples, as many as were asked for and exist."""
        wanted = min(self._request.train.evaluation_samples, self._dataset.num_evaluation_samples)
        return _HeldBack(wanted, partial(self._evaluated, wanted))

    def _evaluated(self, samples: int) -> Iterator[tuple[float, list[dict[str, Tensor]]]]:
        for weight, indices in evaluation_batches(samples, self._plan.global_batch):
            parts = (self._dataset.evaluation_samples(indices[mine]) for mine in self._mine)
            yield weight, [self._tensors(part) for part in parts]

    def tokens(self, batches: Sequence[dict[str, Tensor]]) -> int:
        """Tokens of a global batch, known from this rank's part of it; its samples where a
        sample is no sequence of token numbers."""
        ids = batches[0].get("input_ids") if batches else None
        per_sample = ids[0].numel() if ids is not None and len(ids) else 1
        return self._plan.global_batch * per_sample

    def _tensors(self, arrays: dict[str, Any]) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(array).to(self._device, non_blocking=True)
            for name, array in arrays.items()
            if name in self._names
        }
