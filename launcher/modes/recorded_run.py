"""What the ranks of one run of a verification left, put together tensor by tensor.

Owns how the files of runtime/train/recorder.py are read; judging is that of
launcher/modes/compare_runs.py.
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
    """Return the largest magnitude; NaN where there is one, 0 of nothing."""
    return float(np.max(np.abs(values))) if values.size else 0.0


class RecordedRun:
    """A finished run of `ranks` ranks. `skipped` are the steps, from 1, that changed nothing as
    fp16 overflowed; `largest` are the largest elements of a run's gradients by parameter, where it
    is one rank's. Tensors can be read while it is entered."""

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
        """The paths of the first rank's trained parameters: of all, where it is alone."""
        return list(self._parts[0])

    @property
    def constants(self) -> dict[str, str]:
        """What a run of one rank has that is not trained: by path, what kind of thing it is."""
        return {held["path"]: held["what"] for held in self._constants[0].values()}

    def is_float(self, path: str) -> bool:
        """Return whether something that is not trained, of a run of one rank, has floats."""
        return any(x["is_float"] for x in self._constants[0].values() if x["path"] == path)

    def shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of a whole parameter."""
        return tuple(self._parts[0][path]["shape"])

    def largest_gradient(self) -> float:
        """Return the largest element of the recorded gradients, of a run that is one rank's."""
        return max((largest_of(self.whole("gradient", path)) for path in self.paths), default=0.0)

    def whole(self, kind: str, path: str) -> Array:
        """Return the whole of a parameter's tensor, of a run that is one rank's: 0 of a gradient,
        or of a slope, of what no gradient reached."""
        if f"{kind}/{path}" not in self._names[0]:
            return np.zeros(self.shape(path))
        return self._read(0, f"{kind}/{path}")

    def bounds(self, kind: str, path: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return, element by element, the least and the greatest that any rank has; NaN where no
        rank holds it, or one has NaN.

        `first update` and `update` are the values after the first step, and at the end, less the
        initial ones. A gradient is 0 where a rank that holds the parameter has none, and no copy
        of it has.
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
        """Return the whole of what is not trained, of a run that is one rank's."""
        ((_, values),) = self._blocks(0, path)
        return values

    def constant_bounds(self, path: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
        """Return `bounds` of what is not trained."""
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
        for name, held in self._constants[rank].items():
            if held["path"] == path:
                yield held["index"], self._read(rank, name)

    def _read(self, rank: int, name: str) -> Array:
        values: Array = self._files[rank].get_tensor(name).astype(np.float64)
        return values


def _place(index: Sequence[Any], shape: Sequence[int]) -> tuple[Any, ...]:
    """Return a part's elements in the whole: per dimension the intervals of `index`, None being
    all."""
    rows = [
        np.arange(extent)
        if intervals is None
        else np.concatenate([np.arange(start, stop) for start, stop in intervals])
        for intervals, extent in zip(index, shape, strict=True)
    ]
    return np.ix_(*rows)


def _metric(run_dir: Path, key: str) -> list[float]:
    """Return a figure of every step; what is no number is written as null."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    values = (json.loads(line)[key] for line in lines)
    return [math.nan if value is None else value for value in values]
