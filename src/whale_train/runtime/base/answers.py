"""The answers of an evaluation: which class was predicted for which target."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

Int64s = NDArray[np.int64]
_BASE = 2**31  # above every number of classes
_MOST_ROWS = 2**20  # pairs that may accumulate before equal ones are added up


@dataclass(frozen=True)
class Answers:
    """The answers of one loss call.

    predicted: the class of the largest logit for each target, or the value of a loss over values.
    target: the right class or value, of the shape of `predicted`.
    counted: which targets count, bool of the same shape.
    probability: the probability of the predicted class, fp32 of the same shape; None where it was
        not requested or does not exist.
    """

    predicted: Tensor
    target: Tensor
    counted: Tensor
    probability: Tensor | None = None


class AnswerKeeper(Protocol):
    """The contract of an object that stores the answers of an evaluation on one rank."""

    @property
    def predicts(self) -> bool:
        """Return whether answers include the probability of the predicted class, and cover losses
        over values too."""

    def clear(self) -> None:
        """Drop all answers."""

    def add(self, weight: float, samples: Int64s, call: int, answers: Answers) -> None:
        """Add the answers of loss call number `call` in a micro-batch's forward.

        weight: the weight of the batch in sums over samples.
        samples: the numbers of the micro-batch's samples in the set, int64 `[n]`.
        """


class AnswerPairs:
    """Pairs of predicted class and target that this rank has seen, each with its weight.

    Batches of an evaluation repeat samples, with weights that make sums over samples right
    (`data/order.py`). The total weight of a pair is therefore a whole number in the end.
    """

    predicts = False

    def __init__(self) -> None:
        self._codes: list[Int64s] = []
        self._weights: list[NDArray[np.float64]] = []
        self._rows = 0

    def clear(self) -> None:
        """Drop all pairs."""
        self._codes, self._weights, self._rows = [], [], 0

    @torch.no_grad()
    def add(self, weight: float, samples: Int64s, call: int, answers: Answers) -> None:
        """Add the answers of a loss call that count, in a batch of weight `weight`.

        Answers that are values instead of classes are ignored.
        """
        if answers.predicted.is_floating_point() or answers.target.is_floating_point():
            return
        pairs = answers.predicted.long() * _BASE + answers.target.long()
        counted = pairs[answers.counted].flatten().cpu().numpy()
        codes, counts = np.unique(counted, return_counts=True)
        self._codes.append(codes)
        self._weights.append((weight * counts).astype(np.float64))
        self._rows += len(codes)
        if self._rows > _MOST_ROWS:
            codes, weights = self._sums()
            self._codes, self._weights, self._rows = [codes], [weights], len(codes)

    def _sums(self) -> tuple[Int64s, NDArray[np.float64]]:
        """Return each pair's code once, and the sum of its weights: int64 and float64, both
        `[pairs]`."""
        codes = np.concatenate([np.empty(0, np.int64), *self._codes])
        weights = np.concatenate([np.empty(0, np.float64), *self._weights])
        unique, places = np.unique(codes, return_inverse=True)
        return unique, np.bincount(places, weights, len(unique)).astype(np.float64)

    def gathered(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return the pairs of all ranks as predicted classes, targets and counts. A collective.

        Each array is int64 `[pairs]`, the same on every rank.
        """
        parts: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self._sums())
        joined = AnswerPairs()
        for part in parts:
            assert isinstance(part, tuple)
            joined._codes.append(part[0])
            joined._weights.append(part[1])
        codes, weights = joined._sums()
        counts = np.rint(weights).astype(np.int64)
        is_counted = counts > 0
        predicted, target = np.divmod(codes[is_counted], _BASE)
        return predicted, target, counts[is_counted]
