"""Read the options of the optimizer and of its schedule, without importing either.

A named optimizer is one of ours, whose keys are all known. An optimizer that is given by its class
(`_target_`) takes every key that is not defined here as an argument.
`launcher/planning/own_optimizers.py` tries such a class.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from whale_train.errors import Fault
from whale_train.own_code import PATH
from whale_train.validation import as_yaml, no_truth_value, validated

CUSTOM = "custom"  # the name of an optimizer that is given by its class
TARGET = "_target_"
_STEPS = Annotated[int, BeforeValidator(no_truth_value), Field(ge=0)]
_Decay = Annotated[float, Field(ge=0, lt=1)]
_OF_SCHEDULES = ("schedule", "warmup_steps", "decay_steps", "final_lr_fraction", "power")
OPTIMIZER_KEYS = (TARGET, "lr", "no_decay", "groups", *_OF_SCHEDULES)
_GROUP_KEYS = (TARGET, "match", "weight_decay", "lr_scale")
_UNNAMED = {TARGET, "given"}  # keys that remedies for unknown keys do not name
_POWER = 2.0  # of the schedule `polynomial`
_READ_BY = {  # the keys that some of the named optimizers read, and no others
    "sgd": ("momentum", "fused"),
    "adam": ("betas", "eps", "fused"),
    "adamw": ("betas", "eps", "fused"),
    "lamb": ("betas", "eps"),
    "lars": ("momentum", "eps", "trust_coefficient"),
}
_READER = {  # a named optimizer that reads the key
    "momentum": "sgd",
    "betas": "adamw",
    "eps": "adamw",
    "trust_coefficient": "lars",
}


class _Options(BaseModel):
    """Options that are read here. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OfClass(_Options):
    """A class that is named by its path, and the arguments of its constructor.

    target: the path of the class, or of a function that is annotated to return an object of its
        kind.
    given: the keyword arguments of the constructor.
    """

    target: str = Field(alias=TARGET, pattern=PATH)
    given: dict[str, Any] = Field(default_factory=dict)

    @property
    def class_name(self) -> str:
        """Return the name of the class without its module."""
        return self.target.rpartition(".")[2]


class GroupOptions(_Options):
    """Options of a group of parameters, an entry of `optimizer.groups`.

    match: patterns of the parameters' paths, or of modules that hold them, in which `*` stands for
        any text (`*.bias`, `lm_head`).
    weight_decay: the group's weight decay; None is the optimizer's.
    lr_scale: the group's learning rate, as a multiple of the optimizer's.
    trust_ratio: whether LARS scales the group's updates by the trust ratio.
    target: the class of the group's own optimizer; None where the group has none.
    given: the keyword arguments of the group's own optimizer.
    """

    match: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(min_length=1),
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    ]
    weight_decay: float | None = Field(None, ge=0)
    lr_scale: float = Field(1.0, gt=0)
    trust_ratio: bool = True
    target: str | None = Field(None, alias=TARGET, pattern=PATH)
    given: dict[str, Any] = Field(default_factory=dict)


ScheduleName = Literal["constant", "linear", "cosine", "polynomial", "wsd", "inverse_sqrt"]
Schedule = Annotated[
    Annotated[ScheduleName, Tag("name")] | Annotated[OfClass, Tag("class")],
    Discriminator(lambda value: "class" if isinstance(value, dict | OfClass) else "name"),
]


class OptimizerOptions(_Options):
    """Options of the optimizer, and of the schedule of its learning rate, under `optimizer`.

    name: torch's optimizer of that name, LAMB or LARS; `custom` for one that is given by its class.
    lr: the learning rate after the warm-up, before the schedule.
    weight_decay, momentum, betas, eps, fused: arguments of the named optimizers, under torch's
        names.
    trust_coefficient: the factor of the trust ratios of LARS.
    no_decay: the parameters that have no weight decay, and under LARS no trust ratio; None: all
        have them.
    groups: groups of parameters with options of their own. A parameter is of the first group that
        it matches, and `no_decay` does not apply to it.
    schedule: how the learning rate falls after the warm-up, by name or by the class of a scheduler.
    warmup_steps: number of steps of linear growth.
    decay_steps: number of steps at the end of the run in which the learning rate of `wsd` falls.
    final_lr_fraction: the learning rate of the last step, as a fraction of `lr`.
    power: the exponent of the schedule `polynomial`.
    target: the class of a custom optimizer; None for the named ones.
    given: the arguments of a custom optimizer, beside `lr`.
    """

    name: Literal["sgd", "adam", "adamw", "lamb", "lars", "custom"]
    lr: float = Field(gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    trust_coefficient: float = Field(0.001, gt=0)
    fused: bool = True
    no_decay: Literal["norms_and_biases"] | None = None
    groups: tuple[GroupOptions, ...] = ()
    schedule: Schedule = "constant"
    warmup_steps: _STEPS = 0
    decay_steps: _STEPS = 0
    final_lr_fraction: float = Field(0.0, ge=0, le=1)
    power: float = Field(_POWER, gt=0)
    target: str | None = Field(None, alias=TARGET, pattern=PATH)
    given: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_custom(self) -> bool:
        """Return whether the optimizer is given by its class."""
        return self.target is not None

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the optimizer."""
        if self.is_custom:
            return {"lr": self.lr, **self.given}
        shared: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.name == "lars":
            trust = {"trust_coefficient": self.trust_coefficient, "eps": self.eps}
            return {**shared, "momentum": self.momentum, **trust}
        if self.name != "lamb":
            shared["fused"] = self.fused
        if self.name == "sgd":
            return {**shared, "momentum": self.momentum}
        return {**shared, "betas": list(self.betas), "eps": self.eps}


def read_optimizer(section: Mapping[str, Any], faults: list[Fault]) -> OptimizerOptions | None:
    """Return the options in the section `optimizer` of a composed config, or None after adding
    faults."""
    faults_before = len(faults)
    is_custom = TARGET in section
    values = _with_arguments(section, OPTIMIZER_KEYS) if is_custom else dict(section)
    if is_custom:
        values["name"] = CUSTOM
    else:
        _refuse_own_names(section, faults)
    if isinstance(values.get("schedule"), dict):
        values["schedule"] = _with_arguments(values["schedule"], (TARGET,))
    if isinstance(values.get("groups"), list):
        values["groups"] = [
            _with_arguments(x, _GROUP_KEYS) if isinstance(x, dict) and TARGET in x else x
            for x in values["groups"]
        ]
    without = _without_effect(section)
    options: OptimizerOptions | None
    options = validated(OptimizerOptions, values, "optimizer", faults, without)
    if options is None or len(faults) > faults_before:
        return None
    _refuse_ineffective(options, faults)
    return options


def _with_arguments(section: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return a section in which all keys but `keys` are moved into `given`, the arguments of its
    class."""
    known = {key: value for key, value in section.items() if key in keys}
    return {**known, "given": {key: x for key, x in section.items() if key not in keys}}


def _refuse_own_names(section: Mapping[str, Any], faults: list[Fault]) -> None:
    """Add faults for keys of a named optimizer that only a custom optimizer has."""
    if "given" in section:
        rule, remedy = "is not a key here", "remove optimizer.given"
        faults.append(Fault("optimizer.given", as_yaml(section["given"]), rule, remedy))
    if section.get("name") == CUSTOM:
        rule, remedy = "names no optimizer", "write optimizer._target_=package.module.Class"
        faults.append(Fault("optimizer.name", CUSTOM, rule, remedy))


def _without_effect(section: Mapping[str, Any]) -> set[str]:
    """Return the keys that the chosen optimizer does not read."""
    if TARGET in section:
        return {*OptimizerOptions.model_fields, *_UNNAMED} - set(OPTIMIZER_KEYS)
    read = _READ_BY.get(str(section.get("name")), _READ_BY["adamw"])
    return {"name", *({"fused", *_READER} - set(read)), *_UNNAMED}


def _refuse_ineffective(optimizer: OptimizerOptions, faults: list[Fault]) -> None:
    """Add a fault for each setting that the chosen optimizer or schedule does not read."""
    name = optimizer.name
    read = _READ_BY.get(name, tuple(_READER))
    if name in ("lamb", "lars") and "fused" in optimizer.model_fields_set:
        rule, remedy = f"has no effect on {name}, which has no fused kernel", "leave it out"
        faults.append(Fault("optimizer.fused", as_yaml(optimizer.fused), rule, remedy))
    for key, reader in _READER.items():
        value = getattr(optimizer, key)
        if key not in read and key in optimizer.model_fields_set and value:
            rule = f"has no effect on {name}"
            remedy = f"use optimizer={reader}, or leave it out"
            shown = as_yaml(list(value) if key == "betas" else value)
            faults.append(Fault(f"optimizer.{key}", shown, rule, remedy))
    _refuse_options_of_groups(optimizer, faults)
    _refuse_ineffective_schedule(optimizer, faults)


def _refuse_options_of_groups(optimizer: OptimizerOptions, faults: list[Fault]) -> None:
    """Add a fault for each group with a class where the optimizer is a named one, with a trust
    ratio where the optimizer is not LARS, or with `lr` instead of `lr_scale`."""
    for number, group in enumerate(optimizer.groups):
        key = f"optimizer.groups[{number}]"
        if group.target is not None and not optimizer.is_custom:
            own = {"sgd": "torch.optim.SGD", "adam": "torch.optim.Adam"}.get(optimizer.name)
            rule = f"is a class beside optimizer={optimizer.name}, which is none"
            remedy = f"use optimizer._target_={own or 'torch.optim.AdamW'} as well"
            faults.append(Fault(f"{key}.{TARGET}", group.target, rule, remedy))
        if "trust_ratio" in group.model_fields_set and optimizer.name != "lars":
            rule = f"has no effect on {optimizer.name}"
            remedy = "use optimizer=lars, or leave it out"
            faults.append(Fault(f"{key}.trust_ratio", as_yaml(group.trust_ratio), rule, remedy))
        if "lr" in group.given:
            rule, value = "is given as a part of optimizer.lr", group.given["lr"]
            fits = isinstance(value, int | float) and value > 0
            remedy = f"use lr_scale: {value / optimizer.lr:g}" if fits else "use lr_scale"
            faults.append(Fault(f"{key}.lr", as_yaml(value), rule, remedy))


def _refuse_ineffective_schedule(optimizer: OptimizerOptions, faults: list[Fault]) -> None:
    """Add a fault for each setting that the chosen schedule does not read, or that it lacks."""
    schedule = optimizer.schedule
    if isinstance(schedule, OfClass):
        named = schedule.class_name
        for key in ("final_lr_fraction", "decay_steps"):
            if value := getattr(optimizer, key):
                rule, remedy = f"has no effect on optimizer.schedule._target_ ({named})", "use 0"
                faults.append(Fault(f"optimizer.{key}", as_yaml(value), rule, remedy))
        _refuse_power(optimizer, named, faults)
        return
    if schedule in ("constant", "inverse_sqrt") and optimizer.final_lr_fraction:
        value = as_yaml(optimizer.final_lr_fraction)
        named = {"constant": "a constant", "inverse_sqrt": "an inverse_sqrt"}[schedule]
        rule, remedy = f"has no effect on {named} schedule", "use linear or cosine, or 0"
        faults.append(Fault("optimizer.final_lr_fraction", value, rule, remedy))
    if schedule != "polynomial":
        _refuse_power(optimizer, schedule, faults)
    if optimizer.decay_steps and schedule != "wsd":
        rule = f"has no effect on optimizer.schedule={schedule}"
        remedy = "use optimizer.schedule=wsd, or 0"
        faults.append(Fault("optimizer.decay_steps", str(optimizer.decay_steps), rule, remedy))
    if schedule == "wsd" and not optimizer.decay_steps:
        rule = "needs the number of its last steps, in which the learning rate falls"
        remedy = "use optimizer.decay_steps=100, or the like"
        faults.append(Fault("optimizer.schedule", "wsd", rule, remedy))


def _refuse_power(optimizer: OptimizerOptions, schedule: str, faults: list[Fault]) -> None:
    """Add a fault for a `power` beside `schedule`, which has none."""
    if optimizer.power != _POWER:
        rule = f"has no effect on optimizer.schedule={schedule}"
        remedy = f"use optimizer.schedule=polynomial, or {_POWER:g}"
        faults.append(Fault("optimizer.power", as_yaml(optimizer.power), rule, remedy))


def refuse_long_schedule(optimizer: OptimizerOptions, steps: int, faults: list[Fault]) -> None:
    """Add a fault where `decay_steps` of `wsd` is more than the steps after the warm-up."""
    left = steps - optimizer.warmup_steps
    if optimizer.schedule == "wsd" and optimizer.decay_steps > max(left, 0):
        rule = f"is more than the steps after the warm-up ({max(left, 0)})"
        remedy = f"use at most {left}" if left > 0 else "use a shorter optimizer.warmup_steps"
        faults.append(Fault("optimizer.decay_steps", str(optimizer.decay_steps), rule, remedy))
