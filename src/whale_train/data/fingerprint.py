"""Fingerprints that tell datasets apart, independently of where and in what files they are kept.

A fingerprint is made of samples as the model gets them, and of nothing that depends on a machine:
no path, no time, no file format. Small data is read completely. Of large data a fixed selection of
samples is read, which bounds the cost; data that agrees in all of these has the same fingerprint.
"""

import hashlib
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np

from whale_train.data.dataset import Dataset, Indices
from whale_train.data.stream import looked_at

_MOST_BYTES = 2**24  # the most bytes of samples that are read
_MOST_WHOLE = 2**16  # the most samples that are all read
_CHOSEN = 2**12  # samples that are read where the data has more
_CHUNK = 2**10  # the most samples that are read at once


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprint of the training samples of a dataset.

    fields: dtype and shape of every field, by name.
    num_samples: number of samples to train on.
    digest: SHA-256 of the samples that were read, in hex.
    """

    fields: dict[str, tuple[str, tuple[int, ...]]]
    num_samples: int
    digest: str

    def to_plain(self) -> dict[str, Any]:
        """Return the fingerprint as a mapping that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_plain(cls, content: Any) -> "Fingerprint":
        """Return the fingerprint of a mapping that `to_plain` returned, before or after JSON.

        Raises ValueError, KeyError, TypeError or AttributeError for anything else.
        """
        fields = {
            str(name): (str(dtype), tuple(map(int, shape)))
            for name, (dtype, shape) in content["fields"].items()
        }
        return cls(fields, int(content["num_samples"]), str(content["digest"]))

    def unlike(self, other: "Fingerprint") -> str:
        """Return the first difference between this fingerprint and `other`, or ''."""
        for name in sorted(self.fields.keys() | other.fields.keys()):
            field, other_field = self.fields.get(name), other.fields.get(name)
            if field is None or other_field is None:
                return f"it has {'a' if field is None else 'no'} field {name}"
            if field != other_field:
                return f"{name} is {_described(other_field)}, and was {_described(field)}"
        if self.num_samples != other.num_samples:
            return f"it has {other.num_samples:,} samples, and had {self.num_samples:,}"
        return "" if self.digest == other.digest else "its samples are others"


def fingerprint(dataset: Dataset) -> Fingerprint:
    """Return the fingerprint of a dataset. Raises ConfigError where a sample cannot be read."""
    fields = sorted(dataset.fields, key=lambda field: field.name)
    per_sample = sum(prod(x.shape) * np.dtype(x.dtype).itemsize for x in fields)
    read = _read(dataset, per_sample)
    digest = hashlib.sha256()
    step = max(1, min(_CHUNK, _MOST_BYTES // max(1, per_sample) // 8))
    for start in range(0, len(read), step):
        arrays = dataset.samples(read[start : start + step])
        for field in fields:
            digest.update(field.name.encode())
            little = np.dtype(field.dtype).newbyteorder("<")
            digest.update(np.ascontiguousarray(arrays[field.name], little).tobytes())
    described = {field.name: (field.dtype, tuple(field.shape)) for field in fields}
    return Fingerprint(described, dataset.num_samples, digest.hexdigest())


def _read(dataset: Dataset, per_sample: int) -> Indices:
    """Return the indices of the samples that are read: all, or a selection; int64, ascending.

    per_sample: bytes of a sample.
    """
    within = max(2, _MOST_BYTES // max(1, per_sample))
    limit = min(_MOST_WHOLE, within)
    return looked_at(dataset, limit if dataset.num_samples <= limit else min(_CHOSEN, within))


def _described(field: tuple[str, tuple[int, ...]]) -> str:
    dtype, shape = field
    return f"{dtype} [{', '.join(map(str, shape))}]" if shape else dtype
