"""Read the composed config into a Request, validated whole.

All code behind this file reads the Request, and no DictConfig. Sections that other packages own
(the model, the data, the strategy, the hardware) are read by those. Here they are put together, and
all faults of all sections are raised at once.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from whale_train.data.open import DataOptions
from whale_train.errors import ConfigError, Fault, nearest
from whale_train.models.options import ModelOptions
from whale_train.other_trainers import known_elsewhere
from whale_train.strategies.grammar.nodes import MOST_MICRO_BATCHES, Strategy, read_strategy
from whale_train.strategies.plan.plan import Decision
from whale_train.validation import DURATION, as_yaml, no_truth_value, validated

_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
PLATEAU = "plateau"  # a value of train.delink_at
AUTO = "auto"  # a value of train.resume: the newest checkpoint of this run's own directory
Ranks = bool | Literal["all"] | tuple[Annotated[int, Field(strict=True, ge=0)], ...]
Mode = Literal["train", "plan", "rehearse", "verify", "calibrate", "export", "audit"]
_Whole = Annotated[int, BeforeValidator(no_truth_value)]
_Count = Annotated[_Whole, Field(ge=1)]
_RunPath = Annotated[str, Field(min_length=1)] | None
_Decay = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[_Whole, Field(ge=0, lt=2**63)]


class _Section(BaseModel):
    """A section of the config that is read here. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TrainOptions(_Section):
    """Options of training, under `train`.

    steps: number of optimizer steps.
    global_batch: samples of a step, of all devices together.
    accumulate: number of micro-batches in which every device takes its share of a step.
    precision: the precision of training; None lets the devices decide.
    loss_scale: the first loss scale of fp16; None is 2^15.
    tf32: whether GPUs round the factors of fp32 products to 10 bits.
    reduce_dtype: the dtype in which copies exchange gradients, the precision of the run or fp32.
    grad_clip: the gradient norm to clip to; None and 0 are off.
    grad_norm: whether the gradient norm is measured in every step.
    trace: whether the run writes a timeline of what every rank did.
    compile: whether blocks run what torch.compile makes of them.
    profile: the first and the last step that torch's profiler records.
    evaluate_every: number of steps between evaluations; None is never.
    evaluation_samples: the largest number of samples of an evaluation.
    tensorboard: whether metrics are also written for TensorBoard.
    on_nan: what becomes of a run whose loss or gradient norm is not finite; None goes on. A step
        that it skips leaves everything as it was, the learning rate's schedule too, and a hundred
        of them in a row end the run.
    resume: the checkpoint that training goes on from, a run directory (its newest), or `auto` (the
        newest of this run's own directory).
    resume_data: whether a run goes on with the `same` data alone, or with `any`, which begins with
        its first sample where it is other data.
    delink_at: the step after which layers that shared their weights (`model.share_layers`) go on by
        themselves, or `plateau`, once the loss has stopped falling.
    router_bias_rate: how far the biases by which routers choose experts move after every step,
        towards equal loads; None is never.
    """

    steps: _Count
    global_batch: _Count
    accumulate: Annotated[_Whole, Field(ge=1, le=MOST_MICRO_BATCHES)] = 1
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    loss_scale: float | None = Field(None, ge=1)
    tf32: bool = False
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    grad_clip: float | None = Field(None, ge=0)
    grad_norm: bool = True
    trace: bool = False
    compile: bool = False
    profile: tuple[_Count, _Count] | None = None
    evaluate_every: _Count | None = None
    evaluation_samples: _Count = 512
    tensorboard: bool = False
    on_nan: Literal["stop", "skip"] | None = "stop"
    resume: str | None = Field(None, min_length=1)
    resume_data: Literal["same", "any"] = "same"
    delink_at: _Count | Literal["plateau"] | None = None
    router_bias_rate: float | None = Field(None, gt=0)


class GroupOptions(_Section):
    """Options of a group of parameters, an entry of `optimizer.groups`.

    match: patterns of the parameters' paths, or of modules that hold them, in which `*` stands for
        any text (`*.bias`, `lm_head`).
    weight_decay: the group's weight decay; None is the optimizer's.
    lr_scale: the group's learning rate, as a part of the optimizer's.
    """

    match: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        Field(min_length=1),
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    ]
    weight_decay: float | None = Field(None, ge=0)
    lr_scale: float = Field(1.0, gt=0)


class OptimizerOptions(_Section):
    """Options of the optimizer, and of the schedule of its learning rate, under `optimizer`.

    name: torch's optimizer of that name, or LAMB.
    lr: the learning rate after the warm-up.
    weight_decay, momentum, betas, eps, fused: arguments of the optimizer, under torch's names.
    no_decay: the parameters that have no weight decay; None is none of them.
    groups: groups of parameters with options of their own. A parameter is of the first group that
        it matches, and then `no_decay` is not about it.
    schedule: how the learning rate falls after the warm-up.
    warmup_steps: number of steps of linear growth.
    decay_steps: number of the last steps, in which the learning rate of `wsd` falls.
    final_lr_fraction: the part of `lr` that is left at the last step.
    """

    name: Literal["sgd", "adam", "adamw", "lamb"]
    lr: float = Field(gt=0)
    weight_decay: float = Field(0.0, ge=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    fused: bool = True
    no_decay: Literal["norms_and_biases"] | None = None
    groups: tuple[GroupOptions, ...] = ()
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "constant"
    warmup_steps: Annotated[_Whole, Field(ge=0)] = 0
    decay_steps: Annotated[_Whole, Field(ge=0)] = 0
    final_lr_fraction: float = Field(0.0, ge=0, le=1)

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of the optimizer."""
        shared: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.name != "lamb":
            shared["fused"] = self.fused
        if self.name == "sgd":
            return {**shared, "momentum": self.momentum}
        return {**shared, "betas": list(self.betas), "eps": self.eps}


class LauncherOptions(_Section):
    """Options that say where the ranks run, under `launcher`.

    kind: how the ranks are started. `ssh` starts them on `hosts`; `slurm` submits the job; `local`
        and `emulate` start them here, on the devices or on CPU processes that stand for them;
        `auto` chooses one of these two.
    hosts: the hosts of `ssh`.
    python: the path of Python on the hosts of `ssh`.
    nodes: number of nodes of `slurm`; None takes that of the inventory.
    ranks_per_node: number of ranks on each node of `slurm`; None takes that of the inventory.
    wait: whether the command waits for the end of the job of `slurm`.
    sbatch: further options of sbatch.
    threads: number of threads of each rank; None shares the cores among the ranks.
    timeout_s: seconds after which a rank that waits for others fails, naming those that did not
        come.
    max_restarts: how often a job goes on from its newest checkpoint after a rank or a host has
        died.
    device_speed: whether ranks that stand for devices are slowed to their device's speed, relative
        to the fastest.
    link_speed: whether their links are slowed to their relative bandwidth.
    """

    kind: Literal["auto", "local", "emulate", "ssh", "slurm"] = "auto"
    hosts: tuple[Annotated[str, Field(min_length=1, pattern=r"^[^-\s]\S*$")], ...] = ()
    python: str | None = Field(None, min_length=1)
    nodes: _Count | None = None
    ranks_per_node: _Count | None = None
    wait: bool = True
    sbatch: Mapping[str, str | int | float | bool] = Field(default_factory=dict)
    threads: _Count | None = None
    # gloo adds the timeout to a clock, in 64-bit nanoseconds, which overflow after 292 years.
    timeout_s: float = Field(1800.0, gt=0, le=1e9)
    max_restarts: Annotated[_Whole, Field(ge=0)] = 0
    device_speed: bool = False
    link_speed: bool = False


class CheckpointOptions(_Section):
    """Options of checkpoints, under `checkpoint`.

    path: the checkpoint, or the run directory (its newest), that `mode=export` reads.
    every: number of optimizer steps between checkpoints, or a time such as "30min"; None writes
        none.
    grace_s: seconds that a run has to save once more when it is told to end.
    keep: number of the newest checkpoints that stay; None keeps all.
    asynchronous: whether checkpoints are written beside the steps that follow, or before them. It
        is `async` in the config.
    final: whether the run ends with the trained weights in its directory.
    """

    path: str | None = Field(None, min_length=1)
    every: _Count | Annotated[str, Field(pattern=DURATION)] | None = None
    grace_s: float = Field(30.0, ge=0)
    keep: _Count | None = None
    asynchronous: bool = Field(True, alias="async")
    final: bool = True

    @property
    def every_steps(self) -> int | None:
        """Return the number of steps between checkpoints, or None where there are none or a clock
        decides."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_s(self) -> float | None:
        """Return the seconds between checkpoints, or None where there are none or steps decide."""
        if not isinstance(self.every, str):
            return None
        unit = next(unit for unit in ("min", "s", "h") if self.every.endswith(unit))
        return float(self.every.removesuffix(unit)) * _UNITS_S[unit]


class VerifyOptions(_Section):
    """Options of `mode=verify`, under `verify`.

    steps: number of the run's first steps that are compared.
    tolerance: the allowed difference, relative to the largest element of what is compared; None
        lets the precision decide.
    """

    steps: _Count = 3
    tolerance: float | None = Field(None, gt=0)


class AuditOptions(_Section):
    """Options of `mode=audit`, under `audit`.

    step: the step of which it is shown which device took which samples; None is none.
    """

    step: _Count | None = None


class Request(BaseModel):
    """All options that a user asked for, checked.

    mode: what the command does.
    compare: names of the strategies that `mode=plan` shows side by side.
    seed: the seed of weights, data order and dropout.
    names: the option chosen in each config group.
    strategy, hardware: sections as written. The packages that own them read them against something
        else: the strategy into nodes, the hardware against this machine.
    model, data, optimizer, launcher, train, verify, checkpoint: the sections of these names.
    rehearse: the ranks that are rehearsed: none (False), one of each kind (True), `all`, or a tuple
        of ranks.
    files: the plan's notes about the user's own config files that have the names of built-in ones.
    run: the run directory that `mode=audit` reads.
    audit: the section of this name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode
    compare: tuple[str, ...] = ()
    seed: Seed
    names: dict[str, str]
    model: ModelOptions
    strategy: dict[str, Any]
    hardware: dict[str, Any]
    data: DataOptions
    optimizer: OptimizerOptions
    launcher: LauncherOptions
    train: TrainOptions
    verify: VerifyOptions = VerifyOptions()
    checkpoint: CheckpointOptions = CheckpointOptions()
    rehearse: Ranks = False
    files: tuple[Decision, ...] = ()
    run: str | None = None
    audit: AuditOptions = AuditOptions()

    def to_json(self) -> str:
        """Return the request as JSON, as `request.json` has it."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Return the request of a text of `to_json`. Raises ValueError where it is none."""
        return cls.model_validate_json(text)

    @property
    def is_pseudo(self) -> bool:
        """Return whether layers share their weights for a time, and are to part later
        (Pseudo-to-Real)."""
        return self.model.share_layers and self.train.delink_at is not None

    def strategy_graph(self) -> Strategy:
        """Return the nodes of the strategy. It was read without faults when the request was
        read."""
        faults: list[Fault] = []
        strategy = read_strategy(self.strategy, self.names.get("strategy", "strategy"), faults)
        assert strategy is not None, faults
        return strategy


def read_request(
    config: DictConfig, names: Mapping[str, str], files: tuple[Decision, ...] = ()
) -> Request:
    """Return the Request of a composed config. Raises ConfigError with all faults.

    config: the composed config, without Hydra's own part.
    names: Hydra's choices, group by group, which name things in messages and plans.
    files: the plan's notes about the user's own config files.
    """
    plain = _plain(config)
    faults: list[Fault] = []
    sections: dict[str, Any] = {"names": dict(names), "files": files}
    try:
        model = _mapping(plain, "model", faults)
        sections["model"] = None if model is None else ModelOptions.from_mapping(model)
    except ConfigError as error:
        faults += error.faults
    strategy = sections["strategy"] = _mapping(plain, "strategy", faults)
    if strategy is not None:
        read_strategy(strategy, names.get("strategy", "strategy"), faults)
    sections["hardware"] = _mapping(plain, "hardware", faults)
    for key, kind in (
        ("data", DataOptions),
        ("optimizer", OptimizerOptions),
        ("launcher", LauncherOptions),
        ("train", TrainOptions),
        ("verify", VerifyOptions),
        ("checkpoint", CheckpointOptions),
        ("audit", AuditOptions),
    ):
        given = plain.get(key)
        if key == "checkpoint" and isinstance(given, str):  # as in mode=export checkpoint=PATH
            plain[key] = {"path": given}
        section = _mapping(plain, key, faults)
        if section is not None:
            sections[key] = validated(kind, section, key, faults, _without_effect(key, section))
    sections["mode"] = validated(Mode, plain.get("mode"), "mode", faults)
    sections["run"] = validated(_RunPath, plain.get("run"), "run", faults)
    sections["seed"] = validated(Seed, plain.get("seed"), "seed", faults)
    sections["compare"] = _compared(plain.get("compare") or [], sections["mode"], faults)
    sections["rehearse"] = _rehearsed(plain.get("rehearse", False), sections["mode"], faults)
    known = set(Request.model_fields) - {"names", "files"}
    for key in plain:
        if key not in known:
            instead = known_elsewhere(key)
            remedy = nearest(key, known) if instead is None else instead.remedy
            faults.append(Fault(str(key), "", "is not a key of the config", remedy))
    _refuse_together(sections, faults)
    if faults:
        raise ConfigError(faults)
    return Request.model_construct(**sections)


def in_mode(request: Request, mode: Mode) -> Request:
    """Return a request in another mode. Raises ConfigError for values that are wrong or without
    effect there."""
    faults: list[Fault] = []
    sections = {name: getattr(request, name) for name in Request.model_fields} | {"mode": mode}
    _compared(list(request.compare), mode, faults)
    _rehearsed(request.rehearse, mode, faults)
    _refuse_together(sections, faults)
    if faults:
        raise ConfigError(faults)
    return request.model_copy(update={"mode": mode})


def _without_effect(key: str, section: Mapping[str, Any]) -> set[str]:
    """Return the options of a section that the chosen optimizer or launcher does not read."""
    if key == "optimizer":
        sgd, lamb = (section.get("name") == name for name in ("sgd", "lamb"))
        others = {"betas", "eps"} if sgd else {"momentum"}
        return {"name", *others, *(["fused"] if lamb else [])}
    if key == "launcher":
        of_kinds = {"ssh": {"hosts", "python"}, "slurm": {"nodes", "ranks_per_node", "wait"}}
        of_kinds["slurm"].add("sbatch")
        of_others = {"slurm": {"max_restarts"}}.get(str(section.get("kind")), set[str]())
        kinds = (names for kind, names in of_kinds.items() if kind != section.get("kind"))
        return of_others.union(*kinds)
    return {"path"} if key == "checkpoint" else set()


def _compared(value: object, mode: object, faults: list[Fault]) -> tuple[str, ...]:
    """Return the names of the strategies to compare. Adds a fault for a value that is no list of
    names, and for a mode that compares nothing."""
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        remedy = "list names of strategies, as in compare=[dp,zero3]"
        faults.append(Fault("compare", as_yaml(value), "is not a list of names", remedy))
        return ()
    if names and mode not in ("plan", None):
        rule = f"has no effect on mode={mode}"
        faults.append(Fault("compare", as_yaml(names), rule, "use mode=plan, or compare=[]"))
    return tuple(dict.fromkeys(names))


def _rehearsed(value: object, mode: object, faults: list[Fault]) -> object:
    """Return the ranks to rehearse, as in `Request.rehearse`. Adds a fault for a value that names
    none."""
    asked: object = tuple(value) if isinstance(value, list) else value
    ranks = asked if isinstance(asked, tuple) else ()
    are_ranks = all(type(rank) is int and rank >= 0 for rank in ranks)
    if not (isinstance(asked, bool) or asked == "all" or (ranks and are_ranks)):
        rule = "is not true, false, all, or a list of ranks"
        faults.append(Fault("rehearse", as_yaml(value), rule, "use true, all, or as [0, 3]"))
        return False
    if asked and mode not in ("plan", "rehearse", None):
        rule = f"has no effect on mode={mode}"
        remedy = "use mode=plan or mode=rehearse, or rehearse=false"
        faults.append(Fault("rehearse", as_yaml(value), rule, remedy))
    return asked


def _plain(config: DictConfig) -> dict[str, Any]:
    """Return the config as plain values, with interpolations resolved. Raises ConfigError for an
    interpolation that cannot be resolved."""
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        rule = f"cannot be resolved ({str(error).splitlines()[0]})"
        remedy = "give it a value, or point it at a key that exists"
        raise ConfigError([Fault(error.full_key or "config", "", rule, remedy)]) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _mapping(plain: Mapping[str, Any], key: str, faults: list[Fault]) -> dict[str, Any] | None:
    """Return a section of the config, or None after adding a fault where it is not a mapping."""
    value = plain.get(key)
    if isinstance(value, dict):
        return {str(name): item for name, item in value.items()}
    groupless = key in ("train", "verify", "checkpoint", "audit")
    remedy = f"use {key}.KEY=VALUE" if groupless else f"use {key}=NAME or {key}.KEY=VALUE"
    faults.append(Fault(key, as_yaml(value), "is not a mapping", remedy))
    return None


def _refuse_together(sections: Mapping[str, Any], faults: list[Fault]) -> None:
    """Add faults for values that are wrong or without effect because of other values."""
    train, verify = sections.get("train"), sections.get("verify")
    if sections.get("mode") == "verify" and isinstance(verify, VerifyOptions):
        _refuse_steps(verify, train, faults)
    if isinstance(train, TrainOptions):
        _refuse_loss_scale(train, faults)
        _refuse_tf32(train, faults)
        _refuse_profile(train, sections.get("mode"), faults)
        _refuse_delinking(train, sections.get("model"), sections.get("mode"), faults)
        if train.grad_clip and not train.grad_norm:
            rule = "is off, and train.grad_clip needs the gradient's norm"
            faults.append(Fault("train.grad_norm", "false", rule, "use train.grad_norm=true"))
        _refuse_resume_data(train, faults)
    _refuse_run(sections.get("run"), sections.get("audit"), sections.get("mode"), faults)
    launcher, checkpoint = sections.get("launcher"), sections.get("checkpoint")
    if isinstance(checkpoint, CheckpointOptions):
        _refuse_path(checkpoint, sections.get("mode"), faults)
    if isinstance(launcher, LauncherOptions) and isinstance(checkpoint, CheckpointOptions):
        if launcher.kind == "ssh" and not launcher.hosts:
            remedy = "name them, as launcher.hosts=[gpu1,gpu2]"
            faults.append(Fault("launcher.hosts", "[]", "names no host to start ranks on", remedy))
        restarts = launcher.max_restarts
        if restarts and checkpoint.every is None:
            rule = "starts again what nothing is saved of (checkpoint.every=null)"
            remedy = "set checkpoint.every, as checkpoint.every=10min"
            faults.append(Fault("launcher.max_restarts", str(restarts), rule, remedy))
    optimizer = sections.get("optimizer")
    if isinstance(optimizer, OptimizerOptions):
        _refuse_ineffective(optimizer, faults)
        if isinstance(train, TrainOptions):
            _refuse_long_schedule(optimizer, train.steps, faults)


def _refuse_path(checkpoint: CheckpointOptions, mode: object, faults: list[Fault]) -> None:
    """Add a fault for an export without a checkpoint, and for a checkpoint that the mode does not
    read."""
    if mode == "export" and checkpoint.path is None:
        remedy = "name a run directory or a checkpoint in one, as checkpoint=runs/MY_RUN"
        faults.append(Fault("checkpoint", "", "must be given to mode=export", remedy))
    if mode != "export" and mode is not None and checkpoint.path is not None:
        rule, remedy = f"has no effect on mode={mode}", "go on from it by train.resume=PATH"
        faults.append(Fault("checkpoint.path", checkpoint.path, rule, remedy))


def _refuse_run(run: object, audit: object, mode: object, faults: list[Fault]) -> None:
    """Add a fault for an audit of no run, and for a run or a step that the mode does not audit."""
    if mode == "audit" and run is None:
        remedy = "name a run directory, as run=runs/MY_RUN"
        faults.append(Fault("run", "", "must be given to mode=audit", remedy))
    if mode in ("audit", None):
        return
    rule = f"has no effect on mode={mode}"
    if run is not None:
        faults.append(Fault("run", str(run), rule, "use mode=audit, or leave it out"))
    if isinstance(audit, AuditOptions) and audit.step is not None:
        faults.append(Fault("audit.step", str(audit.step), rule, "use mode=audit, or null"))


def _refuse_profile(train: TrainOptions, mode: object, faults: list[Fault]) -> None:
    """Add a fault for profiled steps that the run does not have, and for a mode without a run."""
    if train.profile is None:
        return
    first, last = train.profile
    value, rule = as_yaml([first, last]), ""
    if first > last or last > train.steps:
        rule = f"is not a first and a last step of the run (train.steps={train.steps})"
    elif mode not in ("train", None):
        rule = f"has no effect on mode={mode}"
    if rule:
        remedy = "use two steps in order, as train.profile=[10,13], or null"
        faults.append(Fault("train.profile", value, rule, remedy))


def _refuse_resume_data(train: TrainOptions, faults: list[Fault]) -> None:
    """Add a fault where other data is allowed and the run goes on from no checkpoint."""
    if train.resume_data == "any" and train.resume is None:
        rule = "has no effect on a run that goes on from no checkpoint (train.resume=null)"
        faults.append(Fault("train.resume_data", "any", rule, "leave it out, or set train.resume"))


def _refuse_delinking(
    train: TrainOptions, model: ModelOptions | None, mode: object, faults: list[Fault]
) -> None:
    """Add a fault for layers to part that share nothing, or that would not part before the end."""
    if train.delink_at is None:
        return
    rule, remedy = "", f"use a step before the last, or {PLATEAU}"
    if model is not None and not model.share_layers:
        rule = "parts layers that share no weights (model.share_layers=false)"
        remedy = "use model.share_layers=true, or null"
    elif isinstance(train.delink_at, int) and train.delink_at >= train.steps:
        rule = f"is not before the end of the run (train.steps={train.steps})"
    elif mode not in ("train", "plan", None):
        rule, remedy = f"has no effect on mode={mode}", "use null"
    if rule:
        faults.append(Fault("train.delink_at", as_yaml(train.delink_at), rule, remedy))


def _refuse_loss_scale(train: TrainOptions, faults: list[Fault]) -> None:
    """Add faults for fp16, or for skipped steps, without the gradient norm, and for a loss scale in
    another precision."""
    if train.precision == "fp16" and not train.grad_norm:
        rule = "is off, and train.precision=fp16 finds overflow by the gradient's norm"
        faults.append(Fault("train.grad_norm", "false", rule, "use train.grad_norm=true"))
    if train.on_nan == "skip" and not train.grad_norm and train.precision != "fp16":
        rule = "is off, and train.on_nan=skip finds bad steps by the gradient's norm"
        faults.append(Fault("train.grad_norm", "false", rule, "use train.grad_norm=true"))
    if train.precision != "fp16" and train.loss_scale is not None:
        rule = f"has no effect on train.precision={train.precision or 'fp32'}"
        remedy = "use train.precision=fp16, or null"
        faults.append(Fault("train.loss_scale", as_yaml(train.loss_scale), rule, remedy))


def _refuse_tf32(train: TrainOptions, faults: list[Fault]) -> None:
    """Add a fault for TF32 where products have factors of 16 bits."""
    if train.tf32 and train.precision in ("bf16", "fp16"):
        rule = f"has no effect on train.precision={train.precision}"
        faults.append(Fault("train.tf32", "true", rule, "use train.precision=fp32, or false"))


def _refuse_steps(verify: VerifyOptions, train: object, faults: list[Fault]) -> None:
    """Add a fault where more steps are to be verified than the run has.

    A verification takes the first steps of a run, at that run's learning rates.
    """
    if isinstance(train, TrainOptions) and verify.steps > train.steps:
        rule = f"is more than the run has (train.steps={train.steps})"
        faults.append(Fault("verify.steps", str(verify.steps), rule, f"use at most {train.steps}"))


def _refuse_ineffective(optimizer: OptimizerOptions, faults: list[Fault]) -> None:
    """Add a fault for each setting that the chosen optimizer or schedule does not read."""
    if optimizer.name == "lamb" and "fused" in optimizer.model_fields_set:
        rule, remedy = "has no effect on lamb, which has no fused kernel", "leave it out"
        faults.append(Fault("optimizer.fused", as_yaml(optimizer.fused), rule, remedy))
    sgd = optimizer.name == "sgd"
    for key in ("betas", "eps") if sgd else ("momentum",):
        value = getattr(optimizer, key)
        if key in optimizer.model_fields_set and value:
            rule = f"has no effect on {optimizer.name}"
            remedy = f"use optimizer={'adamw' if sgd else 'sgd'}, or leave it out"
            shown = as_yaml(list(value) if key == "betas" else value)
            faults.append(Fault(f"optimizer.{key}", shown, rule, remedy))
    if optimizer.schedule in ("constant", "inverse_sqrt") and optimizer.final_lr_fraction:
        value = as_yaml(optimizer.final_lr_fraction)
        named = {"constant": "a constant", "inverse_sqrt": "an inverse_sqrt"}[optimizer.schedule]
        rule, remedy = f"has no effect on {named} schedule", "use linear or cosine, or 0"
        faults.append(Fault("optimizer.final_lr_fraction", value, rule, remedy))
    if optimizer.decay_steps and optimizer.schedule != "wsd":
        rule = f"has no effect on optimizer.schedule={optimizer.schedule}"
        remedy = "use optimizer.schedule=wsd, or 0"
        faults.append(Fault("optimizer.decay_steps", str(optimizer.decay_steps), rule, remedy))
    if optimizer.schedule == "wsd" and not optimizer.decay_steps:
        rule = "needs the number of its last steps, in which the learning rate falls"
        remedy = "use optimizer.decay_steps=100, or the like"
        faults.append(Fault("optimizer.schedule", "wsd", rule, remedy))


def _refuse_long_schedule(optimizer: OptimizerOptions, steps: int, faults: list[Fault]) -> None:
    """Add a fault where the learning rate falls in more steps than the warm-up leaves."""
    left = steps - optimizer.warmup_steps
    if optimizer.schedule == "wsd" and optimizer.decay_steps > max(left, 0):
        rule = f"is more than the steps after the warm-up ({max(left, 0)})"
        remedy = f"use at most {left}" if left > 0 else "use a shorter optimizer.warmup_steps"
        faults.append(Fault("optimizer.decay_steps", str(optimizer.decay_steps), rule, remedy))
