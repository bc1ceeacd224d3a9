"""Datasets as users write them, for `data._target_=own_datasets....`."""

import random
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset


class FromFile(Dataset[Any]):
    """Rows of an .npz file of arrays, read anew for every sample from a file that stays open."""

    def __init__(self, path: str, form: str = "dict") -> None:
        with np.load(path) as arrays:
            self.names = list(arrays)
            self.rows = [arrays[name] for name in self.names]
        flat = np.concatenate([x.reshape(len(x), -1) for x in self.rows], 1).astype(np.float64)
        rows = Path(path).with_suffix(".rows")
        if not rows.exists() or rows.stat().st_size != flat.nbytes:
            rows.write_bytes(flat.tobytes())
        self.width, self.form = flat.shape[1], form
        self.file = rows.open("rb", buffering=0)

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, number: int) -> Any:
        self.file.seek(number * self.width * 8)
        values = np.frombuffer(self.file.read(self.width * 8))
        sample, at = {}, 0
        for name, rows in zip(self.names, self.rows, strict=True):
            count = rows[0].size
            part = values[at : at + count].reshape(rows[0].shape).astype(rows.dtype)
            sample[name], at = torch.from_numpy(part), at + count
        return tuple(sample.values()) if self.form == "tuple" else sample


class Jitter:
    """Noise from each of the generators a user may take."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        drawn = random.random() + np.random.rand() + torch.rand(()).item()
        return values * (1 + self.scale * drawn)


class Jittered(Dataset[Any]):
    def __init__(self, path: str, transform: Any) -> None:
        with np.load(path) as arrays:
            self.x, self.labels = arrays["points"].astype(np.float32), arrays["labels"]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Any:
        return self.transform(self.x[number]), self.labels[number]


def numbers(count: int = 10, kind: str = "ragged") -> Dataset[Any]:
    return Numbers(count, kind)


Pair = namedtuple("Pair", ["x", "y"])


class Numbers(Dataset[Any]):
    """Samples of the kind asked for, of the numbers from 0 on."""

    def __init__(self, count: int, kind: str) -> None:
        self.count, self.kind = count, kind

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        row = np.arange(1 + number % 4)
        kinds = {
            "ragged": {"x": row, "y": float(number)},
            "array": np.full(3, number, np.float64),
            "named": Pair(torch.full((2,), number, dtype=torch.bfloat16), bool(number % 2)),
            "pair": (number, number + 1),
            "text": {"x": "a text"},
            "shapes": {"x": np.zeros(1 + number // 4)},
            "keys": {"x": 1} if number < 4 else {"z": 1},
        }
        if self.kind == "raises" and number:
            raise RuntimeError("no such sample")
        return kinds.get(self.kind, 0)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield 0


def stack(samples: list[Any], scale: int = 1) -> dict[str, Any]:
    return {"x": np.stack([sample[0] for sample in samples]) * scale}


def anything(samples):  # type: ignore[no-untyped-def]
    return samples


class Unsized(Dataset[Any]):
    def __len__(self) -> int:
        return -1

    def __getitem__(self, number: int) -> dict[str, int]:
        return {"x": number}


class UnsizedStream(IterableDataset[Any]):
    def __len__(self) -> int:
        return -1

    def __iter__(self) -> Iterator[Any]:
        yield {"x": 0}


class Ragged(Dataset[Any]):
    """Rows of 1 to 9 places, and a class for each."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> Any:
        row = np.cos(np.arange(1 + number * 7 % 9) + number).astype(np.float32)
        return {"x": row, "labels": number % 3}


class Pooled(nn.Module):
    """Logits of the mean over all places, those of padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 3)
        nn.init.constant_(self.head.bias, 0.1)
        self.head.weight.data.copy_(torch.tensor([[1.0], [-2.0], [3.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.head(x.mean(1, keepdim=True))
        return pooled
