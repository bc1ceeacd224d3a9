"""Read a rank's samples of a stream in a separate process, ahead of the steps.

The process iterates over the whole stream. It is a rank of no job and the only worker, so a stream
that divides itself among ranks or workers yields everything.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from whale_train.data.stream import StreamDataset, StreamReader
from whale_train.errors import RequestError
from whale_train.runtime.train.worker_reads import next_of

Read = tuple[list[dict[str, Tensor]], str]  # micro-batches, and the state after the step
_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


@dataclass(frozen=True, eq=False)
class StreamShare:
    """A rank's share of a stream.

    stream: the stream.
    mine: the places of the rank's micro-batches in a global batch.
    batch: the number of samples of a global batch.
    draw_of: returns the draw of a place of the run.
    keeps_state: whether the state after each step is needed.
    """

    stream: StreamDataset
    mine: Sequence[slice]
    batch: int
    draw_of: Callable[[int], int]
    keeps_state: bool


class StreamReads:
    """The micro-batches of a stream, step after step.

    share: the rank's share of the stream.
    position: the place of the stream at which reading begins.
    state: the state of the stream at `position`, as JSON; '' at its beginning.
    skipped: the number of samples to skip first.
    """

    def __init__(self, share: StreamShare, position: int, state: str, skipped: int = 0) -> None:
        loader: DataLoader[Any] = DataLoader(
            _Steps(share, position, state, skipped),
            batch_size=None,
            num_workers=1,
            multiprocessing_context="fork",
        )
        self._steps = iter(loader)

    def read(self) -> Read:
        """Return this rank's micro-batches of the next step, and the state after it ('' if none is
        kept).

        Raises the error of the process, with its traceback, and RuntimeError where the process has
        ended.
        """
        batches, state = next_of(self._steps)
        return batches, state

    def close(self) -> None:
        """End the process."""
        shut_down = getattr(self._steps, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


class _Steps(IterableDataset[Read]):
    """The steps of a stream, without an end."""

    def __init__(self, share: StreamShare, position: int, state: str, skipped: int) -> None:
        self._share, self._from, self._skipped = share, (position, state), skipped

    def __iter__(self) -> Iterator[Read]:
        os.environ.update(_ALONE)
        dist.distributed_c10d.GroupMember.WORLD = None
        share, (position, state) = self._share, self._from
        reader = StreamReader(share.stream, share.draw_of, position, state)
        for _ in reader.read(self._skipped):
            pass
        while True:
            start = reader.position
            own = [range(start + x.start, start + x.stop) for x in share.mine]
            own_samples = {
                place: sample
                for place, sample in reader.read(share.batch)
                if any(place in places for places in own)
            }
            batches = [self._tensors([own_samples[x] for x in places], places) for places in own]
            yield batches, reader.state() if share.keeps_state else ""

    def _tensors(self, samples: list[Any], places: range) -> dict[str, Tensor]:
        numbers = np.array(places, np.int64)
        try:
            arrays = self._share.stream.source.batch(samples, numbers)
        except RequestError as error:  # a loader would rebuild this error from its text alone
            raise RuntimeError(str(error)) from error
        return {name: torch.from_numpy(x) for name, x in arrays.items()}
