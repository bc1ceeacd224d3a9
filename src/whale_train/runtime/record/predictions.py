"""Write the predictions of a set: one line of JSON per sample, each sample once and in order.

Every rank writes the answers for its own samples to a file of its own, so that its memory does not
grow with the set. Rank 0 merges the files of all ranks.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import merge
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from whale_train.checkpoints.checkpoint_files import FileRecord
from whale_train.disk import writing
from whale_train.errors import LaunchError
from whale_train.runtime.base.answers import Answers, Int64s
from whale_train.runtime.state.carrier import Carrier
from whale_train.runtime.state.parts import SavedPart
from whale_train.runtime.state.tensor_files import recorded

FOLDER = "predictions"  # in the run directory
_Labels = Callable[[Int64s], NDArray[Any] | None]
_Row = dict[int, dict[str, Any]]  # the answers for a sample, by loss call


class PredictionPart:
    """The predictions of one rank for one set.

    path: the file that has them until they are merged.
    labels: returns the integer labels of samples `[n]`, as `[n, ...]`, or None without integer
        labels.
    """

    predicts = True

    def __init__(self, path: Path, labels: _Labels) -> None:
        self.path, self._labels = path, labels
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._newest = -1  # no sample up to this one is new
        self._now: tuple[Int64s, NDArray[np.bool_]] | None = None
        self._checked = False

    def clear(self) -> None:
        """Drop all predictions."""
        self._file.seek(0)
        self._file.truncate()
        self._newest = -1

    @torch.no_grad()
    def add(self, weight: float, samples: Int64s, call: int, answers: Answers) -> None:
        """Add the answers of a loss call in a micro-batch, for those of its samples that are new.

        Batches are filled up with samples that were evaluated before (`data/order.py`); all other
        samples come in order. Raises LaunchError where the answers are not in the order of the
        samples.
        """
        if not len(samples):
            return
        if self._now is None or self._now[0] is not samples:
            self._now = samples, samples > np.maximum.accumulate([self._newest, *samples[:-1]])
            self._newest = max(self._newest, int(samples.max()))
        new = self._now[1]
        if not new.any():
            return
        parts = {
            "predicted": answers.predicted,
            "target": answers.target,
            "counted": answers.counted,
            **({} if answers.probability is None else {"probability": answers.probability}),
        }
        arrays = {name: _by_sample(x, len(samples)) for name, x in parts.items()}
        if not self._checked and arrays["target"].dtype.kind == "i":
            self._checked = True
            _refuse_mixed(self._labels(samples), arrays["target"], arrays["counted"])
        with writing(self.path, 8 * answers.predicted.numel()):
            for array in (samples[new], np.int64(call), np.int64(len(arrays))):
                np.save(self._file, array)
            for name, array in arrays.items():
                np.save(self._file, np.array(name))
                np.save(self._file, array[new])

    def close(self) -> FileRecord:
        """Write the end of the file, and return its record."""
        self._file.close()
        return recorded(self.path.parent, self.path.name)


def _by_sample(values: torch.Tensor, count: int) -> NDArray[Any]:
    """Return `values`, one or more for each of `count` samples, as `[count, ...]`.

    Raises LaunchError where samples have different numbers of values.
    """
    array: NDArray[Any] = values.cpu().numpy()
    if array.ndim > 1 and len(array) == count:
        return array
    if array.size % count:
        rule = f"a loss call has {array.size} targets for {count} samples"
        raise LaunchError(f"mode=predict: {rule}, which cannot be told apart by sample")
    return array.reshape(count) if array.size == count else array.reshape(count, -1)


def _refuse_mixed(
    labels: NDArray[Any] | None, target: NDArray[Any], counted: NDArray[np.bool_]
) -> None:
    """Raise LaunchError where targets are labels of the samples, but in another order than the
    samples."""
    if labels is None:
        return
    if not np.isin(target[counted], labels).all():  # the model makes its own targets
        return
    for own, of_sample, counts in zip(labels, target, counted, strict=True):
        if not np.isin(of_sample[counts], own).all():
            problem = "the model's loss does not take the targets of one sample after the other"
            raise LaunchError(f"mode=predict: {problem}, so predictions cannot be told apart")


def write_predictions(
    part: PredictionPart,
    name: str,
    samples: int,
    *,
    rank: int,
    carrier: Carrier,
    has_targets: bool,
) -> Path | None:
    """Write the predictions of all ranks for the `samples` samples of set `name`; return the file
    on rank 0.

    Other ranks get None. A collective. `part` has the predictions of this rank. Without
    `has_targets`, lines have no targets.

    Raises LaunchError where the model gives no answers.
    """
    carrier.gather(part.path.parent, SavedPart(rank, (part.close(),)))
    if rank:
        return None
    parts = sorted(part.path.parent.glob(f"{name}.*.part"))
    path = part.path.parent / f"{name}.jsonl"
    unfinished = path.with_suffix(".partial")
    expected = 0
    with writing(unfinished, 2**20), unfinished.open("w", encoding="utf-8") as file:
        for sample, row in merge(*map(_rows, parts), key=lambda x: x[0]):
            if sample < expected:  # several members of a group have written the sample
                continue
            if sample > expected:
                break
            file.write(json.dumps(_line(sample, row, has_targets)) + "\n")
            expected += 1
    for file_of_rank in parts:
        file_of_rank.unlink()
    if expected != samples:
        unfinished.unlink()
        rule = "a prediction is what one of torch's losses is given"
        problem = f"the model gave no answer for sample {expected} of set {name}"
        raise LaunchError(f"mode=predict: {problem}; {rule}")
    return unfinished.replace(path)


def part_path(run_dir: Path, name: str, rank: int) -> Path:
    """Return the path of rank `rank`'s predictions for set `name`."""
    return run_dir / FOLDER / f"{name}.{rank:05}.part"


def _rows(path: Path) -> Iterator[tuple[int, _Row]]:
    """Yield the samples of a rank with their answers, by ascending sample number."""
    with path.open("rb") as file:
        group: list[tuple[Int64s, int, dict[str, NDArray[Any]]]] = []
        for record in _records(file):
            if group and record[1] == 0:
                yield from _joined(group)
                group = []
            group.append(record)
        yield from _joined(group)


def _records(file: BufferedReader) -> Iterator[tuple[Int64s, int, dict[str, NDArray[Any]]]]:
    while file.peek(1):
        samples, call, count = np.load(file), int(np.load(file)), int(np.load(file))
        yield samples, call, {str(np.load(file)): np.load(file) for _ in range(count)}


def _joined(
    group: Sequence[tuple[Int64s, int, dict[str, NDArray[Any]]]],
) -> Iterator[tuple[int, _Row]]:
    """Yield the samples of a micro-batch, each with the answers of all its loss calls."""
    for place, sample in enumerate(group[0][0].tolist() if group else ()):
        yield sample, {call: {k: x[place, ...] for k, x in of.items()} for _, call, of in group}


def _line(sample: int, row: _Row, has_targets: bool) -> dict[str, Any]:
    """Return the line of a sample. The second loss call's keys end in `_2`, and so on."""
    line: dict[str, Any] = {"sample": sample}
    for call, answers in row.items():
        line |= _of_call(answers, "" if call == 0 else f"_{call + 1}", has_targets)
    return line


def _of_call(answers: Mapping[str, NDArray[Any]], end: str, has_targets: bool) -> dict[str, Any]:
    """Return the part of a line for one loss call. A target that does not count is None."""
    entries: dict[str, Any] = {f"predicted{end}": _rounded(answers["predicted"]).tolist()}
    if has_targets:
        target, counted = answers["target"], answers["counted"]
        known = target.astype(object)
        known[~counted] = None
        entries[f"target{end}"] = known.tolist()
    if "probability" in answers:
        entries[f"probability{end}"] = _rounded(answers["probability"]).tolist()
    return entries


def _rounded(values: NDArray[Any]) -> NDArray[Any]:
    """Return fp32 values as their shortest exact decimals, and other values unchanged."""
    if values.dtype != np.float32:
        return values
    decimals: NDArray[Any] = np.vectorize(lambda x: float(str(x)), otypes=[np.float64])(values)
    return decimals
