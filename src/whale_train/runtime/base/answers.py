"""Gather the answers of an evaluation: which class was predicted for which target, how often."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

Int64s = NDArray[np.int64]
_BASE = 2**31  # above every number of classes
_MOST_ROWS = 2**20  # of pairs that are kept before equal ones are added up


class AnswerPairs:
    """Pairs of predicted class and target that this rank has seen, each with its weight.

    Batches of an evaluation repeat samples, with weights by which sums over samples come out right
    (`data/order.py`); so do the weights of equal pairs, which are whole numbers in the end.
    """

    def __init__(self) -> None:
        self._codes: list[Int64s] = []
        self._weights: list[NDArray[np.float64]] = []
        self._rows = 0

    def clear(self) -> None:
        """Forget all pairs."""
        self._codes, self._weights, self._rows = [], [], 0

    @torch.no_grad()
    def add(self, weight: float, predicted: Tensor, target: Tensor, counted: Tensor) -> None:
        """Add the answers of a loss call in a batch of weight `weight`.

        `predicted` and `target` are class numbers of one shape; those where the bool `counted` is
        False are left out.
        """
        kept = (predicted.long() * _BASE + target.long())[counted].flatten().cpu().numpy()
        codes, counts = np.unique(kept, return_counts=True)
        self._codes.append(codes)
        self._weights.append((weight * counts).astype(np.float64))
        self._rows += len(codes)
        if self._rows > _MOST_ROWS:
            codes, weights = self._sums()
            self._codes, self._weights, self._rows = [codes], [weights], len(codes)

    def _sums(self) -> tuple[Int64s, NDArray[np.float64]]:
        """Return each pair's code once, and the sum of its weights."""
        codes = np.concatenate([np.empty(0, np.int64), *self._codes])
        weights = np.concatenate([np.empty(0, np.float64), *self._weights])
        unique, places = np.unique(codes, return_inverse=True)
        return unique, np.bincount(places, weights, len(unique)).astype(np.float64)

    def gathered(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return the pairs of all ranks: predicted class, target, and how often. A collective.

        They are int64 `[pairs]`, the same on every rank.
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
        kept = counts > 0
        predicted, target = np.divmod(codes[kept], _BASE)
        return predicted, target, counts[kept]
