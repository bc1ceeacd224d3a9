"""Gradients that are sparse are refused by name, wherever a model asks for them."""

from itertools import product

import numpy as np
import pytest
import torch
from tests.pairs import covering, once
from torch import Tensor, nn
from torch.nn import functional

from whale_train.errors import ConfigError
from whale_train.models.options import ModelOptions
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.graph.operation_graph import InputField, ModelProfile

FIELDS = (InputField("ids", (6,), "int64", 17), InputField("labels", (), "int64", 4))


class Model(nn.Module):
    """Looks up in tables `how`; with `branch` it looks at values and has no graph."""

    def __init__(self, how: str, branch: bool = False) -> None:
        super().__init__()
        self.how, self.branch = how, branch
        sparse = how in ("embedding", "frozen")
        self.table = nn.Embedding(17, 8, sparse=sparse)
        self.bag = nn.EmbeddingBag(17, 8, sparse=how == "bag", mode="sum")
        self.weight = nn.Parameter(torch.randn(17, 8))
        self.table.weight.requires_grad_(how != "frozen")
        self.inner = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids).mean(1) + self.bag(ids)
        match self.how:
            case "function":
                hidden = hidden + functional.embedding(ids, self.weight, sparse=True).mean(1)
            case "gather":
                every = self.weight.expand(len(ids), 17, 8)
                rows = ids.unsqueeze(2).expand(-1, -1, 8)
                hidden = hidden + every.gather(1, rows, sparse_grad=True).mean(1)
            case "under autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    found = functional.embedding(ids, self.weight, sparse=True).mean(1)
                hidden = hidden + found.float()
            case "without gradients":
                with torch.no_grad():
                    found = functional.embedding(ids, self.weight, sparse=True).mean(1)
                hidden = hidden + found
            case _:
                hidden = hidden + self.weight.mean(0)
        if self.branch and bool(hidden.isnan().any()):
            raise ValueError("not a number")
        for layer in self.inner:
            hidden = torch.tanh(layer(hidden))
        logits: Tensor = self.head(hidden)
        return logits


def profile(how: str, branch: bool) -> ModelProfile:
    given = {"_target_": f"{__name__}.Model", "loss": "cross_entropy", "how": how, "branch": branch}
    draw = np.random.default_rng(0)
    arrays = {"ids": draw.integers(0, 17, (3, 6)), "labels": draw.integers(0, 4, 3)}
    return profile_model(ModelOptions.from_mapping(given), "Model", FIELDS, lambda n: arrays)


REFUSED = (
    ("embedding", "table", "aten.embedding.default", "sparse=False"),
    ("bag", "bag", "aten._embedding_bag.default", "sparse=False"),
    ("function", "embedding_1", "aten.embedding.default", "sparse=False"),
    ("gather", "aten.gather.default", "aten.gather.default", "sparse_grad=False"),
    ("under autocast", "mean_1", "aten.embedding.default", "sparse=False"),
)


@pytest.mark.parametrize(
    ("how", "of_graph", "of_calls", "remedy", "branch"),
    [
        pytest.param(*row, branch, id="-".join((*row, str(branch))))
        for row, branch in covering(
            list(product(REFUSED, (False, True))), lambda case: once(case[0][0], case[1])
        )
    ],
)
def test_sparse_gradients_are_refused(
    how: str, of_graph: str, of_calls: str, remedy: str, branch: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        profile(how, branch)
    assert str(caught.value) == (
        f"model=Model has sparse gradients in {of_calls if branch else of_graph}, and ranks sum "
        f"and keep dense ones; use {remedy}"
    )


@pytest.mark.parametrize(
    ("how", "branch"),
    covering(
        list(product(("dense", "frozen", "without gradients"), (False, True))),
        lambda case: once(*case),
    ),
)
def test_tables_without_sparse_gradients_are_not(how: str, branch: bool) -> None:
    assert (profile(how, branch).graph is None) == branch
