"""`data=digits`: 1,797 real handwritten digits of 8 x 8 pixels, which scikit-learn installs.

They are the test part of the UCI set "Optical Recognition of Handwritten Digits".
"""

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from whale_train.data.dataset import Batch, Dataset, Indices, RowDataset, hold_back
from whale_train.strategies.graph.operation_graph import InputField

# Pixels are counts of 0 to 16 (the description that comes with the set).
_BRIGHTEST = 16


class DigitsOptions(BaseModel):
    """Options of `data=digits`.

    shuffle: whether epochs are permuted.
    evaluation_fraction: fraction held back, the same images for every seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["digits"] = "digits"
    shuffle: bool = True
    evaluation_fraction: float = Field(0.2, ge=0, lt=1)


def open_digits(options: DigitsOptions) -> Dataset:
    """Return the dataset of digits.

    The fields are `pixel_values`, float32 `[1, 8, 8]` in 0..1, and `labels`, int64, 0..9.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = (bunch.images[:, None] / _BRIGHTEST).astype(np.float32)
    labels = bunch.target.astype(np.int64)

    def read_rows(rows: Indices, draws: Indices) -> Batch:
        return {"pixel_values": pixels[rows], "labels": labels[rows]}

    fields = (
        InputField("pixel_values", pixels.shape[1:], "float32"),
        InputField("labels", (), "int64", 10),
    )
    return RowDataset(fields, hold_back(len(labels), options.evaluation_fraction), read_rows)
