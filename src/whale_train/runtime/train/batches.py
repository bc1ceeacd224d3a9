"""Read this rank's samples of every global batch, and of the evaluation sets.

A thread reads training batches ahead. Batches for a GPU go through pinned memory, on a stream of
their own.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whale_train.config import Request
from whale_train.data.dataset import Batch as Arrays
from whale_train.data.dataset import Indices, RowDataset
from whale_train.data.evaluation_sets import HELD_BACK, OpenedData
from whale_train.data.order import evaluation_batches, samples_at
from whale_train.data.random_bits import random_bits, stream_key
from whale_train.data.stream import StreamDataset
from whale_train.runtime.base.answers import AnswerKeeper
from whale_train.runtime.base.step_types import EvaluationBatch
from whale_train.runtime.train.longest_rows import LongestRows
from whale_train.runtime.train.prefetch import Prefetch
from whale_train.runtime.train.stream_reads import StreamReads, StreamShare
from whale_train.runtime.train.worker_reads import WorkerReads
from whale_train.strategies.plan.plan import Plan

_STATES = 8  # the number of steps whose stream states are kept: more steps than are read ahead


@dataclass
class EvaluatedSet:
    """A set of samples to evaluate, read anew in each iteration.

    name: the name of the set.
    samples: the number of samples.
    samples_of: reads samples by their numbers.
    read: yields the batches.
    answers: the keeper of this rank's answers; None: answers are not kept.
    """

    name: str
    samples: int
    samples_of: Callable[[Indices], Arrays]
    read: Callable[[], Iterator[EvaluationBatch]]
    answers: AnswerKeeper | None = None

    def __iter__(self) -> Iterator[EvaluationBatch]:
        return self.read()

    def labels(self, samples: Indices) -> NDArray[Any] | None:
        """Return the labels of `samples`, integers `[n, ...]`, or None where samples have no
        integer labels."""
        labels = self.samples_of(samples).get("labels")
        return labels if labels is not None and labels.dtype.kind == "i" else None


@dataclass(frozen=True)
class _Read:
    """The micro-batches of a step.

    batches: the tensors of each micro-batch, by field.
    copied: the event after their copy to a GPU, or None on a CPU.
    longest: the length of this rank's longest row, for each field that is cut to the longest.
    """

    batches: list[dict[str, Tensor]]
    copied: torch.cuda.Event | None
    longest: tuple[int, ...]


class RankBatches:
    """This rank's micro-batches of every global batch."""

    def __init__(
        self, request: Request, plan: Plan, data: OpenedData, rank: int, device: torch.device
    ) -> None:
        dataset = data.training
        self._request, self._plan, self._dataset, self._data = request, plan, dataset, data
        self.device = device
        self.num_samples = dataset.num_samples
        self._mine = [slice(*interval) for interval in plan.ranks[rank].samples]
        self._names = {field.name for field in dataset.fields}
        self._first_step = self._first_sample = 0
        self._stream: StreamReads | None = None
        self._states = {0: ""}  # states of a stream, as JSON, by the number of steps before
        self._ahead: Prefetch[_Read] | None = None
        self._workers: WorkerReads | None = None
        self._reading = Lock()  # a dataset need not be thread-safe
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        cut = dataset.longest if isinstance(dataset, RowDataset | StreamDataset) else ()
        self._longest = LongestRows(cut, request.launcher.timeout_s) if cut else None

    def go_on(self, step: int, samples: int, stream: Any = None) -> None:
        """Continue a run that had seen `samples` samples in `step` steps.

        stream: the state of a stream after these steps, or None.
        """
        self._first_step, self._first_sample = step, samples
        self._states = {step: "" if stream is None else json.dumps(stream)}

    def stream_state(self, step: int) -> Any:
        """Return the state of a stream after `step` steps, or None if there is none."""
        state = self._states.get(step, "")
        return json.loads(state) if state else None

    def seen(self, step: int) -> int:
        """Return the number of samples that the run has seen after `step` steps.

        The count continues past `num_samples`, where the data is read again.
        """
        return self._first_sample + (step - self._first_step) * self._plan.global_batch

    def sample_numbers(self, step: int) -> list[int]:
        """Return the numbers of all ranks' samples in a step, counted from 0."""
        return [int(number) for number in self._indices(step)]

    def _indices(self, step: int) -> Indices:
        """Return the indices of all ranks' samples in a step, int64 `[global batch]`."""
        seed, shuffle = self._request.seed, self._request.data.shuffle
        batch = self._plan.global_batch
        return samples_at(self._dataset, self.seen(step), batch, seed, shuffle)

    def training(self, step: int) -> list[dict[str, Tensor]]:
        """Return this rank's micro-batches of a step; later steps are read ahead."""
        if self._ahead is None or self._ahead.next != step:
            self.close()
            self._ahead = Prefetch(self._read, step, max(self._request.train.steps, step + 1))
        read = self._ahead.get()
        if read.copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(read.copied)
            for tensor in (x for batch in read.batches for x in batch.values()):
                tensor.record_stream(stream)
        if self._longest is not None:
            return self._longest.cut(read.batches, read.longest)
        return read.batches

    def close(self) -> None:
        """Stop reading ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._workers is not None:
            self._workers.close()
            self._workers = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _draws(self, places: Indices) -> Indices:
        """Return the draws, which are random numbers, of places of the run, int64 `[n]`."""
        bits = random_bits(stream_key("draws", self._request.seed), places)
        return (bits >> np.uint64(1)).astype(np.int64)

    def _streamed(self, dataset: StreamDataset, step: int) -> list[dict[str, Tensor]]:
        """Return this rank's micro-batches of a step of a stream."""
        first = self._first_step
        if self._stream is None:
            keeps = dataset.has_state and not dataset.state_fault and self._request.may_save
            share = (dataset, self._mine, self._plan.global_batch, self._draw_of, keeps)
            start = step if step in self._states else first
            state, skipped = self._states[start], self.seen(step) - self.seen(start)
            self._stream = StreamReads(StreamShare(*share), self.seen(start), state, skipped)
        read, self._states[step + 1] = self._stream.read()
        for old in [x for x in self._states if first < x < step - _STATES]:
            del self._states[old]
        return read

    def _draw_of(self, place: int) -> int:
        return int(self._draws(np.array([place]))[0])

    def _chosen(self, step: int) -> list[tuple[Indices, Indices]]:
        """Return the sample indices and the draws of each of this rank's micro-batches in a step.

        A draw is a random number of the sample's place in the run.
        """
        indices, seen = self._indices(step), self.seen(step)
        draws = self._draws(seen + np.arange(len(indices), dtype=np.int64))
        return [(indices[own], draws[own]) for own in self._mine]

    def _read(self, step: int) -> "_Read":
        workers = self._dataset.workers if isinstance(self._dataset, RowDataset) else 0
        if isinstance(self._dataset, StreamDataset):
            read = self._streamed(self._dataset, step)
        elif workers:
            if self._workers is None:
                reads = (self._dataset.samples, self._chosen, workers, step)
                self._workers = WorkerReads(*reads)
            read = self._workers.read(step)
        else:
            with self._reading:
                arrays = [self._dataset.samples(*chosen) for chosen in self._chosen(step)]
            read = [_tensors_of(x) for x in arrays]
        longest = () if self._longest is None else self._longest.of(read)
        read = [self._given(x) for x in read]
        if self._copies is None:
            return _Read(read, None, longest)
        with torch.cuda.device(self.device), torch.cuda.stream(self._copies):
            batches = [self._there(x) for x in read]
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return _Read(batches, copied, longest)

    def evaluated_sets(self) -> Iterator[EvaluatedSet]:
        """Yield the sets of samples to evaluate: the held-back samples, and each named set.

        Each set is limited to its first samples, as many as the request wants.
        """
        dataset, wanted = self._dataset, self._request.train.evaluation_samples
        sets: list[tuple[str, int, Callable[[Indices], Arrays]]] = []
        if dataset.num_evaluation_samples:
            held_back = (dataset.num_evaluation_samples, dataset.evaluation_samples)
            sets.append((HELD_BACK, *held_back))
        sets += [(name, x.num_samples, x.samples) for name, x in self._data.sets.items()]
        for of_set in self._data.sets.values():
            if isinstance(of_set, StreamDataset):  # metrics read a batch's labels again
                of_set.keeps = 2 * self._plan.global_batch
        for name, count, samples_of in sets:
            read = partial(self._evaluated, min(wanted, count), samples_of)
            yield EvaluatedSet(name, min(wanted, count), samples_of, read)

    def _evaluated(
        self, samples: int, samples_of: Callable[[Indices], Arrays]
    ) -> Iterator[EvaluationBatch]:
        for weight, indices in evaluation_batches(samples, self._plan.global_batch):
            own = [indices[positions] for positions in self._mine]
            with self._reading:
                parts = [samples_of(numbers) for numbers in own]
            tensors = [_tensors_of(part) for part in parts]
            if self._longest is not None:
                tensors = self._longest.cut(tensors, self._longest.of(tensors))
            tensors = [self._here(self._given(x)) for x in tensors]
            yield EvaluationBatch(weight, tensors, indices, own)

    def tokens(self, batches: Sequence[Mapping[str, Tensor]]) -> int:
        """Return the number of tokens of a global batch, computed from this rank's part of the
        batch.

        It is the number of samples where a sample is no sequence of token numbers (`input_ids`).
        """
        ids = batches[0].get("input_ids") if batches else None
        per_sample = ids[0].numel() if ids is not None and len(ids) else 1
        return self._plan.global_batch * per_sample

    def _here(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a batch on the rank's device."""
        return batch if self.device.type == "cpu" else self._there(batch)

    def _given(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the fields of a batch that are inputs of the model."""
        return {name: x for name, x in batch.items() if name in self._names}

    def _there(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Begin to copy a batch to the rank's GPU, and return the copies."""
        return {k: x.pin_memory().to(self.device, non_blocking=True) for k, x in batch.items()}


def _tensors_of(arrays: Arrays) -> dict[str, Tensor]:
    return {name: torch.from_numpy(x) for name, x in arrays.items()}
