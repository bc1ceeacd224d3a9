"""What is said to keys that there are not: real faults alone, and suggestions that can be set."""

import re
from collections.abc import Mapping
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from pydantic import BaseModel
from tests.pairs import covering

from whale_train.config import TrainOptions, read_request
from whale_train.data.open import DataOptions
from whale_train.errors import ConfigError, Fault, nearest
from whale_train.launcher.compose import command_line
from whale_train.other_trainers import INSTEAD, known_elsewhere

GIVEN = {
    "model=hf": "model.architecture=GPT2LMHeadModel",
    "model=custom": "model._target_=my.Net",
    "data=arrays": "data.path=x",
    "data=hf_dataset": "data.path=x",
    "launcher=ssh": "launcher.hosts=[a]",
}
GROUPS = {
    "model": "class_head hf custom",
    "data": "arrays images",
    "strategy": "3d",
    "hardware": "cpu",
    "optimizer": "lamb sgd",
    "launcher": "slurm ssh ray",
}
CHOICES = [f"{group}={name}" for group, names in GROUPS.items() for name in names.split()]


@pytest.fixture(autouse=True)
def _suffixes() -> None:
    """Resolve what the command's config asks for, as the command does."""
    OmegaConf.register_new_resolver("whale_suffix", lambda: "abcdef", replace=True)


def faults_of(*arguments: str) -> list[Fault]:
    """Return the faults that the command finds in its arguments before anything is read."""
    try:
        mode = () if any(text.startswith("mode=") for text in arguments) else ("mode=plan",)
        command_line.check(command_line.rewritten([*arguments, *mode]))
    except ConfigError as error:
        return list(error.faults)
    return []


def said(*arguments: str) -> list[str]:
    return [str(fault) for fault in faults_of(*arguments)]


# An option that has to be given something more, and one that does not.
@pytest.mark.parametrize("choice", covering(CHOICES, lambda choice: {choice in GIVEN}))
def test_an_unknown_key_beside_any_option_is_the_only_fault(choice: str) -> None:
    given = [choice, *filter(None, [GIVEN.get(choice)])]
    unknown = "train.stepz=3 is not a key of the config; did you mean train.steps?"
    assert said(*given, "train.stepz=3") == [unknown]


@pytest.mark.parametrize(
    "choice",
    [
        "data=images",
        pytest.param("optimizer=lamb", marks=pytest.mark.full),
        pytest.param("launcher=ssh", marks=pytest.mark.full),
    ],
)
def test_no_suggestion_names_a_key_that_the_option_has_not(choice: str) -> None:
    """Every key of every other option of a group is tried beside an option that may lack it."""
    group, _, name = choice.partition("=")
    given = [choice, *filter(None, [GIVEN.get(choice)])]
    with command_line.initialised(None):
        keys = set(command_line._attempt("config", given)[group])
        others = {
            key
            for other in GROUPS[group].split()
            for key in command_line._attempt("config", [f"{group}={other}"])[group]
        }
    absent = sorted(others - keys)
    faults = faults_of(*given, *(f"{group}.{key}=1" for key in absent))
    assert [fault.key for fault in faults] == [f"{group}.{key}" for key in absent]
    for fault in faults:
        assert f"{group}={name} " not in fault.remedy
        assert re.match(rf"{group}=.* ha(s|ve) it$", fault.remedy), fault


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        (
            "model=hf model.architcture=GPT2LMHeadModel",
            ["model.architcture=GPT2LMHeadModel: did you mean model.architecture?"],
        ),
        (
            "data=images data.path=x",
            ["data.path=x: data=arrays, hf_dataset, image_folder, text and 2 more have it"],
        ),
        pytest.param(
            "launcher.sbatch.partition=gpu",
            ["launcher.sbatch.partition=gpu: launcher=slurm has it"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "optimizer.momentum=0.9",
            ["optimizer.momentum=0.9: optimizer=sgd has it"],
            marks=pytest.mark.full,
        ),
        pytest.param(
            "optimizer.steps=9",
            ["optimizer.steps=9: did you mean train.steps?"],
            marks=pytest.mark.full,
        ),
        ("stepz=9 steps=8", ["stepz=9: *", "steps=8: did you mean train.steps?"]),
        pytest.param("checkpiont=runs/mine", ["checkpiont=runs/mine: *"], marks=pytest.mark.full),
        pytest.param(
            "mode=verify verify.steps=200 train.stepz=300",
            ["train.stepz=300: *steps?"],
            marks=pytest.mark.full,
        ),
        ("verify.stepz=3 mode=verify", ["verify.stepz=3: did you mean verify.steps?"]),
        pytest.param("checkpoint.pth=a", ["checkpoint.pth=a: *"], marks=pytest.mark.full),
        ("+experiment=smok data.num_classes=3", ["experiment=smok: did you mean smoke?*"]),
        ("strategy=zero4 strategy.foo=1 model.widht=1", ["strategy=zero4: *", "model.widht=1: *"]),
        ("model=nope model.width=3 optimizer.lr=0", ["model=nope: *", "optimizer.lr=0: *"]),
        ("train.stepz=1 train.steps=0", ["train.stepz=1: *", "train.steps=0: use 1 or more"]),
        ("hydra.run.dri=a train.stepz=1", ["hydra.run.dri=a: *run.dir?", "train.stepz=1: *"]),
        ("+train.lr=1", ["train.lr=1: use optimizer.lr=0.001"]),
        ("strategy.zero_stage=3", ["strategy.zero_stage: use strategy=zero1 (or zero2, zero3)"]),
        ("strategy.balence=even", ["strategy.balence: did you mean balance?*graph*"]),
        (
            "train.stop_after.evaluations=3 train.stop_after.metrik=loss",
            ["train.stop_after.metric: write train.stop_after.metric=VALUE", "*metrik=loss: *"],
        ),
        (
            "data=text_files data.path=[1,2] data.tokenizer=x data.pack.mod=concat data.field=3",
            [
                "data.path[0]=1: put it in quotes",
                "data.path[1]=2: put it in quotes",
                "data.field=3: put it in quotes",
                "data.pack.mod=concat: did you mean mode?*",
            ],
        ),
        (
            "data._target_=a.B data.pad=longest data.evaluation=[x]",
            [
                "data.pad=longest: write data.pad.NAME=VALUE",
                "data.evaluation=[x]: write data.evaluation.NAME=VALUE",
            ],
        ),
        ("data=arrays data.path=x data.columns.x=[a,b]", ["data.columns.x=[a, b]: give one alone"]),
        (
            "data=text_files data.path=x data.tokenizer=x data.field.source=a",
            ["data.field.target: write data.field.target=VALUE"],
        ),
    ],
)
def test_only_what_is_wrong_is_said(arguments: str, faults: list[str]) -> None:
    answers = faults_of(*arguments.split())
    texts = [f"{x.key}={x.value}".rstrip("=") + f": {x.remedy}" for x in answers]
    assert len(texts) == len(faults), texts
    for text, expected in zip(texts, faults, strict=True):
        assert re.fullmatch(re.escape(expected).replace(r"\*", ".*"), text)


@pytest.mark.parametrize(
    ("added", "without"),
    [
        ("optimizer=sgd +optimizer.nope=1", "betas eps name"),
        ("+optimizer.nope=1", "momentum name"),
        ("optimizer=lamb +optimizer.nope=1", "momentum fused name"),
        ("+launcher.nope=1", "hosts python nodes ranks_per_node wait sbatch placement_s kind"),
        ("launcher=ssh launcher.hosts=[a] +launcher.nope=1", "nodes sbatch address kind"),
        ("launcher=ray +launcher.nope=1", "python nodes sbatch kind"),
        ("+checkpoint.nope=1", "path"),
        ("+strategy.nope=1", "time_limit_s"),
        ("model=hf model.architecture=GPT2LMHeadModel +model.nope=1", "_target_"),
    ],
)
def test_keys_without_effect_are_not_among_those_that_are_named(added: str, without: str) -> None:
    (fault,) = faults_of(*added.split())
    named = set(re.findall(r"\w+", fault.remedy))
    assert len(named) > 3
    assert not named & set(without.split())


@pytest.mark.parametrize("instead", dict.fromkeys(INSTEAD.values()), ids=lambda x: x.remedy[:40])
def test_what_is_said_to_a_name_of_another_trainer_can_be_set(instead: object) -> None:
    (kind,) = {value for value in INSTEAD.values() if value == instead}
    if not kind.settings:
        assert kind.remedy.startswith("there is none: ")
        return
    overrides = command_line.rewritten([*kind.settings, "mode=train"])
    config = command_line.composed([x for x in overrides if not x.startswith("--")])
    parsed = OverridesParser.create().parse_overrides(list(kind.settings))
    names = {o.key_or_group: str(o.value()) for o in parsed if "." not in o.key_or_group}
    read_request(config, {"strategy": "own"} | names)  # refuses nothing


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("train.lr", "use optimizer.lr=0.001"),
        ("trainer.max_steps", "use train.steps=1000 (optimizer steps)"),
        ("per_device_train_batch_size", "use train.global_batch=64 (samples a step of all *"),
        pytest.param(
            "train.batch_size",
            "use train.global_batch=64 (samples a step of all devices *",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "gradient_accumulation_steps",
            "use train.accumulate=4 (the global batch stays *",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "train.wandb",
            "use trackers=[{name: wandb, project: mine}] (offline without *",
            marks=pytest.mark.full,
        ),
        ("train.num_workers", "use data._target_=my.module.MyDataset data.workers=2 (other *"),
        pytest.param(
            "train.max_epochs",
            "use train.epochs=3 (or train.steps, optimizer steps)",
            marks=pytest.mark.full,
        ),
        pytest.param("learning_rate", "use optimizer.lr=0.001", marks=pytest.mark.full),
        ("fp16", "use train.precision=fp16"),
        pytest.param("bf16", "use train.precision=bf16", marks=pytest.mark.full),
        pytest.param("zero_stage", "use strategy=zero1 (or zero2, zero3)", marks=pytest.mark.full),
        ("deepspeed.zero_optimization.stage", "use strategy=zero1 (or zero2, zero3)"),
        pytest.param("tensor_parallel_size", "use strategy=split *", marks=pytest.mark.full),
        pytest.param("num_gpus", "use strategy.devices=4 (*", marks=pytest.mark.full),
        pytest.param("nodes", "use launcher=slurm launcher.nodes=2 (*", marks=pytest.mark.full),
        ("trainer.precision", "did you mean train.precision?"),
        pytest.param(
            "model.gradient_checkpointing",
            "use strategy.graph={pipeline: *",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_ours(key: str, remedy: str) -> None:
    (fault,) = faults_of(f"{key}=1")
    assert re.fullmatch(re.escape(remedy).replace(r"\*", ".*"), fault.remedy), fault


def test_flags_and_bare_words_are_answered_alike() -> None:
    assert said("--learning-rate=1e-4", "--bf16") == [
        "--learning-rate=1e-4 is not a flag; use optimizer.lr=0.001",
        "--bf16 is not a flag; use train.precision=bf16",
    ]
    assert said("--lr", "0.1", "train.steps=2") == ["--lr is not a flag; use optimizer.lr=0.001"]
    assert said("plan") == ["plan is neither KEY=VALUE nor a flag; write mode=plan"]
    assert said("fp16") == ["fp16 is neither KEY=VALUE nor a flag; use train.precision=fp16"]


def test_no_name_of_the_table_hides_a_key_of_ours() -> None:
    """A name is looked up only where it is no key; the longest path that fits is meant."""
    assert known_elsewhere("nobody.writes_this") is None
    rates = (known_elsewhere(key) for key in ("lr", "--LR", "optimizer.params.lr"))
    assert {rate.remedy for rate in rates if rate} == {"use optimizer.lr=0.001"}
    assert len(set(chain(INSTEAD))) == len(INSTEAD)


def test_keys_of_every_empty_mapping_may_be_set_one_by_one() -> None:
    sections = {"train": [TrainOptions], "data": get_args(get_args(DataOptions)[0])}
    keys = {
        f"{section}.{name}"
        for section, models in sections.items()
        for model in models
        for name, field in model.model_fields.items()
        if name != "arguments" and _may_be_a_mapping(field.annotation)
    }
    assert {"train.stop_after", "data.pack", "data.fields"} <= keys
    for key in sorted(keys):
        assert command_line.rewritten([f"{key}.x=1"]) == [f"++{key}.x=1"]


def _may_be_a_mapping(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, BaseModel | Mapping):
        return True
    origin = get_origin(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return True
    inside = origin in (Union, UnionType, Annotated)
    return inside and any(_may_be_a_mapping(x) for x in get_args(kind))


def test_of_many_choices_those_that_begin_so_come_first() -> None:
    choices = [f"Other{number}" for number in range(60)] + ["F1Score", "F1Mean"]
    remedy = nearest("F1", choices)
    assert remedy.startswith("did you mean F1Mean? One of: F1Mean, F1Score, Other0, ")
    assert remedy.endswith(" and 42 more")
