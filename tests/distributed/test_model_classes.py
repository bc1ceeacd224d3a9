"""The class that the `model` group names: found, checked against its arguments, or refused."""

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
from whale_train.models.options import ModelOptions

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

class Anything(nn.Module):
    def __init__(self, **settings):
        pass

def narrow(width=WIDTH) -> nn.Module:
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


def loaded(mapping: dict[str, Any]) -> Callable[..., Any]:
    return load_class(ModelOptions.from_mapping(mapping))


def faults_of(mapping: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(mapping)
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize("name", ["gpt", "moe_gpt", "m6_base", "image_classifier", "class_head"])
def test_config_files_name_every_argument_with_its_default(name: str) -> None:
    with initialize_config_module("whale_train.conf", version_base="1.3"):
        config = compose(config_name=None, overrides=[f"+model={name}"])
    content = OmegaConf.to_container(config.model)
    assert isinstance(content, dict)
    options = ModelOptions.from_mapping({str(key): value for key, value in content.items()})
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(load_class(options)).parameters.items()
    }
    assert options.arguments == defaults


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
    (tmp_path / "models.py").write_text("from torch import nn\ndef gpt() -> nn.Module: ...\n")
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
                "did you mean Narrow? One of: Anything, Narrow, Plain"
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
                "class, or a function annotated to return one (-> nn.Module)"
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
    assert faults_of(mapping) == expected
