"""Which models have other operations in evaluation mode than a changed training graph."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from whale_train.models.export.eval_mode import changed_in_evaluation
from whale_train.models.options import ModelOptions
from whale_train.strategies.graph.operation_graph import InputField

FIELDS = (InputField("points", (8,), "float32"), InputField("labels", (), "int64", 4))


class Part(nn.Module):
    """What evaluation changes, `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "modules":
                return self.drop(self.norm(x))
            case "in place":
                return functional.dropout(self.norm(x), 0.5, self.training, inplace=True)
            case "if it drops":
                return self.drop(x) if self.training else x
            case "a count":
                if self.training:
                    assert isinstance(self.calls, Tensor)
                    self.calls += 1
            case "without gradients":
                with torch.no_grad():
                    x = self.drop(x) * 2
            case "another in training":
                return x * 2 if self.training else x
            case "more in training":
                return x.tanh() if self.training else x
            case "more in evaluation":
                return x if self.training else x.tanh()
            case "always drops":
                return functional.dropout(x, 0.5)
            case "another without gradients":
                with torch.no_grad():
                    x = x * 2 if self.training else x * 3
            case "in place in training":
                y = x.clone()
                if self.training:
                    y[:, :2].mul_(2)
                return y
            case "a count it reads":
                assert isinstance(self.calls, Tensor)
                if self.training:
                    self.calls += 1
                return x * self.calls
            case "looks at values":
                if not self.training:
                    return x if x.sum() > 0 else -x
        return x


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.part, self.head = nn.Linear(8, 8), Part(how), nn.Linear(8, 4)

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.head(self.part(self.first(points)))
        return logits


OTHER = "part runs other operations in evaluation mode"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        *((how, "") for how in ("modules", "in place", "if it drops", "a count")),
        ("without gradients", ""),
        ("another in training", OTHER),
        ("more in training", OTHER),
        ("more in evaluation", OTHER),
        ("always drops", OTHER),
        ("another without gradients", OTHER),
        ("in place in training", OTHER),
        ("a count it reads", OTHER),
        ("looks at values", "the model cannot be exported in evaluation mode (GuardOnData"),
    ],
)
def test_what_evaluations_of_a_training_graph_do_not_reach(how: str, said: str) -> None:
    options = ModelOptions.from_mapping(
        {"_target_": f"{__name__}.Model", "loss": "cross_entropy", "how": how}
    )
    found = changed_in_evaluation(options, FIELDS)
    assert found.startswith(said) if said else not found
