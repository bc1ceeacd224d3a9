"""`data=images`: images with their class, of any size, generated on demand.

Each class has a picture of a few coloured patches, which follows from the number of the class. A
sample is the picture of its class plus noise in every pixel: a model can learn it, and nothing is
kept on disk or in memory.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import Batch, Dataset, Indices
from whale_train.data.random_bits import nearly_normal, random_bits, stream_key
from whale_train.data.sources.classes import balanced_labels
from whale_train.strategies.graph.operation_graph import InputField

# A picture has 4 x 4 patches, so that it survives a network's pooling. Their brightness has
# deviation 1, which noise of deviation 0.5 leaves visible.
_PATCHES = 4
_NOISE = np.float32(0.5)


class ImagesOptions(BaseModel):
    """Options of `data=images`.

    num_classes: number of classes.
    channels: channels of an image.
    size: height and width of an image, in pixels.
    num_samples: number of training samples; evaluation samples are additional.
    seed: chooses pictures, labels and noise; the order depends on the seed of the run.
    shuffle: whether epochs are permuted.
    evaluation_fraction: number of evaluation samples, relative to `num_samples`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["images"] = "images"
    num_classes: int = Field(1000, ge=2, le=1_000_000)
    channels: int = Field(3, ge=1, le=64)
    size: int = Field(224, ge=1, le=4096)
    num_samples: int = Field(1_000_000, ge=1, le=1_000_000_000)
    seed: int = 0
    shuffle: bool = True
    evaluation_fraction: float = Field(0.01, ge=0, lt=1)


def open_images(options: ImagesOptions) -> Dataset:
    """Return the dataset of images with their class.

    The fields are `pixel_values`, float32 `[channels, size, size]` with mean 0 and a deviation near
    1, and `labels`, int64, 0..num_classes-1.
    """
    return _Images(options)


@dataclass(frozen=True)
class _Images:
    """Dataset whose samples are generated on demand."""

    options: ImagesOptions

    @property
    def fields(self) -> tuple[InputField, ...]:
        channels, size = self.options.channels, self.options.size
        return (
            InputField("pixel_values", (channels, size, size), "float32"),
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
        size, seed = self.options.size, self.options.seed
        key = stream_key(f"labels {part}", seed)
        labels = balanced_labels(indices, num_samples, self.options.num_classes, key)
        pictures = self._drawn("pictures", labels, _PATCHES)
        patch = np.arange(size) * _PATCHES // size  # the patch that each row or column is in
        pixels = pictures[:, :, patch[:, None], patch]
        pixels += _NOISE * self._drawn(f"noise {part}", indices, size)
        return {"pixel_values": pixels, "labels": labels}

    def _drawn(self, stream: str, numbers: Indices, side: int) -> NDArray[np.float32]:
        """Return nearly normal numbers, float32 `[n, channels, side, side]`, for each of `numbers`.

        They depend only on the stream and on each number.
        """
        shape = (self.options.channels, side, side)
        num_pixels = self.options.channels * side * side
        counters = numbers[:, None] * num_pixels + np.arange(num_pixels)
        bits = random_bits(stream_key(stream, self.options.seed), counters)
        return nearly_normal(bits).reshape(len(numbers), *shape)
