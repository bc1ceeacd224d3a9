"""Read the files that the ranks of a verification left, and assemble their tensors.

This file owns how the files of runtime/train/recorder.py are read. launcher/modes/compare_runs.py
judges the values.
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
    """Return the largest magnitude among `values`: NaN where one is NaN, 0 for an empty array."""
    return float(np.max(np.abs(values))) if values.size else 0.0


class RecordedRun:
    """A finished run of `ranks` ranks, whose tensors can be read inside its `with` block.

    dropout_off: whether the model has dropout, which was left out.
    drew_random: whether the model drew random numbers all the same.
    largest: the largest element of each parameter's gradients in any step, by path; recorded in
        runs of one rank.
    skipped: the steps, from 1, that changed nothing because fp16 overflowed.
    losses, norms, rates: the loss, gradient norm and learning rate of every step.
    """

    def __init__(self, run_dir: Path, ranks: int) -> None:
        folder = run_dir / "verify"
        said = [
            json.loads((folder / f"rank_{r}.json").read_text(encoding="utf-8"))
            for r in range(ranks)
        ]
        self.dropout_off = any(rank["dropout_off"] for rank in said)
        self.drew_random = any(rank["drew_random"] for rank in said)
        self.largest: dict[str, float] = said[0]["largest"]
        self.skipped: list[int] = said[0]["skipped"]
        self.losses, self.norms = _metric(run_dir, "loss"), _metric(run_dir, "grad_norm")
        self.rates = _metric(run_dir, "lr")
        self._parts: list[dict[str, dict[str, Any]]] = [rank["parts"] for rank in said]
        self._constants: list[dict[str, dict[str, Any]]] = [rank["constants"] for rank in said]
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
        """Return the paths of the first rank's trained parameters. In a run of one rank, they are
        all."""
        return list(self._parts[0])

    @property
    def constants(self) -> dict[str, str]:
        """Return the kind, `buffer` or `frozen parameter`, of everything that is not trained, by
        path, in a run of one rank."""
        return {held["path"]: held["what"] for held in self._constants[0].values()}

    def is_float(self, path: str) -> bool:
        """Return whether the buffer or frozen parameter `path` has floats, in a run of one rank."""
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

        Zeros stand for a gradient or a sensitivity that no gradient reached.
        """
        if f"{kind}/{path}" not in self._names[0]:
            return np.zeros(self.shape(path))
        return self._read(0, f"{kind}/{path}")

    def bounds(self, kind: str, path: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return the smallest and the largest value that any rank has, element by element, as two
        fp64 arrays of `shape`.

        An element is NaN where no rank holds it, or where a rank has NaN. The kinds `first update`
        and `update` are the values after the first step, and at the end, less the initial ones. A
        gradient is 0 where a rank that holds the parameter has none, and no copy of it has.
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
        """Return a whole buffer or frozen parameter in fp64, in a run of one rank."""
        ((_, values),) = self._blocks(0, path)
        return values

    def constant_bounds(self, path: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return the smallest and the largest value that any rank has of a buffer or frozen
        parameter, as `bounds` does."""
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
        """Yield the index and the fp64 values of every part that a rank has of a buffer or frozen
        parameter."""
        for name, held in self._constants[rank].items():
            if held["path"] == path:
                yield held["index"], self._read(rank, name)

    def _read(self, rank: int, name: str) -> Array:
        """Return a tensor of a rank's file in fp64."""
        values: Array = self._files[rank].get_tensor(name).astype(np.float64)
        return values


def _place(index: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """Return the numpy index of a part in its whole tensor.

    index: for each dimension, the intervals (start, stop) that the part has, or None for all of it.
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
    """Return one figure of every step in `metrics.jsonl`. NaN stands for null, by which a value
    that is not finite is written."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = (json.loads(line)[key] for line in lines)
    return [math.nan if value is None else value for value in values]
