"""What a model's loss is, and whether its forward fits the data."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from whale_train.errors import ConfigError
from whale_train.models.class_head import ClassHead
from whale_train.models.loss_module import MODEL_PREFIX, LossModule, forward_fields
from whale_train.models.options import ModelOptions
from whale_train.strategies.graph.operation_graph import InputField


class Returns(nn.Module):
    """A user's model that returns what it was told to, made from its one weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        logits = self.layer(x)
        loss = logits.square().mean()
        return {
            "mapping": {"logits": logits, "loss": loss},
            "tuple": (None, loss, logits),
            "scalar": loss,
            "logits": logits,
            "logits_mapping": {"logits": logits},
            "text": "nothing",
        }[self.kind]


USERS = ModelOptions.from_mapping({"_target_": "users.Returns", "kind": "any"})
USERS_CROSS_ENTROPY = USERS.model_copy(update={"loss": "cross_entropy"})


@pytest.mark.parametrize("kind", ["mapping", "tuple", "scalar"])
def test_the_models_own_loss_is_found(kind: str) -> None:
    model = Returns(kind)
    x = torch.randn(5, 4)
    expected = (x @ model.layer.weight.T + model.layer.bias).pow(2).sum() / 15
    torch.testing.assert_close(LossModule(model, USERS)(x=x), expected)


@pytest.mark.parametrize("kind", ["logits", "logits_mapping"])
@pytest.mark.parametrize("shape", [(5,), (5, 2)])
def test_cross_entropy_of_the_logits(kind: str, shape: tuple[int, ...]) -> None:
    model = Returns(kind)
    x, labels = torch.randn(*shape, 4), torch.randint(3, shape)
    labels.view(-1)[1] = -100
    logits = (x @ model.layer.weight.T + model.layer.bias).reshape(-1, 3)
    each = [
        torch.logsumexp(row, dim=0) - row[label]
        for row, label in zip(logits, labels.flatten().tolist(), strict=True)
        if label != -100
    ]
    loss = LossModule(model, USERS_CROSS_ENTROPY)(x=x, labels=labels)
    torch.testing.assert_close(loss, torch.stack(each).mean())


def test_cross_entropy_leaves_the_labels_to_the_loss() -> None:
    """A model that could use labels is not given them; one that needs them is."""

    class Optional(nn.Module):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
            assert labels is None
            return x

    class Needed(nn.Module):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            assert labels is not None
            return x

    for model in (Optional(), Needed()):
        LossModule(model, USERS_CROSS_ENTROPY)(x=torch.randn(2, 3), labels=torch.tensor([0, 1]))


def test_paths_have_the_prefix() -> None:
    model = Returns("scalar")
    paths = [path for path, _ in LossModule(model, USERS).named_parameters()]
    assert [path.removeprefix(MODEL_PREFIX) for path in paths] == ["layer.weight", "layer.bias"]
    assert all(path.startswith(MODEL_PREFIX) for path in paths)


def test_a_copy_computes_with_its_own_weights() -> None:
    module = LossModule(Returns("scalar"), USERS)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.model.layer.weight.zero_()
        twin.model.layer.bias.fill_(2.0)
    x = torch.randn(5, 4)
    assert twin(x=x).item() == 4.0
    assert module(x=x).item() != 4.0


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (
            "logits",
            USERS,
            "model.loss=model finds no loss in what Returns returns (Tensor); return it as .loss, "
            "or use model.loss=cross_entropy",
        ),
        (
            "logits_mapping",
            USERS,
            "model.loss=model finds no loss in what Returns returns (dict); return it as .loss, "
            "or use model.loss=cross_entropy",
        ),
        (
            "text",
            USERS_CROSS_ENTROPY,
            "model.loss=cross_entropy finds no logits in what Returns returns (str); return it "
            "as .logits, or use model.loss=model",
        ),
    ],
)
def test_no_loss(kind: str, options: ModelOptions, expected: str) -> None:
    batch = {"x": torch.randn(2, 4), "labels": torch.tensor([0, 1])}
    if options.loss == "model":
        del batch["labels"]
    with pytest.raises(ConfigError) as caught:
        LossModule(Returns(kind), options)(**batch)
    assert str(caught.value) == expected


# The data's fields and forward's arguments


def fields(*names: str) -> tuple[InputField, ...]:
    return tuple(InputField(x, (4,), "int64" if x == "labels" else "float32") for x in names)


def forward_faults(model: nn.Module, options: ModelOptions, *names: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        forward_fields(model, options, fields(*names))
    return [str(fault) for fault in caught.value.faults]


class TakesTwo(nn.Module):
    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        return features * mask


class TakesAny(nn.Module):
    def forward(self, **named: Tensor) -> Tensor:
        return torch.stack(list(named.values())).sum()


def test_fields_that_fit() -> None:
    head, names = ClassHead(3), ("labels", "features")
    assert forward_fields(head, USERS, fields(*names)) == names
    assert forward_fields(head, USERS_CROSS_ENTROPY, fields(*names)) == names
    assert forward_fields(TakesTwo(), USERS, fields("mask", "features")) == ("mask", "features")
    three = ("mask", "labels", "features")
    assert forward_fields(TakesTwo(), USERS_CROSS_ENTROPY, fields(*three)) == three
    assert forward_fields(TakesAny(), USERS, fields("any", "labels")) == ("any", "labels")


def test_all_fields_that_do_not_fit_together() -> None:
    assert forward_faults(TakesTwo(), USERS, "feature", "labels") == [
        "data.feature is not an argument of the forward of TakesTwo; did you mean features? "
        "One of: features, mask",
        "model.loss=model needs a forward that takes labels, and that of TakesTwo takes none; "
        "use model.loss=cross_entropy",
        "model._target_=users.Returns needs features in its forward, and the fields of the data "
        "are feature, labels; name one of the data's fields features, in data.columns or "
        "data.fields, or give it a default",
        "model._target_=users.Returns needs mask in its forward, and the fields of the data are "
        "feature, labels; name one of the data's fields mask, in data.columns or "
        "data.fields, or give it a default",
    ]


def test_cross_entropy_without_labels() -> None:
    assert forward_faults(ClassHead(3), USERS_CROSS_ENTROPY, "features") == [
        "model.loss=cross_entropy needs labels, and the fields of the data are features; "
        "name the field of the labels labels, in data.columns or data.fields, or use "
        "model.loss=model"
    ]
