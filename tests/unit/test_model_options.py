"""The `model` group of a request: what it may say, and what is said when it may not."""

from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from whale_train.errors import ConfigError
from whale_train.models.options import HUGGING_FACE, ModelOptions


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_module("whale_train.conf", version_base="1.3"):
        config = compose(config_name=None, overrides=list(overrides))
    content = OmegaConf.to_container(config.model)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def faults_of(mapping: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ModelOptions.from_mapping(mapping)
    return [str(fault) for fault in caught.value.faults]


def test_arguments_are_what_is_not_an_option() -> None:
    mapping = {"_target_": "nets.Narrow", "loss": "cross_entropy", "width": 3, "config": {"a": 1}}
    options = ModelOptions.from_mapping(mapping)
    assert options.target == "nets.Narrow"
    assert options.loss == "cross_entropy"
    assert options.sync_batchnorm is True
    assert options.arguments == {"width": 3, "config": {"a": 1}}
    assert options.config == {}
    assert options.class_name == "Narrow"


def test_hugging_face_keys_are_options() -> None:
    mapping = {"_target_": HUGGING_FACE, "architecture": "GPT2LMHeadModel", "config": {"n_embd": 8}}
    options = ModelOptions.from_mapping(mapping)
    assert options.is_hugging_face
    assert options.config == {"n_embd": 8}
    assert options.arguments == {}
    assert options.class_name == "GPT2LMHeadModel"


def test_options_survive_a_file() -> None:
    options = ModelOptions.from_mapping({"_target_": "nets.Narrow", "width": 3})
    assert ModelOptions.model_validate_json(options.model_dump_json()) == options


def test_hugging_face_from_the_command_line() -> None:
    options = ModelOptions.from_mapping(
        composed(
            "+model=hf", "model.architecture=LlamaForCausalLM", "model.config={hidden_size: 64}"
        )
    )
    assert (options.architecture, options.config) == ("LlamaForCausalLM", {"hidden_size": 64})
    options = ModelOptions.from_mapping(
        composed("+model=hf", "model.architecture=GPT2LMHeadModel", "model.pretrained=weights")
    )
    assert (options.config, options.pretrained) == ({}, "weights")


def test_custom_from_the_command_line() -> None:
    mapping = composed("+model=custom", "model._target_=nets.Narrow", "+model.width=3")
    assert ModelOptions.from_mapping(mapping).arguments == {"width": 3}


def test_missing_target() -> None:
    assert faults_of(composed("+model=custom")) == [
        "model._target_ is not given; write model._target_=package.module.Class"
    ]


def test_all_faults_of_the_options_together() -> None:
    mapping = {"_target_": "Narrow", "loss": "mse", "sync_batchnorm": "perhaps"}
    assert faults_of(mapping) == [
        "model._target_=Narrow is not the path of a class; write "
        "model._target_=package.module.Class",
        "model.loss=mse is not a loss; use one of: cross_entropy, model, or {_target_: "
        "torch.nn.MSELoss} or the like",
        "model.sync_batchnorm=perhaps is not true or false; use true or false",
    ]


def test_all_faults_of_hugging_face_options_together() -> None:
    mapping = {**composed("+model=hf"), "confg": {"a": 1}, "config": 3}
    assert faults_of(mapping) == [
        "model.architecture is not given; write model.architecture=LlamaForCausalLM or the like",
        "model.confg={'a': 1} is not an option of model=hf; did you mean config? One of: "
        "adapters, architecture, class_dim, config, init, loss, loss_over, pretrained, "
        "quantize, samples_are_independent, share_layers, sync_batchnorm; settings of the "
        "architecture go into model.config",
        "model.config=3 is not a mapping; write 'model.config={hidden_size: 64}' or the like",
    ]


def test_where_the_classes_are() -> None:
    given = {"_target_": "nets.Narrow", "loss": "cross_entropy"}
    for dim in (1, -1, None):
        assert ModelOptions.from_mapping({**given, "class_dim": dim}).class_dim == dim
    for wrong in (2, True, "last"):
        assert faults_of({**given, "class_dim": wrong}) == [
            f"model.class_dim={wrong} is not a dimension that classes are read from; use 1, -1 or "
            "null"
        ]
    assert faults_of({"_target_": "nets.Narrow", "class_dim": 1}) == [
        "model.class_dim=1 has no effect on model.loss=model; use model.loss=cross_entropy, or null"
    ]


def test_groups_that_have_a_loss_say_where_its_classes_are() -> None:
    groups = ("class_head", "custom", "gpt", "hf", "image_classifier", "m6_base", "moe_gpt")
    for group in groups:
        model = composed(f"+model={group}")
        assert (model["loss"], model["class_dim"]) == ("model", None)
