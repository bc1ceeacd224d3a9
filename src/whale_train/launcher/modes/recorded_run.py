"""Read the files that the ranks of a verification wrote, and assemble whole tensors from them.

This file owns the reading of the files that runtime/train/recorder.py writes.
launcher/modes/compare_runs.py judges the values.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Array = NDArray[np.float64]


def largest_of(values: Array) -> float:
    """Return the largest magnitude in `values`: NaN where any value is NaN, 0 for an empty
    array."""
    return float(np.max(np.abs(values))) if values.size else 0.0


class RecordedRun:
    """A finished run of `ranks` ranks, whose tensors can be read inside a `with` block.

    dropout_off: whether the model has dropout, which the run turned off.
    drew_random: whether the model drew random numbers all the same.
    largest: the largest element of each parameter's gradients in any step, by path; recorded in
        runs of one rank.
    skipped: the steps, from 1, without an update, because fp16 overflowed.
    losses, norms, rates: the loss, gradient norm and learning rate of every step.
    """

    def __init__(self, run_dir: Path, ranks: int) -> None:
        folder = run_dir / "verify"
        records = [
            json.loads((folder / f"rank_{r}.json").read_text(encoding="utf-8"))
            for r in range(ranks)
        ]
        self.dropout_off = any(rank["dropout_off"] for rank in records)
        self.drew_random = any(rank["drew_random"] for rank in records)
        self.largest: dict[str, float] = records[0]["largest"]
        self.skipped: list[int] = records[0]["skipped"]
        self.losses, self.norms = _metric(run_dir, "loss"), _metric(run_dir, "grad_norm")
        self.rates = _metric(run_dir, "lr")
        self._parts: list[dict[str, dict[str, Any]]] = [rank["parts"] for rank in records]
        self._constants: list[dict[str, dict[str, Any]]] = [rank["constants"] for rank in records]
        self._paths = [folder / f"rank_{r}.safetensors" for r in range(ranks)]
        self._stack = ExitStack()
        self._files: list[Any] = []

    def __enter__(self) -> "RecordedRun":
        opened = (safe_open(path, framework="numpy") for path in self._paths)
        self._files = [self._stack.enter_context(file) for file in opened]
        self._names = [set(file.keys()) for file in self._files]
        return self

    def __exit__(self, *reason: object) -> None:
        self._stack.close()

    @property
    def paths(self) -> list[str]:
        """Return the paths of the first rank's trained parameters: in a run of one rank, all of the
        model's."""
        return list(self._parts[0])

    @property
    def constants(self) -> dict[str, str]:
        """Return the kind of each untrained tensor, `buffer` or `untrained parameter`, by path, in
        a run of one rank."""
        return {held["path"]: held["what"] for held in self._constants[0].values()}

    def is_float(self, path: str) -> bool:
        """Return whether the buffer or untrained parameter `path` is floating-point, in a run of
        one rank."""
        return any(x["is_float"] for x in self._constants[0].values() if x["path"] == path)

    def shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of the whole parameter `path`."""
        return tuple(self._parts[0][path]["shape"])

    def largest_gradient(self) -> float:
        """Return the largest element of the recorded gradients, in a run of one rank."""
        return max((largest_of(self.whole("gradient", path)) for path in self.paths), default=0.0)

    def whole(self, kind: str, path: str) -> Array:
        """Return a parameter's whole tensor in fp64, in a run of one rank.

        kind: the tensor's kind in the files, such as `initial`, `gradient` or `sensitivity`.
        path: the parameter.

        A parameter that no gradient reached has a gradient and a sensitivity of zeros.
        """
        if f"{kind}/{path}" not in self._names[0]:
            return np.zeros(self.shape(path))
        return self._read(0, f"{kind}/{path}")

    def bounds(self, kind: str, path: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return the smallest and the largest value among all ranks, element by element, as two
        fp64 arrays of `shape`.

        An element is NaN where no rank holds it, or where a rank has NaN. The kind `first update`
        is the value after the first step minus the initial value, and `update` the final value
        minus the initial value. A gradient is 0 where the parameter has no gradient on any rank.
        """
        low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
        value = {"first update": "first", "update": "final"}.get(kind, kind)
        has_any = any(f"{value}/{path}" in names for names in self._names)
        for rank, names in enumerate(self._names):
            if path not in self._parts[rank]:
                continue
            where = _place(self._parts[rank][path]["index"], shape)
            if f"{value}/{path}" in names:
                part = self._read(rank, f"{value}/{path}")
                if value != kind:
                    part = part - self._read(rank, f"initial/{path}")
            elif kind == "gradient" and not has_any:
                part = np.zeros(np.broadcast_shapes(*(x.shape for x in where)) if where else ())
            else:
                continue
            low[where] = np.minimum(low[where], part)
            high[where] = np.maximum(high[where], part)
        nowhere = low > high
        low[nowhere] = high[nowhere] = np.nan
        return low, high

    def constant(self, path: str) -> Array:
        """Return a whole buffer or untrained parameter in fp64, in a run of one rank."""
        ((_, values),) = self._blocks(0, path)
        return values

    def constant_bounds(self, path: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return the smallest and the largest value of a buffer or untrained parameter among all
        ranks, element by element, as two fp64 arrays of `shape`. An element is NaN where no rank
        holds it."""
        low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
        for rank in range(len(self._files)):
            for index, part in self._blocks(rank, path):
                where = _place(index, shape)
                low[where] = np.minimum(low[where], part)
                high[where] = np.maximum(high[where], part)
        nowhere = low > high
        low[nowhere] = high[nowhere] = np.nan
        return low, high

    def _blocks(self, rank: int, path: str) -> Iterator[tuple[Sequence[Any], Array]]:
        """Yield the index and the fp64 values of each part of a buffer or untrained parameter that
        a rank holds."""
        for name, held in self._constants[rank].items():
            if held["path"] == path:
                yield held["index"], self._read(rank, name)

    def _read(self, rank: int, name: str) -> Array:
        """Return a tensor of a rank's file in fp64."""
        values: Array = self._files[rank].get_tensor(name).astype(np.float64)
        return values


def _place(index: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """Return the numpy index of a part in the whole tensor.

    index: for each dimension, the intervals (start, stop) that the part covers, or None for the
        whole dimension.
    shape: the shape of the whole tensor.
    """
    rows = [
        np.arange(extent)
        if intervals is None
        else np.concatenate([np.arange(start, stop) for start, stop in intervals])
        for intervals, extent in zip(index, shape, strict=True)
    ]
    return np.ix_(*rows)


def _metric(run_dir: Path, key: str) -> list[float]:
    """Return the value of `key` in each step's line of `metrics.jsonl`. A null, which the file has
    in place of a value that is not finite, becomes NaN."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = (json.loads(line)[key] for line in lines)
    return [math.nan if value is None else value for value in values]
