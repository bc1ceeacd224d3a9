"""What `model._target_` may name, by what it says of itself: nothing else is called."""

import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from whale_train.errors import ConfigError
from whale_train.models.build import build_model
from whale_train.models.options import ModelOptions

NETS = """
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Optional, Self, TypeVar

import torch
from torch import nn

if TYPE_CHECKING:
    from elsewhere import Absent

CALLED = []
Kind = TypeVar("Kind", bound="Net")

def noted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        CALLED.append(function.__name__)
        return function(*args, **kwargs)
    return wrapper

class Net(nn.Module):
    def __init__(self, width: int = 2):
        super().__init__()
        CALLED.append("Net")
        self.layer = nn.Linear(width, width)

    @classmethod
    def from_config(cls, width: int) -> Self:
        return cls(width)

    @classmethod
    def by_name(cls, width: int) -> Net:
        return cls(width)

    @staticmethod
    def of_width(width: int) -> "Net":
        return Net(width)

    @classmethod
    def size(cls, width: int) -> int:
        CALLED.append("size")
        return width

class Wider(Net):
    pass

class Recipe:
    def __init__(self, width: int = 2):
        CALLED.append("Recipe")

    @classmethod
    def make(cls, width: int) -> Self:
        CALLED.append("make")

    @classmethod
    def net(cls, width: int) -> Net:
        return Net(width)

class Callable_:
    def __call__(self, width: int) -> Net:
        CALLED.append("called")
        return Net(width)

instance = Callable_()
module = Net()
CALLED.clear()

def said(width: int = 2) -> nn.Module: return Net(width)
def subclass(width: int = 2) -> Wider: return Wider(width)
def either(width: int = 2) -> Net | Wider: return Net(width)
def annotated(width: int = 2) -> Annotated[Net, "small"]: return Net(width)
def bound(width: int = 2) -> Kind: return Net(width)
@noted
def wrapped(width: int = 2) -> Net: return Net(width)
@functools.lru_cache
def cached(width: int = 2) -> Net: return Net(width)
@torch.no_grad()
def without_gradients(width: int = 2) -> Net: return Net(width)
part = functools.partial(said, width=3)
part_of_class = functools.partial(functools.partial(Net), width=3)

def silent(width: int = 2): return CALLED.append("silent")
def number(width: int = 2) -> int: return CALLED.append("number")
def perhaps(width: int = 2) -> Optional[Net]: return CALLED.append("perhaps")
def kind(width: int = 2) -> type[Net]: return CALLED.append("kind")
def absent(width: int = 2) -> Absent: return CALLED.append("absent")
def lies(width: int = 2) -> Net: return 3
part_of_silent = functools.partial(silent, 3)
part_of_recipe = functools.partial(Recipe, 3)
"""
REMEDY = "name a torch.nn.Module class, or a function annotated to return one (-> nn.Module)"


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "target_nets", raising=False)


def built(target: str, **arguments: Any) -> nn.Module:
    return build_model(ModelOptions.from_mapping({"_target_": target, **arguments}))


@pytest.mark.parametrize(
    "name",
    [
        *("Net", "Net.from_config", "Wider.from_config", "Net.by_name", "Net.of_width"),
        *("Recipe.net", "said", "subclass", "either", "annotated", "bound"),
        *("wrapped", "cached", "without_gradients", "part", "part_of_class"),
    ],
)
def test_what_says_that_it_gives_a_module_is_called(name: str) -> None:
    model = built(f"target_nets.{name}", width=4)
    assert type(model).__name__ == ("Wider" if name in ("Wider.from_config", "subclass") else "Net")
    assert model.layer.in_features == 4


@pytest.mark.parametrize(
    ("target", "rule"),
    [
        ("os.system", "is a function that does not say what it returns"),
        ("subprocess.Popen", "is a class, and not a torch.nn.Module"),
        ("builtins.exec", "is a function that does not say what it returns"),
        ("target_nets.silent", "is a function that does not say what it returns"),
        ("target_nets.part_of_silent", "is a function that does not say what it returns"),
        ("target_nets.part_of_recipe", "is a class, and not a torch.nn.Module"),
        ("target_nets.number", "is a function that says it returns int"),
        ("target_nets.perhaps", "is a function that says it returns Optional[Net]"),
        ("target_nets.kind", "is a function that says it returns type[Net]"),
        (
            "target_nets.absent",
            "is a function whose return annotation cannot be resolved (NameError: name 'Absent' is "
            "not defined)",
        ),
        ("target_nets.Net.size", "is a function that says it returns int"),
        ("target_nets.Recipe", "is a class, and not a torch.nn.Module"),
        ("target_nets.Recipe.make", "is a function that says it returns Self"),
        ("target_nets.instance", "is of type Callable_, not a class"),
        ("target_nets.module", "is of type Net, not a class"),
    ],
)
def test_nothing_else_is_called(target: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(target)
    assert str(caught.value) == f"model._target_={target} {rule}; {REMEDY}"
    assert "target_nets" not in sys.modules or sys.modules["target_nets"].CALLED == []


def test_a_function_that_does_not_keep_its_word() -> None:
    with pytest.raises(
        ConfigError, match=r"lies gives an object of type int, not a torch\.nn\.Mod"
    ):
        built("target_nets.lies")
