"""List every key of the config, group by group."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from scripts.reference.field_texts import texts_of, values_of
from scripts.reference.grammar_keys import HARDWARE, STRATEGY, FieldKey
from scripts.reference.keys import (
    Key,
    KeyGroup,
    Written,
    below,
    key_at,
    keys_of,
    own_keys,
    with_own,
    written_in,
)
from scripts.reference.yaml_comments import written_keys

from whale_train import config
from whale_train.callbacks.options import CallbackOptions, CallbacksOptions
from whale_train.data.open import DataOptions
from whale_train.launcher.study.samplers import PRUNERS, SAMPLERS, Options
from whale_train.launcher.study.settings import StudySettings
from whale_train.metrics_options import MetricOptions
from whale_train.models.options import MODEL_KEYS, LossOptions, ModelOptions
from whale_train.optimizer_options import OfClass, OptimizerOptions
from whale_train.schedule_options import ScheduleOptions
from whale_train.trackers.options import BuiltIn, OwnTrackerOptions

CONF = Path(config.__file__).parent / "conf"
_BUILT_IN_MODELS = ("gpt", "moe_gpt", "m6_base", "class_head", "image_classifier")


def key_groups() -> tuple[KeyGroup, ...]:
    """Return all keys of the config, group by group."""
    top = written_in(CONF / "config.yaml")
    groups = [
        KeyGroup("Top level", "", tuple(_top_level(top))),
        _of_class("train", "Training.", config.TrainOptions, top),
        _of_class("checkpoint", "Checkpoints and trained weights.", config.CheckpointOptions, top),
        _of_files("launcher", "Where the ranks run.", config.LauncherOptions),
        _model_group(),
        *(_built_in_model(name) for name in _BUILT_IN_MODELS),
        *(_data_group(kind) for kind in get_args(get_args(DataOptions)[0])),
        _optimizer_group(),
        KeyGroup("strategy", _ABOUT_STRATEGY, tuple(_of_fields(STRATEGY, "strategy"))),
        KeyGroup("hardware", _ABOUT_HARDWARE, tuple(_of_fields(HARDWARE, "hardware"))),
        KeyGroup("metrics", "Metrics of evaluations.", tuple(_metrics(top))),
        *_tracker_groups(top),
        KeyGroup("callbacks", "Your own code at moments of a run.", tuple(_callbacks(top))),
        _of_class("verify", "Options of `mode=verify`.", config.VerifyOptions, top),
        _of_class("audit", "Options of `mode=audit`.", config.AuditOptions, top),
        _of_class("schedule", "Options of `mode=schedule`.", ScheduleOptions, top),
        KeyGroup("hydra", _ABOUT_HYDRA, tuple(_hydra(top))),
        *_sweeper_groups(),
    ]
    return tuple(groups)


_ABOUT_STRATEGY = (
    "`strategy=NAME` is a file of `conf/strategy`; `strategy.graph` is a node or a list of nodes. "
    "A node is a mapping with one key: `replicate`, `split`, `stage` or `pipeline`."
)
_ABOUT_HARDWARE = (
    "`hardware=NAME` is a file of `conf/hardware`: `kind` alone, or `nodes` with a `network`. "
    "Devices, links and hosts are names of the catalogue, or mappings with their figures."
)
_ABOUT_HYDRA = (
    "Keys of Hydra that have another default here. Its other keys are in Hydra's documentation."
)


def _of_class(name: str, about: str, kind: type[BaseModel], written: Written) -> KeyGroup:
    return KeyGroup(name, about, tuple(keys_of(kind, f"{name}.", written)))


def _of_files(name: str, about: str, kind: type[BaseModel]) -> KeyGroup:
    """Return the keys of a group of the config, from all its files."""
    written = below(written_in(*sorted((CONF / name).glob("*.yaml"))), name)
    return KeyGroup(name, about, tuple(keys_of(kind, f"{name}.", written)))


def _top_level(written: Written) -> Iterator[Key]:
    texts = texts_of(config.Request)
    sections = ("train", "checkpoint", "verify", "audit", "hydra", "defaults", "callbacks")
    sections = (*sections, "schedule")
    for path in written:
        if "." in path or path in (*sections, "metrics", "trackers"):
            continue
        field = config.Request.model_fields.get(path)
        values = values_of(field) if field else "text or `null`"
        yield key_at(path, values, "", texts.get(path, ""), written)


def _model_group() -> KeyGroup:
    about = "Keys of every model. Further keys are the arguments of its class."
    files = [CONF / f"model/{name}.yaml" for name in ("hf", "custom")]
    written = below(written_in(*files), "model")
    rows = keys_of(ModelOptions, "model.", written)
    return KeyGroup("model", about, tuple(with_own(rows, "model.loss", LossOptions)))


def _built_in_model(name: str) -> KeyGroup:
    """Return the arguments of a built-in model, from its file."""
    about, keys = written_keys((CONF / f"model/{name}.yaml").read_text(encoding="utf-8"))
    own = {f"model.{x.path}": x for x in keys if x.path not in MODEL_KEYS}
    rows = (key_at(path, "", x.value, "", {path: [(name, x)]}) for path, x in own.items())
    return KeyGroup(f"model={name}", about, tuple(rows))


def _data_group(kind: type[BaseModel]) -> KeyGroup:
    name = kind.model_fields["kind"].default
    path = CONF / f"data/{name}.yaml"
    about, _ = written_keys(path.read_text(encoding="utf-8"))
    return KeyGroup(
        f"data={name}", about, tuple(keys_of(kind, "data.", below(written_in(path), "data")))
    )


def _optimizer_group() -> KeyGroup:
    group = _of_files("optimizer", "The optimizer and its schedule.", OptimizerOptions)
    keys = with_own(iter(group.keys), "optimizer.schedule", OfClass)
    return KeyGroup(group.title, group.about, tuple(keys))


def _of_fields(fields: tuple[FieldKey, ...], prefix: str) -> Iterator[Key]:
    """Yield keys of a grammar that is read by hand: their meanings are the docstrings' of nodes."""
    written = below(written_in(*sorted((CONF / prefix).glob("*.yaml"))), prefix)
    for field in fields:
        meaning = texts_of(field.kind).get(field.name, "")
        beside = {field.path: written[field.path]} if field.path in written else {}
        comments = {x: [(f, k) for f, k in y if k.comment] for x, y in beside.items()}
        shown = key_at(field.path, field.values, "", meaning, comments)
        yield replace(shown, default=field.default and f"`{field.default}`")


def _metrics(top: Written) -> Iterator[Key]:
    yield key_at("metrics", "a mapping or `null`", "null", "", top)
    yield from own_keys(MetricOptions, "metrics.NAME")


def _tracker_groups(top: Written) -> Iterator[KeyGroup]:
    about = "Where the curves of a run are kept too."
    own = own_keys(OwnTrackerOptions, "trackers[]")
    yield KeyGroup("trackers", about, (key_at("trackers", "a list", "[]", "", top), *own))
    for kind in get_args(BuiltIn):
        name = kind.model_fields["name"].default
        about = (kind.__doc__ or "").split("\n")[0]
        yield KeyGroup(f"trackers: {name}", about, tuple(keys_of(kind, "trackers[].", {})))


def _callbacks(top: Written) -> Iterator[Key]:
    yield from keys_of(CallbacksOptions, "callbacks.", top)
    yield from own_keys(CallbackOptions, "callbacks.NAME")


def _hydra(top: Written) -> Iterator[Key]:
    for path, given in top.items():
        if path.startswith("hydra.") and not path.startswith("hydra.help") and given[0][1].value:
            yield key_at(path, "", "", "", top)


def _sweeper_groups() -> Iterator[KeyGroup]:
    folder, prefix = CONF / "hydra/sweeper", "hydra.sweeper"
    about, _ = written_keys((folder / "optuna.yaml").read_text(encoding="utf-8"))
    written = below(written_in(folder / "optuna.yaml"), prefix)
    study = list(keys_of(StudySettings, f"{prefix}.", written))
    study.append(key_at(f"{prefix}.params", "a mapping or `null`", "null", "", written))
    yield KeyGroup("hydra/sweeper=optuna", about.partition(":")[0] + ".", tuple(study))
    kinds: tuple[tuple[str, Mapping[str, type[Options]]], ...]
    kinds = (("sampler", SAMPLERS), ("pruner", PRUNERS))
    for what, options in kinds:
        for name, kind in options.items():
            path = folder / what / f"{name}.yaml"
            about, _ = written_keys(path.read_text(encoding="utf-8"))
            keys = keys_of(kind, f"{prefix}.{what}.", below(written_in(path), f"{prefix}.{what}"))
            yield KeyGroup(f"hydra/sweeper/{what}={name}", about, tuple(keys))
