"""The page of all keys has every key that a config shows and that a class of options reads."""

import re
from collections.abc import Iterator
from typing import Any, Literal, get_args

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic import BaseModel, Field
from scripts.reference.field_texts import inner_model, texts_of, values_of
from scripts.reference.grammar_keys import HARDWARE, STRATEGY
from scripts.reference.key_groups import CONF, key_groups
from scripts.reference.keys import Key, KeyGroup
from scripts.reference.keys_page import escaped, keys_page
from scripts.reference.yaml_comments import WrittenKey, written_keys

from whale_train import config
from whale_train.data.open import DataOptions
from whale_train.errors import Fault
from whale_train.launcher.study.settings import StudySettings
from whale_train.models.options import ModelOptions
from whale_train.optimizer_options import GroupOptions, OptimizerOptions
from whale_train.strategies.grammar.nodes import read_strategy
from whale_train.strategies.hardware.inventory import MachineFacts, read_inventory

GROUPS = key_groups()
PATHS = {key.path for group in GROUPS for key in group.keys}
OPTIONS = [
    f"{group}={path.stem}"
    for group in ("data", "model", "strategy", "hardware", "optimizer", "launcher")
    for path in sorted((CONF / group).glob("*.yaml"))
]
HELD = {"target": "_target_", "asynchronous": "async"}  # fields by another key
INSIDE = {"own_loss", "listed", "arguments", "given", "names", "files", "blank_labels"}


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the values of a config."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path


def is_on_page(path: str) -> bool:
    """Return whether a path is a key of the page, or lies inside a value of one."""
    parts = path.split(".")
    beginnings = (".".join(parts[:end]) for end in range(len(parts), 1, -1))
    return path in PATHS or any(beginning in PATHS for beginning in beginnings)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_key_of_a_config_is_on_the_page(option: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = OmegaConf.to_container(compose("config", [option]), resolve=False)
    assert [path for path in leaves(composed) if not is_on_page(path)] == []


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        (config.TrainOptions, "train."),
        (config.StopAfterOptions, "train.stop_after."),
        (config.CheckpointOptions, "checkpoint."),
        (config.LauncherOptions, "launcher."),
        (config.VerifyOptions, "verify."),
        (config.AuditOptions, "audit."),
        (ModelOptions, "model."),
        (OptimizerOptions, "optimizer."),
        (GroupOptions, "optimizer.groups[]."),
        (StudySettings, "hydra.sweeper."),
        *((kind, "data.") for kind in get_args(get_args(DataOptions)[0])),
    ],
)
def test_every_field_that_is_read_is_on_the_page(kind: type[BaseModel], prefix: str) -> None:
    names = (HELD.get(name, name) for name in kind.model_fields if name not in INSIDE)
    assert {f"{prefix}{name}" for name in names} <= PATHS


def test_every_key_says_what_it_means() -> None:
    keys = [(group.title, key) for group in GROUPS for key in group.keys]
    assert [(title, x.path) for title, x in keys if not (x.meaning or x.comment)] == []
    assert [(title, x.path) for title, x in keys if not (x.values or x.default)] == []


def named_in(faults: list[Fault]) -> set[str]:
    """Return the keys that the remedies for unknown keys name."""
    remedies = (x.remedy for x in faults if x.rule.startswith(("is not a key", "is no key")))
    return {name for x in remedies for name in re.split(r", ", x.rpartition(": ")[2])}


def test_the_page_has_the_keys_that_the_reader_of_strategies_names() -> None:
    faults: list[Fault] = []
    offload = {"zzz": 0, "optimizer": "none"}
    stages = [{"stage": {"zzz": 0}}, {"replicate": {"zzz": 0, "offload": offload}}]
    pipeline = {"pipeline": {"stages": [*stages, {"split": {"zzz": 0}}], "zzz": 0}}
    assert read_strategy({"graph": pipeline, "zzz": 0}, "name", faults) is None
    assert len(faults) == 6
    shown = {field.path.rpartition(".")[2] for field in STRATEGY}
    assert named_in(faults) | {"time_limit_s"} == shown | {"offload"}


def test_the_page_has_the_keys_that_the_reader_of_inventories_names() -> None:
    faults: list[Fault] = []
    figures = {"zzz": 0}
    node = {"device": figures, "link": figures, "host": figures, "nvme": figures, "zzz": 0}
    node["slurm"] = figures
    mapping = {"nodes": [node], "network": "ethernet_1g", "zzz": 0}
    assert read_inventory(mapping, "name", faults, MachineFacts(1, 1, (), None)) is None
    shown = {field.path.rpartition(".")[2] for field in HARDWARE}
    assert named_in(faults) == shown


class Options(BaseModel):
    """Options.

    limit_s: seconds until it
        ends; None is never.
    first, last: a step.
    """

    limit_s: float | None = Field(None, gt=0, le=9.5)
    first: int = Field(ge=1)
    last: tuple[int, ...] = ()
    kind: Literal["a", True] | dict[str, int] = "a"
    inner: dict[str, tuple[config.AuditOptions, ...]] = Field(default_factory=dict)


Options.__module__ = "whale_train.options"  # as those that are read


def test_a_field_says_in_words_what_it_takes_and_means() -> None:
    assert texts_of(Options) == {
        "limit_s": "seconds until it ends; None is never.",
        "first": "a step.",
        "last": "a step.",
    }
    assert {name: values_of(field) for name, field in Options.model_fields.items()} == {
        "limit_s": "a number above 0 and at most 9.5 or `null`",
        "first": "a whole number of at least 1",
        "last": "a list (a whole number each)",
        "kind": "`a`, `true` or a mapping",
        "inner": "a mapping",
    }
    inner = inner_model(Options.model_fields["inner"].annotation)
    assert inner == (config.AuditOptions, ".NAME[].")


def test_comments_go_on_and_belong_to_the_key_beside_them() -> None:
    text = "# Head.\na: 1   # one,\n       # and on\nb:\n  c: '#'   # inner\n# above\nd: null\n"
    assert written_keys(text) == (
        "Head.",
        [
            WrittenKey("a", "1", "one, and on"),
            WrittenKey("b", "", ""),
            WrittenKey("b.c", "'#'", "inner"),
            WrittenKey("d", "null", "above"),
        ],
    )


def test_a_key_is_written_with_all_that_is_known_of_it() -> None:
    key = Key("train.limit_s", "a number", "`1`", "s", "None is `no_limit`", "as 3 * 2")
    page = keys_page((KeyGroup("train", "Training.", (key,)),))
    assert page.endswith(
        "## train\n\nTraining.\n\n[`train.limit_s`]{#train-limit_s}\n: `null` is `no_limit`.\n"
        ": as 3 \\* 2.\n: Values: a number. Default: `1`. Unit: s.\n"
    )
    assert escaped("a_b `c_d`") == "a\\_b `c_d`"
