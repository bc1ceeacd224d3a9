"""`data=classes`: vectors with their class, up to 10^12 classes, generated on demand.

Each class has a centre, which follows from the number of the class. A sample is the centre of its
class plus noise: a model can learn it, and nothing is kept in memory.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import Batch, Dataset, Indices
from whale_train.data.permutation import permute
from whale_train.data.random_bits import Bits, nearly_normal, random_bits, stream_key
from whale_train.strategies.graph.operation_graph import InputField

# Centres have deviation 1 in each feature. With 256 features two centres are some 23 apart, so
# that noise of deviation 0.5 leaves the classes well separated.
_NOISE = np.float32(0.5)
_MOST_CLASSES = 10**12  # times a vector of 1e6 features, counters of random bits are below 2^63


class ClassesOptions(BaseModel):
    """Options of `data=classes`.

    num_classes: number of classes.
    num_features: elements of a vector.
    num_samples: number of training samples; evaluation samples are additional.
    seed: chooses the centres, labels and noise; the order depends on the seed of the run.
    shuffle: whether epochs are permuted.
    evaluation_fraction: number of evaluation samples, relative to `num_samples`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["classes"] = "classes"
    num_classes: int = Field(1000, ge=2, le=_MOST_CLASSES)
    num_features: int = Field(256, ge=1, le=1_000_000)
    num_samples: int = Field(1_000_000, ge=1, le=1_000_000_000)
    seed: int = 0
    shuffle: bool = True
    evaluation_fraction: float = Field(0.01, ge=0, lt=1)


def open_classes(options: ClassesOptions) -> Dataset:
    """Return the dataset of vectors with their class.

    The fields are `features`, float32 `[num_features]`, and `labels`, int64, 0..num_classes-1.
    """
    return _Classes(options)


def balanced_labels(indices: Indices, num_samples: int, num_classes: int, key: Bits) -> Indices:
    """Return the classes, int64 `[n]`, of the samples `indices` of `num_samples`, drawn by `key`.

    The numbers of samples of any two classes differ by at most one. Where there are fewer samples
    than classes, they are spread over all classes.
    """
    places = permute(indices, num_samples, key)
    # places * num_classes // num_samples, in steps that an int64 holds
    fewest, rest = divmod(num_classes, num_samples)
    return places * fewest + places * rest // num_samples


@dataclass(frozen=True)
class _Classes:
    """Dataset whose samples are generated on demand."""

    options: ClassesOptions

    @property
    def fields(self) -> tuple[InputField, ...]:
        return (
            InputField("features", (self.options.num_features,), "float32"),
            InputField("labels", (), "int64", self.options.num_classes),
        )

    @property
    def num_samples(self) -> int:
        return self.options.num_samples

    @property
    def num_evaluation_samples(self) -> int:
        return round(self.options.num_samples * self.options.evaluation_fraction)

    def samples(self, indices: Indices, draws: Indices | None = None) -> Batch:
        return self._generate("training", indices, self.num_samples)

    def evaluation_samples(self, indices: Indices) -> Batch:
        return self._generate("evaluation", indices, self.num_evaluation_samples)

    def _generate(self, part: str, indices: Indices, num_samples: int) -> Batch:
        options = self.options
        key = stream_key(f"labels {part}", options.seed)
        labels = balanced_labels(indices, num_samples, options.num_classes, key)
        features = self._vectors("centres", labels)
        features += _NOISE * self._vectors(f"noise {part}", indices)
        return {"features": features, "labels": labels}

    def _vectors(self, stream: str, numbers: Indices) -> NDArray[np.float32]:
        """Return a nearly normal vector for each of `numbers`, float32 `[n, num_features]`.

        Vectors of different streams are independent.
        """
        width = self.options.num_features
        counters = numbers[:, None] * width + np.arange(width)
        return nearly_normal(random_bits(stream_key(stream, self.options.seed), counters))
