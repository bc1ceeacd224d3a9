"""The `model` group of a request: what it may say, and what is said when it may not."""

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from whale_train.errors import ConfigError
from whale_train.models.build import load_class
from whale_train.models.options import HUGGING_FACE, ModelOptions

NETS = """
from torch import nn
from nets_parts import WIDTH

LIMIT = 3

class Narrow(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        self.width = width

class Plain(nn.Module):
    def __init__(self):
        super().__init__()

class Anything:
    def __init__(self, **settings):
        pass

def narrow(width=WIDTH):
    return Narrow(width)
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to run from, holding the user's modules `nets` and `nets_broken`."""
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "nets_parts.py").write_text("WIDTH = 7\n")
    (tmp_path / "nets_broken.py").write_text("import nets_absent\n")
    (tmp_path / "nets_wrong.py").write_text("raise ValueError('two\\nlines')\n")
    (tmp_path / "nets_package").mkdir()
    (tmp_path / "nets_package" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("nets", "nets_parts", "nets_package"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_module("whale_train.conf", version_base="1.3"):
        config = compose(config_name=None, overrides=list(overrides))
    content = OmegaConf.to_container(config.model)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def loaded(mapping: dict[str, Any]) -> Callable[..., Any]:
    return load_class(ModelOptions.from_mapping(mapping))


def faults_of(ask: Callable[[dict[str, Any]], object], mapping: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        ask(mapping)
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


@pytest.mark.parametrize("name", ["gpt", "image_classifier", "class_head"])
def test_config_files_name_every_argument_with_its_default(name: str) -> None:
    options = ModelOptions.from_mapping(composed(f"+model={name}"))
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(load_class(options)).parameters.items()
    }
    assert options.arguments == defaults


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
    assert faults_of(ModelOptions.from_mapping, composed("+model=custom")) == [
        "model._target_ is not given; write model._target_=package.module.Class"
    ]


def test_all_faults_of_the_options_together() -> None:
    mapping = {"_target_": "Narrow", "loss": "mse", "sync_batchnorm": "perhaps"}
    assert faults_of(ModelOptions.from_mapping, mapping) == [
        "model._target_=Narrow is not the path of a class; write "
        "model._target_=package.module.Class",
        "model.loss=mse is not a loss; use one of: cross_entropy, model",
        "model.sync_batchnorm=perhaps is not true or false; use true or false",
    ]


def test_all_faults_of_hugging_face_options_together() -> None:
    mapping = {**composed("+model=hf"), "confg": {"a": 1}, "config": 3}
    assert faults_of(ModelOptions.from_mapping, mapping) == [
        "model.architecture is not given; write model.architecture=LlamaForCausalLM or the like",
        "model.confg={'a': 1} is not an option of model=hf; did you mean config? One of: "
        "_target_, architecture, config, loss, pretrained, sync_batchnorm; settings of the "
        "architecture go into model.config",
        "model.config=3 is not a mapping; write 'model.config={hidden_size: 64}' or the like",
    ]


@pytest.mark.usefixtures("nets")
def test_classes_are_found_in_the_working_directory() -> None:
    before = list(sys.path)
    narrow = loaded({"_target_": "nets.Narrow", "width": 3})
    assert narrow(width=3).width == 3
    assert loaded({"_target_": "nets.narrow"})().width == 7
    assert loaded({"_target_": "nets.Anything", "any": 1})
    assert sys.path == before


def test_a_module_named_like_ours_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.py").write_text("def gpt(): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "models", raising=False)
    made = loaded({"_target_": "models.gpt"})
    ours = loaded({"_target_": "whale_train.models.gpt.GPT"})
    assert (made.__module__, ours.__module__) == ("models", "whale_train.models.gpt")
    monkeypatch.delitem(sys.modules, "models")


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (
            {"_target_": "nets_missing.parts.Narrow"},
            [
                "model._target_=nets_missing.parts.Narrow cannot be imported: there is no module "
                "nets_missing; run from the folder that holds it, or install it"
            ],
        ),
        (
            {"_target_": "nets_package.parts.Narrow"},
            [
                "model._target_=nets_package.parts.Narrow cannot be imported: there is no module "
                "nets_package.parts; run from the folder that holds it, or install it"
            ],
        ),
        (
            {"_target_": "nets_broken.Narrow"},
            [
                "model._target_=nets_broken.Narrow cannot be imported: nets_broken raised "
                "ModuleNotFoundError: No module named 'nets_absent'; correct nets_broken"
            ],
        ),
        (
            {"_target_": "nets_wrong.Narrow"},
            [
                "model._target_=nets_wrong.Narrow cannot be imported: nets_wrong raised "
                "ValueError: two lines; correct nets_wrong"
            ],
        ),
        (
            {"_target_": "nets.Narow"},
            [
                "model._target_=nets.Narow cannot be imported: nets has no Narow; "
                "did you mean Narrow? One of: Narrow, Plain"
            ],
        ),
        (
            {"_target_": "nets_package.Narrow"},
            [
                "model._target_=nets_package.Narrow cannot be imported: nets_package has no "
                "Narrow; define a torch.nn.Module in nets_package"
            ],
        ),
        (
            {"_target_": "nets.LIMIT"},
            [
                "model._target_=nets.LIMIT is of type int, not a class; name a torch.nn.Module "
                "class, or a function that returns a module"
            ],
        ),
        (
            {"_target_": "nets.Narrow", "widht": 3},
            [
                "model.widht=3 is not an argument of Narrow; did you mean width? One of: depth, "
                "width; model=custom starts without arguments",
                "model.width is not given, and Narrow needs it; write model.width=VALUE",
            ],
        ),
        (
            {"_target_": "nets.Plain", "width": 3},
            [
                "model.width=3 is not an argument of Plain; leave it out: it takes no arguments; "
                "model=custom starts without arguments"
            ],
        ),
        (
            {"_target_": "whale_train.models.class_head.ClassHead", "classes": 3},
            [
                "model.classes=3 is not an argument of ClassHead; did you mean num_classes? "
                "One of: num_classes, num_features"
            ],
        ),
    ],
)
def test_faults_of_a_class(mapping: dict[str, Any], expected: list[str]) -> None:
    assert faults_of(loaded, mapping) == expected
