"""Give samples a field of zeros that their data does not have, as labels yet to be predicted."""

from dataclasses import dataclass

import numpy as np

from whale_train.data.dataset import Batch, Dataset, Indices
from whale_train.strategies.graph.operation_graph import InputField


@dataclass(frozen=True, eq=False)
class WithBlankField:
    """The samples of `dataset`, each with `field` beside its own."""

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
