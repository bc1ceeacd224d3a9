"""Cut padding that no row of the global batch needs."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from whale_train.data.dataset import LENGTHS


class LongestRows:
    """The fields whose batches are cut to the longest row of the global batch. Made by all ranks.

    The lengths go through a CPU group of their own: the host needs the shapes of a step, and must
    not wait for a GPU.
    """

    def __init__(self, fields: Sequence[str], timeout_s: float) -> None:
        self._fields = tuple(fields)
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(None, timeout, "gloo", group_desc="lengths of rows")

    def of(self, batches: Sequence[Mapping[str, Tensor]]) -> tuple[int, ...]:
        """Return the length of the longest row of this rank's micro-batches, by field."""
        return tuple(max((_longest(x, name) for x in batches), default=0) for name in self._fields)

    def cut(
        self, batches: Sequence[Mapping[str, Tensor]], own: tuple[int, ...]
    ) -> list[dict[str, Tensor]]:
        """Return micro-batches cut to the longest rows of all ranks. A collective.

        `own` are the lengths of this rank's longest rows, by field. A row has at least length 1.
        """
        longest = torch.tensor([max(1, x) for x in own])
        dist.all_reduce(longest, dist.ReduceOp.MAX, self._group)
        lengths = dict(zip(self._fields, longest.tolist(), strict=True))
        return [
            {k: x[:, : lengths[k]].contiguous() if k in lengths else x for k, x in batch.items()}
            for batch in batches
        ]


def _longest(batch: Mapping[str, Tensor], field: str) -> int:
    """Return the length of the longest row of a field; the padded length in a set that is not
    cut."""
    lengths = batch.get(f"{field}{LENGTHS}")
    if lengths is None:
        return batch[field].shape[1]
    return int(lengths.max()) if len(lengths) else 0
