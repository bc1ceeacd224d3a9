"""Layers that have one layer's weights: which, and what a plan knows of them."""

from typing import Any

import pytest
import torch
from torch import nn

from whale_train.errors import ConfigError
from whale_train.models.build import build_model
from whale_train.models.options import ModelOptions
from whale_train.models.profile.measure import profile_model
from whale_train.models.weights.shared_layers import share_layers, shared_places
from whale_train.strategies.graph.operation_graph import InputField

TOKENS = tuple(InputField(name, (12,), "int64", 31) for name in ("input_ids", "labels"))


def options(**given: Any) -> ModelOptions:
    target = "whale_train.models.gpt.GPT"
    small = {"vocab_size": 31, "sequence_length": 12, "width": 16, "heads": 2}
    return ModelOptions.from_mapping(
        {"_target_": target, **small, "depth": 6, "share_layers": True, **given}
    )


def test_layers_have_the_first_ones_weights() -> None:
    torch.manual_seed(0)
    model = build_model(options())
    first, *others = model.get_submodule("blocks").children()
    for block in others:
        for mine, its in zip(first.parameters(), block.parameters(), strict=True):
            assert mine is its
    names = {name.partition(".")[0] for name, _ in model.named_parameters() if "blocks" in name}
    assert names == {"blocks"}
    assert {n.split(".")[1] for n, _ in model.named_parameters() if "blocks" in n} == {"0"}


def test_layers_that_differ_are_shared_with_those_like_them() -> None:
    """As the dense layers before a mixture's; lists inside of shared layers are left alone."""

    def layer(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))

    model = nn.ModuleDict({"layers": nn.ModuleList([layer(4), layer(6), layer(4), layer(6)])})
    assert shared_places(model) == {
        f"layers.{i + 2}.{j}.{kind}": f"layers.{i}.{j}.{kind}"
        for i in (0, 1)
        for j in (0, 1)
        for kind in ("weight", "bias")
    }
    # Of lists with nothing alike, the lists inside may have.
    stages = nn.ModuleList([nn.ModuleList([layer(4), layer(4)]), nn.ModuleList([layer(6)])])
    assert set(shared_places(stages)) == {
        f"0.1.{j}.{kind}" for j in (0, 1) for kind in ("weight", "bias")
    }


def test_what_a_layer_has_in_two_places_is_shared_in_both() -> None:
    def layer() -> nn.Module:
        made = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        made[1].weight = made[0].weight
        return made

    layers = nn.ModuleList([layer(), layer()])
    share_layers(layers)
    assert len({id(layers[i][j].weight) for i in (0, 1) for j in (0, 1)}) == 1  # type: ignore[index]


def test_frozen_layers_are_like_each_other() -> None:
    layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    for frozen in (layers[0], layers[2]):
        frozen.requires_grad_(False)
    assert shared_places(layers) == {
        f"{i + 2}.{kind}": f"{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    }


def test_a_model_without_layers_is_told_so() -> None:
    given = {"_target_": "whale_train.models.class_head.ClassHead", "share_layers": True}
    with pytest.raises(ConfigError, match="finds no two layers that are alike in a list of"):
        build_model(ModelOptions.from_mapping(given))


def test_a_plan_has_the_weights_once() -> None:
    folded, whole = (profile_model(options(), "g", TOKENS, by_folding=x) for x in (True, False))
    assert folded == whole
    apart = profile_model(options(share_layers=False), "g", TOKENS)
    assert whole.forward_flops == apart.forward_flops
    one_block = sum(p.elements for p in whole.parameters if p.path.startswith("blocks.0."))
    assert apart.parameter_elements - whole.parameter_elements == 5 * one_block
