"""Read the composed config into a validated Request.

All later code reads the Request, and no DictConfig. The packages that own a section (the model, the
data, the strategy, the hardware) read it themselves. Here the sections are put together, and all
faults of all sections are raised at once.
"""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from whale_train.callbacks.options import CallbacksOptions, read_callbacks
from whale_train.checkpoints.url_path import is_url
from whale_train.data.open import DataOptions
from whale_train.errors import ConfigError, Fault, nearest
from whale_train.metrics_options import MetricOptions, read_metrics
from whale_train.models.options import ModelOptions
from whale_train.optimizer_options import (
    OptimizerOptions,
    read_optimizer,
    refuse_long_schedule,
)
from whale_train.other_trainers import known_elsewhere
from whale_train.schedule_options import ScheduleOptions
from whale_train.strategies.grammar.nodes import MOST_MICRO_BATCHES, Strategy, read_strategy
from whale_train.strategies.plan.plan import Decision
from whale_train.trackers.options import TrackerOptions, read_trackers
from whale_train.validation import DURATION, HOST, as_yaml, no_truth_value, validated

_UNITS_S = {"s": 1.0, "min": 60.0, "h": 3600.0}
PLATEAU = "plateau"  # a value of train.delink_at
GOING_ON = ("train", "plan")  # modes in which train.resume has an effect, or may stand
AUTO = "auto"  # a value of train.resume: the newest checkpoint of this run's own directory
Ranks = bool | Literal["all"] | tuple[Annotated[int, Field(strict=True, ge=0)], ...]
Mode = Literal[
    "train", "plan", "rehearse", "verify", "calibrate", "export", "evaluate", "predict", "audit",
    "view", "schedule",
]  # fmt: skip
EVALUATING = ("evaluate", "predict")  # modes that take no steps from a checkpoint
READING = ("export", *EVALUATING)  # modes that read a checkpoint
_Whole = Annotated[int, BeforeValidator(no_truth_value)]
_Count = Annotated[_Whole, Field(ge=1)]
_RunPath = Annotated[str, Field(min_length=1)] | None
Seed = Annotated[_Whole, Field(ge=0, lt=2**63)]


class _Section(BaseModel):
    """A section of the config that this module reads. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WatchedMetric(_Section):
    """A result of evaluations that decides about the run.

    metric: the name of the result in `metrics.jsonl`, as `evaluation_loss`.
    better: which values are better; None: lower ones of a loss, else higher ones.
    """

    metric: Annotated[str, Field(min_length=1)]
    better: Literal["lower", "higher"] | None = None

    @property
    def is_lower(self) -> bool:
        """Return whether lower values are better."""
        return self.better == "lower" or (self.better is None and self.metric.endswith("_loss"))


class StopAfterOptions(WatchedMetric):
    """Options of early stopping, under `train.stop_after`.

    evaluations: number of evaluations in a row without a better value after which the run ends.
    min_change: a value is better only where it differs from the best by more than this.
    """

    evaluations: _Count
    min_change: float = Field(0.0, ge=0)


class TrainOptions(_Section):
    """Options of training, under `train`.

    steps: number of optimizer steps; follows from `epochs` where that is given.
    epochs: passes over the data, in place of a number of steps; may be a fraction.
    global_batch: samples of a step, of all devices together.
    accumulate: number of gradient accumulation steps: micro-batches of every device in a step.
    precision: the precision of training; None lets the devices decide. `fp8` is bf16 in which
        linear layers round the factors of their products to 8 bits.
    loss_scale: the first loss scale of fp16; None is 2^15.
    loss_scale_fixed: whether the loss scale stays as it is. A step that overflows is still skipped.
    tf32: whether GPUs round the factors of fp32 products to 10 bits of mantissa.
    reduce_dtype: the dtype in which replicas exchange gradients: the precision of the run (of fp8,
        bf16), or fp32.
    all_reduce: how replicas on several hosts sum gradients: `flat`, in one all-reduce;
        `hierarchical`, inside each host first; `auto` is the faster one as planned.
    bucket_mb: MiB of fp32 gradients that replicas sum together.
    grad_clip: the gradient norm to clip to; None and 0 are off.
    grad_norm: whether the gradient norm is measured in every step.
    trace: whether the run writes a timeline of what every rank did.
    report: whether the run ends with a page about it, `report.html`.
    parameters_sha256: whether every line of `metrics.jsonl` has the SHA-256 of the parameters after
        its step.
    compile: whether blocks are compiled by torch.compile.
    profile: the first and the last step that torch's profiler records.
    evaluate_every: number of steps between evaluations; None is never.
    evaluation_samples: the largest number of samples of an evaluation.
    stop_after: the metric that ends the run early, once it stops improving; None ends the run after
        its last step.
    tensorboard: whether TensorBoard is among the trackers.
    on_nan: what a loss or gradient norm that is not finite does: `stop` the run, `skip` the step,
        or None, which goes on. A skipped step changes nothing, not even the learning rate's
        schedule; a hundred skipped steps in a row end the run.
    resume: the path or URL of the checkpoint to resume from, or of a run (its newest checkpoint),
        or `auto` (the newest of this run's own directory, or of `checkpoint.to`).
    resume_data: whether a run resumes with the `same` data alone, or with `any`; other data begins
        with its first sample.
    delink_at: the step after which layers that share their weights (`model.share_layers`) get
        weights of their own, or `plateau`: once the loss has stopped falling.
    router_bias_rate: how far the biases of routers move after every step, towards equal loads of
        the experts; None is never.
    """

    steps: _Count = 100
    epochs: float | None = Field(None, gt=0)
    global_batch: _Count
    accumulate: Annotated[_Whole, Field(ge=1, le=MOST_MICRO_BATCHES)] = 1
    precision: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    loss_scale: float | None = Field(None, ge=1)
    loss_scale_fixed: bool = False
    tf32: bool = False
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    all_reduce: Literal["auto", "flat", "hierarchical"] = "auto"
    bucket_mb: float = Field(25.0, gt=0, le=4096)
    grad_clip: float | None = Field(None, ge=0)
    grad_norm: bool = True
    trace: bool = False
    report: bool = True
    parameters_sha256: bool = False
    compile: bool = False
    profile: tuple[_Count, _Count] | None = None
    evaluate_every: _Count | None = None
    evaluation_samples: _Count = 512
    stop_after: StopAfterOptions | None = None
    tensorboard: bool = False
    on_nan: Literal["stop", "skip"] | None = "stop"
    resume: str | None = Field(None, min_length=1)
    resume_data: Literal["same", "any"] = "same"
    delink_at: _Count | Literal["plateau"] | None = None
    router_bias_rate: float | None = Field(None, gt=0)


class LauncherOptions(_Section):
    """Options that say where the ranks run, under `launcher`.

    kind: how the ranks are started. `ssh` starts them on `hosts`; `ray` on the nodes of a Ray
        cluster; `slurm` submits the job; `local` starts them on this machine's devices; `emulate`
        starts CPU processes that stand for devices; `auto` chooses `local` or `emulate`.
    hosts: the hosts of `ssh`; the nodes of `ray`, by id, address or host name, or none to have Ray
        choose them.
    python: the path of Python on the hosts of `ssh`.
    nodes: number of nodes of `slurm`; None takes the inventory's.
    ranks_per_node: number of ranks on each node of `slurm`; None takes the inventory's.
    wait: whether the command waits for the end of the job of `slurm`.
    sbatch: further options of sbatch.
    address: the address of the cluster of `ray`; None takes that of RAY_ADDRESS, or of the cluster
        that runs on this host.
    placement_s: seconds that `ray` waits for the resources of the cluster.
    threads: number of threads of each rank; None shares the cores among the ranks.
    timeout_s: seconds that a rank waits for other ranks. Then it fails, and names the missing
        ranks.
    max_restarts: how often a job restarts from its newest checkpoint after a rank or a host has
        died.
    device_speed: whether emulated devices are slowed to their device's speed, relative to the
        fastest.
    link_speed: whether the links of emulated devices are slowed to their relative bandwidth.
    """

    kind: Literal["auto", "local", "emulate", "ssh", "slurm", "ray"] = "auto"
    hosts: tuple[Annotated[str, Field(min_length=1, pattern=HOST)], ...] = ()
    python: str | None = Field(None, min_length=1)
    nodes: _Count | None = None
    ranks_per_node: _Count | None = None
    wait: bool = True
    sbatch: Mapping[str, str | int | float | bool] = Field(default_factory=dict)
    address: str | None = Field(None, min_length=1)
    placement_s: float = Field(60.0, ge=0)
    threads: _Count | None = None
    # gloo adds the timeout to a clock, in 64-bit nanoseconds, which overflow after 292 years.
    timeout_s: float = Field(1800.0, gt=0, le=1e9)
    max_restarts: Annotated[_Whole, Field(ge=0)] = 0
    device_speed: bool = False
    link_speed: bool = False


class CheckpointOptions(_Section):
    """Options of checkpoints, under `checkpoint`.

    path: the path or URL of the checkpoint that a mode of `READING` reads, or of a run, whose
        newest checkpoint is read.
    every: number of optimizer steps between checkpoints, or a time such as "30min"; None writes
        none.
    grace_s: seconds that a run has for a last checkpoint when it is told to end.
    keep: number of the newest checkpoints that stay; None keeps all.
    asynchronous: whether checkpoints are written while the next steps run, or before them. Named
        `async` in the config.
    final: whether the run writes trained weights into its directory at the end: those of the last
        step, or those of the `best` checkpoint.
    best: the metric whose best value makes a checkpoint, which is kept; None writes none.
    to: the URL of a folder to which checkpoints and the trained weights are copied; None copies
        nothing.
    """

    path: str | None = Field(None, min_length=1)
    every: _Count | Annotated[str, Field(pattern=DURATION)] | None = None
    grace_s: float = Field(30.0, ge=0)
    keep: _Count | None = None
    asynchronous: bool = Field(True, alias="async")
    final: bool | Literal["best"] = True
    best: Annotated[
        WatchedMetric | None,
        BeforeValidator(lambda value: {"metric": value} if isinstance(value, str) else value),
    ] = None
    to: str | None = Field(None, min_length=1)

    @property
    def saves(self) -> bool:
        """Return whether a run writes checkpoints."""
        return self.every is not None or self.best is not None

    @property
    def every_steps(self) -> int | None:
        """Return the number of steps between checkpoints, or None where none are written or a time
        decides."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_s(self) -> float | None:
        """Return the seconds between checkpoints, or None where none are written or steps
        decide."""
        if not isinstance(self.every, str):
            return None
        unit = next(unit for unit in ("min", "s", "h") if self.every.endswith(unit))
        return float(self.every.removesuffix(unit)) * _UNITS_S[unit]


class VerifyOptions(_Section):
    """Options of `mode=verify`, under `verify`.

    steps: number of the run's first steps that are compared.
    tolerance: the allowed difference, relative to the largest element of the compared tensor; None
        lets the precision decide.
    """

    steps: _Count = 3
    tolerance: float | None = Field(None, gt=0)


class AuditOptions(_Section):
    """Options of `mode=audit`, under `audit`.

    step: the step whose samples are shown device by device; None shows none.
    """

    step: _Count | None = None


class Request(BaseModel):
    """All options that a user asked for, checked.

    mode: what the command does.
    compare: names of the strategies that `mode=plan` shows side by side.
    explain: the strategy of which `mode=plan` says what would make it run, or the fastest; None:
        there is none.
    seed: the seed of weights, data order and dropout.
    names: the option chosen in each config group.
    strategy, hardware: sections as written. The packages that own them read them later: the
        strategy into nodes, the hardware against this machine.
    model, data, optimizer, launcher, train, verify, checkpoint: the sections of these names.
    rehearse: the ranks that are rehearsed: none (False), one of each kind (True), `all`, or a tuple
        of ranks.
    callbacks: the user's own code that is called at moments of the run.
    metrics: metrics of the evaluations, by name.
    trackers: keepers of the run's curves, including TensorBoard's where `train.tensorboard` asks
        for it.
    files: the plan's notes about the user's own config files that replace built-in ones.
    run: the run directory that `mode=audit` reads.
    against: the plan or run that `mode=view` shows beside the one of `checkpoint.path`.
    audit: the section of this name.
    jobs: the file of the jobs that `mode=schedule` runs.
    schedule: the section of this name.
    blank_labels: dtype and shape of labels that the model takes and the samples of `mode=predict`
        lack; None where no labels are missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode
    compare: tuple[str, ...] = ()
    explain: str | None = None
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
    trackers: tuple[TrackerOptions, ...] = ()
    callbacks: CallbacksOptions = CallbacksOptions()
    metrics: dict[str, MetricOptions] = Field(default_factory=dict)
    files: tuple[Decision, ...] = ()
    run: str | None = None
    against: str | None = None
    audit: AuditOptions = AuditOptions()
    jobs: str | None = None
    schedule: ScheduleOptions = ScheduleOptions()
    blank_labels: tuple[str, tuple[int, ...]] | None = None

    def to_json(self) -> str:
        """Return the request as JSON, in the form of `request.json`."""
        return self.model_dump_json(by_alias=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Request":
        """Return the request in a text that `to_json` wrote. Raises ValueError for any other
        text."""
        return cls.model_validate_json(text)

    @property
    def is_pseudo(self) -> bool:
        """Return whether layers share their weights at first and are delinked later
        (Pseudo-to-Real)."""
        return self.model.share_layers and self.train.delink_at is not None

    def without_evaluations(self) -> "Request":
        """Return the request without evaluations, metrics, trackers and callbacks."""
        data = self.data
        if "evaluation" in type(data).model_fields:
            data = data.model_copy(update={"evaluation": None})
        train = {"evaluate_every": None, "stop_after": None, "trace": False}
        checkpoint = {"best": None, "final": bool(self.checkpoint.final)}
        return self.model_copy(
            update={
                "data": data,
                "train": self.train.model_copy(update=train),
                "checkpoint": self.checkpoint.model_copy(update=checkpoint),
                **{"metrics": {}, "trackers": (), "callbacks": CallbacksOptions()},
            }
        )

    @property
    def may_save(self) -> bool:
        """Return whether a run of the request may write checkpoints."""
        return self.checkpoint.saves or self.is_pseudo or bool(self.callbacks.listed)

    def strategy_graph(self) -> Strategy:
        """Return the nodes of the strategy, which `read_request` has found to be without faults."""
        faults: list[Fault] = []
        strategy = read_strategy(self.strategy, self.names.get("strategy", "strategy"), faults)
        assert strategy is not None, faults
        return strategy


def read_request(
    config: DictConfig, names: Mapping[str, str], files: tuple[Decision, ...] = ()
) -> Request:
    """Return the Request of a composed config. Raises ConfigError with all faults.

    config: the composed config, without Hydra's own part.
    names: Hydra's choices by config group, which name things in messages and plans.
    files: the plan's notes about the user's own config files.
    """
    plain = {"audit": {}, "schedule": {}, **_plain(config)}
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
        ("schedule", ScheduleOptions),
    ):
        given = plain.get(key)
        if key == "checkpoint" and isinstance(given, str):  # as in mode=export checkpoint=PATH
            plain[key] = {"path": given}
        if key == "checkpoint" and plain.get("path") is not None:
            _add_path(plain, faults)
        section = _mapping(plain, key, faults)
        if key == "train" and section is not None:
            section = _with_steps(section, faults)
        if section is not None and key == "optimizer":
            sections[key] = read_optimizer(section, faults)
        elif section is not None:
            sections[key] = validated(kind, section, key, faults, _without_effect(key, section))
    sections["mode"] = validated(Mode, plain.get("mode"), "mode", faults)
    sections["run"] = validated(_RunPath, plain.get("run"), "run", faults)
    sections["jobs"] = validated(_RunPath, plain.get("jobs"), "jobs", faults)
    sections["against"] = validated(_RunPath, plain.get("against"), "against", faults)
    sections["seed"] = validated(Seed, plain.get("seed"), "seed", faults)
    sections["compare"] = _compared(plain.get("compare") or [], sections["mode"], faults)
    sections["explain"] = validated(_RunPath, plain.get("explain"), "explain", faults)
    sections["rehearse"] = _rehearsed(plain.get("rehearse", False), sections["mode"], faults)
    train = sections.get("train")
    tensorboard = isinstance(train, TrainOptions) and train.tensorboard
    sections["trackers"] = read_trackers(plain.get("trackers", []), tensorboard, faults)
    sections["callbacks"] = read_callbacks(plain.get("callbacks", {}), faults)
    sections["metrics"] = read_metrics(plain.get("metrics"), faults)
    known = set(Request.model_fields) - {"names", "files", "blank_labels"} | {"path"}
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
    effect in that mode."""
    faults: list[Fault] = []
    sections = {name: getattr(request, name) for name in Request.model_fields} | {"mode": mode}
    _compared(list(request.compare), mode, faults)
    _rehearsed(request.rehearse, mode, faults)
    _refuse_together(sections, faults)
    if faults:
        raise ConfigError(faults)
    return request.model_copy(update={"mode": mode})


def _add_path(plain: dict[str, Any], faults: list[Fault]) -> None:
    """Move the value of `path` to the key that the mode reads: `run` for an audit, else
    `checkpoint.path`."""
    path, section = plain["path"], plain.get("checkpoint")
    other = "run" if plain.get("mode") == "audit" else "checkpoint"
    if other == "run":
        given = plain.get("run")
        plain["run"] = path
    elif isinstance(section, dict):
        given = section.get("path")
        plain["checkpoint"] = {**section, "path": path}
    else:
        return
    if given is not None:
        rule, remedy = f"and {other} are both given", "leave one out"
        faults.append(Fault("path", as_yaml(path), rule, remedy))


def _with_steps(section: Mapping[str, Any], faults: list[Fault]) -> dict[str, Any]:
    """Return the section `train` without `steps` where that is null. Adds a fault where both steps
    and epochs are given."""
    given = {key: value for key, value in section.items() if key != "steps" or value is not None}
    if "steps" in given and given.get("epochs") is not None:
        rule = f"is not the only end of the run (train.steps={as_yaml(given['steps'])})"
        remedy = "leave one of them out"
        faults.append(Fault("train.epochs", as_yaml(given["epochs"]), rule, remedy))
    return given


def in_steps(request: Request, num_samples: int) -> Request:
    """Return the request with `train.epochs` converted to optimizer steps, or unchanged without
    epochs.

    num_samples: number of training samples in the data.

    The last step is the one that takes the last sample of the last epoch; where its batch has room,
    it takes samples of the next epoch too. Raises ConfigError with all faults of options that name
    steps.
    """
    epochs = request.train.epochs
    if epochs is None:
        return request
    steps = max(1, ceil(round(epochs * num_samples / request.train.global_batch, 9)))
    train = request.train.model_copy(update={"steps": steps})
    request = request.model_copy(update={"train": train})
    faults: list[Fault] = []
    _refuse_by_steps({key: getattr(request, key) for key in Request.model_fields}, faults)
    if faults:
        raise ConfigError(faults)
    return request


def _without_effect(key: str, section: Mapping[str, Any]) -> set[str]:
    """Return the options of a section that the chosen launcher or mode does not read."""
    if key == "launcher":
        kind = str(section.get("kind"))
        of_kinds = {
            "ssh": {"hosts", "python"},
            "slurm": {"nodes", "ranks_per_node", "wait", "sbatch"},
            "ray": {"hosts", "address", "placement_s"},
        }
        of_others = {"max_restarts"} if kind == "slurm" else set[str]()
        return of_others.union(*of_kinds.values()) - of_kinds.get(kind, set())
    return {"path"} if key == "checkpoint" else set()


def _compared(value: object, mode: object, faults: list[Fault]) -> tuple[str, ...]:
    """Return the names of the strategies to compare. Adds a fault for a value that is not a list of
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
    no ranks."""
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
    """Return the config as plain values, with interpolations resolved. Raises ConfigError where one
    cannot be resolved."""
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
    groupless = key in ("train", "verify", "checkpoint", "audit", "schedule")
    remedy = f"use {key}.KEY=VALUE" if groupless else f"use {key}=NAME or {key}.KEY=VALUE"
    faults.append(Fault(key, as_yaml(value), "is not a mapping", remedy))
    return None


def _refuse_together(sections: Mapping[str, Any], faults: list[Fault]) -> None:
    """Add faults for values that are wrong or without effect because of other values."""
    train = sections.get("train")
    if isinstance(train, TrainOptions):
        _refuse_loss_scale(train, faults)
        _refuse_tf32(train, faults)
        if train.epochs is None:
            _refuse_by_steps(sections, faults)
        if train.grad_clip and not train.grad_norm:
            rule = "is off, and train.grad_clip needs the gradient's norm"
            faults.append(Fault("train.grad_norm", "false", rule, "use train.grad_norm=true"))
        _refuse_resume(train, sections.get("mode"), faults)
    launcher, checkpoint = sections.get("launcher"), sections.get("checkpoint")
    run, mode = sections.get("run"), sections.get("mode")
    _refuse_run(sections, faults)
    _refuse_schedule(sections, faults)
    if isinstance(checkpoint, CheckpointOptions):
        _refuse_path(checkpoint, mode, run, faults)
        if checkpoint.final == "best" and checkpoint.best is None:
            rule = "is the best checkpoint's, and none is kept (checkpoint.best=null)"
            remedy = "use checkpoint.best=evaluation_loss or the like, or true"
            faults.append(Fault("checkpoint.final", "best", rule, remedy))
        _refuse_to(checkpoint, sections, faults)
    if isinstance(launcher, LauncherOptions) and isinstance(checkpoint, CheckpointOptions):
        if launcher.kind == "ssh" and not launcher.hosts:
            remedy = "name them, as launcher.hosts=[gpu1,gpu2]"
            faults.append(Fault("launcher.hosts", "[]", "names no host to start ranks on", remedy))
        restarts = launcher.max_restarts
        if restarts and not checkpoint.saves:
            rule = "starts again what nothing is saved of (checkpoint.every=null)"
            remedy = "set checkpoint.every, as checkpoint.every=10min"
            faults.append(Fault("launcher.max_restarts", str(restarts), rule, remedy))
    optimizer = sections.get("optimizer")
    if isinstance(optimizer, OptimizerOptions) and isinstance(train, TrainOptions):
        _refuse_custom(optimizer, train, sections.get("mode"), faults)
        _refuse_calibrated(train, sections.get("mode"), faults)


def _refuse_by_steps(sections: Mapping[str, Any], faults: list[Fault]) -> None:
    """Add faults for options that contradict the number of steps of the run."""
    train, mode = sections["train"], sections.get("mode")
    verify, optimizer = sections.get("verify"), sections.get("optimizer")
    if mode == "verify" and isinstance(verify, VerifyOptions):
        _refuse_steps(verify, train, faults)
    _refuse_profile(train, mode, faults)
    _refuse_delinking(train, sections.get("model"), mode, faults)
    if isinstance(optimizer, OptimizerOptions):
        refuse_long_schedule(optimizer, train.steps, faults)


def _refuse_custom(
    optimizer: OptimizerOptions, train: TrainOptions, mode: object, faults: list[Fault]
) -> None:
    """Add a fault for a custom optimizer, or LARS, where moments would have to be those of the
    gradients, and for a custom one where the mode measures our own optimizers."""
    if train.delink_at is not None and (optimizer.is_custom or optimizer.name == "lars"):
        rule = "divides moments by the number of layers that shared them, and those of "
        rule += (
            f"{optimizer.target} are not known"
            if optimizer.is_custom
            else ("lars do not grow with a gradient")
        )
        remedy = "use optimizer=adamw, adam, lamb or sgd, or null"
        faults.append(Fault("train.delink_at", as_yaml(train.delink_at), rule, remedy))
    if optimizer.target is not None and mode == "calibrate":
        rule = "is not what mode=calibrate measures, which are our own optimizers"
        faults.append(Fault("optimizer._target_", optimizer.target, rule, "use optimizer=adamw"))


def _refuse_calibrated(train: TrainOptions, mode: object, faults: list[Fault]) -> None:
    """Add a fault for a calibration in fp8, whose products no calibration measures."""
    if train.precision == "fp8" and mode == "calibrate":
        rule = "is not measured: a plan in fp8 goes by the calibration of bf16"
        faults.append(Fault("train.precision", "fp8", rule, "use bf16"))


def _refuse_path(
    checkpoint: CheckpointOptions, mode: object, run: object, faults: list[Fault]
) -> None:
    """Add a fault for an export without a checkpoint, and for a checkpoint that the mode does not
    read. The remedy differs where `run` gives the checkpoint's path."""
    if mode in READING and checkpoint.path is None and run is None:
        remedy = "name a run directory or a checkpoint in one, as checkpoint=runs/MY_RUN"
        faults.append(Fault("checkpoint", "", f"must be given to mode={mode}", remedy))
    if mode == "view" and checkpoint.path is None:
        remedy = "name a run directory or a plan.json, as path=runs/MY_RUN"
        faults.append(Fault("path", "", "must be given to mode=view", remedy))
    if mode not in (*READING, "view", None) and checkpoint.path is not None:
        rule, remedy = f"has no effect on mode={mode}", "go on from it by train.resume=PATH"
        if mode == "audit":
            remedy = f"use run={checkpoint.path}" if run is None else "leave it out"
        faults.append(Fault("checkpoint.path", checkpoint.path, rule, remedy))


def _refuse_to(
    checkpoint: CheckpointOptions, sections: Mapping[str, Any], faults: list[Fault]
) -> None:
    """Add a fault for `checkpoint.to` where the run has nothing to copy, or where it is not a
    URL."""
    to, mode, rule = checkpoint.to, sections.get("mode"), ""
    if to is None:
        return
    callbacks = sections.get("callbacks")
    asks = isinstance(callbacks, CallbacksOptions) and bool(callbacks.listed)
    remedy = "leave it out"
    if mode in (*READING, "calibrate", "audit", "view"):
        rule = f"has no effect on mode={mode}"
    elif not is_url(to):
        rule = "is no URL"
        remedy = f"write file://{Path(to).absolute()}, or s3://BUCKET/FOLDER or the like"
    elif not (checkpoint.saves or checkpoint.final or asks):
        rule = "has nothing to copy (checkpoint.every=null, checkpoint.final=false)"
        remedy = "set checkpoint.every, as checkpoint.every=10min"
    if rule:
        faults.append(Fault("checkpoint.to", to, rule, remedy))


def _refuse_run(sections: Mapping[str, Any], faults: list[Fault]) -> None:
    """Add a fault for an audit without a run, for a run or a step that the mode does not audit, and
    for a plan that the mode does not compare. The remedy differs where `checkpoint` gives the path
    of the run."""
    run, audit, mode = (sections.get(key) for key in ("run", "audit", "mode"))
    against, checkpoint = sections.get("against"), sections.get("checkpoint")
    path = checkpoint.path if isinstance(checkpoint, CheckpointOptions) else None
    if mode == "audit" and run is None and path is None:
        remedy = "name a run directory, as run=runs/MY_RUN"
        faults.append(Fault("run", "", "must be given to mode=audit", remedy))
    explain = sections.get("explain")
    if explain is not None and mode not in ("plan", None):
        rule = f"has no effect on mode={mode}"
        faults.append(Fault("explain", str(explain), rule, "use mode=plan, or leave it out"))
    if explain is not None and sections.get("compare"):
        rule, remedy = "explains one strategy, and compare shows several", "leave compare out"
        faults.append(Fault("explain", str(explain), rule, remedy))
    if against is not None and mode not in ("view", None):
        rule = f"has no effect on mode={mode}"
        faults.append(Fault("against", str(against), rule, "use mode=view, or leave it out"))
    if mode in ("audit", None):
        return
    rule = f"has no effect on mode={mode}"
    if run is not None:
        remedy = "use mode=audit, or leave it out"
        if mode in READING and path is None:
            remedy = f"use checkpoint={run}"
        faults.append(Fault("run", str(run), rule, remedy))
    if isinstance(audit, AuditOptions) and audit.step is not None:
        faults.append(Fault("audit.step", str(audit.step), rule, "use mode=audit, or null"))


def _refuse_schedule(sections: Mapping[str, Any], faults: list[Fault]) -> None:
    """Add a fault for a schedule without jobs, for jobs in a mode that schedules none, and for a
    trace of jobs that are not simulated."""
    jobs, options, mode = (sections.get(key) for key in ("jobs", "schedule", "mode"))
    if mode == "schedule" and jobs is None:
        remedy = "name a YAML file with a list of jobs, as jobs=jobs.yaml"
        faults.append(Fault("jobs", "", "must be given to mode=schedule", remedy))
    if mode not in ("schedule", None) and jobs is not None:
        rule = f"has no effect on mode={mode}"
        faults.append(Fault("jobs", str(jobs), rule, "use mode=schedule, or leave it out"))
    if not isinstance(options, ScheduleOptions):
        return
    traces = {"trace": options.trace, "trace_jobs": options.trace_jobs}
    given = {key: str(value) for key, value in traces.items() if value is not None}
    for key, value in given.items():
        if not options.simulate:
            rule, remedy = "is simulated, and no job starts", "add schedule.simulate=true"
            faults.append(Fault(f"schedule.{key}", value, rule, remedy))
    if len(given) == 2:
        rule = f"and schedule.trace_jobs={given['trace_jobs']} are both given"
        faults.append(Fault("schedule.trace", given["trace"], rule, "leave one out"))


def _refuse_profile(train: TrainOptions, mode: object, faults: list[Fault]) -> None:
    """Add a fault for profiled steps that the run does not have, and for a mode that trains
    nothing."""
    if train.profile is None:
        return
    first, last = train.profile
    value, rule = as_yaml([first, last]), ""
    remedy = "use two steps in order, as train.profile=[10,13], or null"
    if first > last or last > train.steps:
        rule = f"is not a first and a last step of the run (train.steps={train.steps})"
    elif mode not in ("train", None):
        rule, remedy = f"has no effect on mode={mode}", "use null, or leave it out"
    if rule:
        faults.append(Fault("train.profile", value, rule, remedy))


def _refuse_resume(train: TrainOptions, mode: object, faults: list[Fault]) -> None:
    """Add a fault for a checkpoint in a mode that begins at step 0, and where other data is allowed
    and the run resumes from no checkpoint."""
    if mode in ("verify", "rehearse") and train.resume is not None:
        rule = f"has no effect on mode={mode}, which begins with step 1"
        faults.append(Fault("train.resume", train.resume, rule, "use null"))
    if train.resume_data == "any" and train.resume is None:
        rule = "has no effect on a run that goes on from no checkpoint (train.resume=null)"
        faults.append(Fault("train.resume_data", "any", rule, "leave it out, or set train.resume"))


def _refuse_delinking(
    train: TrainOptions, model: ModelOptions | None, mode: object, faults: list[Fault]
) -> None:
    """Add a fault for delinking layers that share nothing, or for delinking at or after the last
    step."""
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
    """Add faults for fp16 or skipped steps without the gradient norm, and for a loss scale without
    fp16."""
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
    if train.loss_scale_fixed and train.loss_scale is None:
        rule, remedy = "fixes no loss scale", "set train.loss_scale as well, or use false"
        faults.append(Fault("train.loss_scale_fixed", "true", rule, remedy))


def _refuse_tf32(train: TrainOptions, faults: list[Fault]) -> None:
    """Add a fault for TF32 where the precision of training has 16 bits."""
    if train.tf32 and train.precision in ("bf16", "fp16", "fp8"):
        rule = f"has no effect on train.precision={train.precision}"
        faults.append(Fault("train.tf32", "true", rule, "use train.precision=fp32, or false"))


def _refuse_steps(verify: VerifyOptions, train: object, faults: list[Fault]) -> None:
    """Add a fault where more steps are to be verified than the run has.

    A verification takes the first steps of a run, at the run's learning rates.
    """
    if isinstance(train, TrainOptions) and verify.steps > train.steps:
        rule = f"is more than the run has (train.steps={train.steps})"
        faults.append(Fault("verify.steps", str(verify.steps), rule, f"use at most {train.steps}"))
