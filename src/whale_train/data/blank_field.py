"""Add a field of zeros to samples, such as labels that are yet to be predicted."""

from dataclasses import dataclass

import numpy as np

from whale_train.data.dataset import Batch, Dataset, Indices
from whale_train.strategies.graph.operation_graph import InputField


@dataclass(frozen=True, eq=False)
class WithBlankField:
    """The samples of `dataset`, each with `field` added, filled with zeros."""

    dataset: Dataset
    field: InputField

    @property
    def fields(self) -> tuple[InputField, ...]:
        return (*self.dataset.fields, self.field)

    @property
    def num_samples(self) -> int:
        return self.dataset.num_samples

    @property
    def num_evaluation_samples(self) -> int:
        return self.dataset.num_evaluation_samples

    def samples(self, indices: Indices, draws: Indices | None = None) -> Batch:
        return self._with_field(self.dataset.samples(indices, draws), len(indices))

    def evaluation_samples(self, indices: Indices) -> Batch:
        return self._with_field(self.dataset.evaluation_samples(indices), len(indices))

    def _with_field(self, batch: Batch, count: int) -> Batch:
        zeros = np.zeros((count, *self.field.shape), self.field.dtype)
        return {**batch, self.field.name: zeros}
