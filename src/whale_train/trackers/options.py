"""Read the list `trackers` of the config: which trackers keep a run's curves, with their options.

Neither a tracker's package nor a user's own code is imported.
"""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

from whale_train.errors import Fault, nearest
from whale_train.own_code import PATH
from whale_train.validation import as_yaml, validated

KEY = "trackers"
_Text = Annotated[str, Field(min_length=1)]


class _Options(BaseModel):
    """Options that all built-in trackers have.

    new_run: whether training that resumes from a checkpoint begins a new curve, instead of
        continuing the curve of the checkpoint's run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    new_run: bool = False

    @property
    def key(self) -> str:
        """Return the name under which checkpoints keep the tracker's state."""
        return str(getattr(self, "name"))  # noqa: B009  # every subclass has one


class TensorBoardOptions(_Options):
    """Options of TensorBoard, whose event files are in `tensorboard/` of the run directory."""

    name: Literal["tensorboard"] = "tensorboard"


class MlflowOptions(_Options):
    """Options of MLflow.

    uri: the tracking server or store; None takes MLFLOW_TRACKING_URI, or a store in the run
        directory.
    experiment: name of the experiment.
    run_name: name of the run; None takes the run directory's name.
    """

    name: Literal["mlflow"] = "mlflow"
    uri: _Text | None = None
    experiment: _Text = "whale-train"
    run_name: _Text | None = None


class WandbOptions(_Options):
    """Options of Weights & Biases.

    project: the project that shows the run.
    entity: the entity that owns the project; None is the account's own.
    run_name: name of the run; None takes the run directory's name.
    mode: whether rows are sent at once, or written to `wandb/` of the run directory for `wandb
        sync`; None takes WANDB_MODE, or `online` where WANDB_API_KEY is set.
    """

    name: Literal["wandb"] = "wandb"
    project: _Text = "whale-train"
    entity: _Text | None = None
    run_name: _Text | None = None
    mode: Literal["online", "offline"] | None = None


class TrackioOptions(_Options):
    """Options of Trackio, whose local store is the folder TRACKIO_DIR.

    project: name of the project.
    run_name: name of the run; None takes the run directory's name.
    """

    name: Literal["trackio"] = "trackio"
    project: _Text = "whale-train"
    run_name: _Text | None = None


class OwnTrackerOptions(BaseModel):
    """Options of a tracker of the user's own.

    target: path of the tracker's class, or of a function that returns a tracker.
    arguments: keyword arguments of the class or function.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["own"] = "own"
    target: Annotated[str, Field(pattern=PATH)]
    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the name under which checkpoints keep the tracker's state."""
        return self.target


BuiltIn = TensorBoardOptions | MlflowOptions | WandbOptions | TrackioOptions
TrackerOptions = Annotated[BuiltIn | OwnTrackerOptions, Field(discriminator="name")]
_BY_NAME: dict[str, type[BuiltIn]] = {
    "tensorboard": TensorBoardOptions,
    "mlflow": MlflowOptions,
    "wandb": WandbOptions,
    "trackio": TrackioOptions,
}


def read_trackers(
    value: object, tensorboard: bool, faults: list[Fault]
) -> tuple[BuiltIn | OwnTrackerOptions, ...]:
    """Return the trackers of the list `value`, after adding all faults of `value` to `faults`.

    tensorboard: whether `train.tensorboard` asks for TensorBoard, which is then added unless the
        list has it.
    """
    if not isinstance(value, list):
        remedy = f"use {KEY}=[{as_yaml(value)}]" if value in _BY_NAME else f"use {KEY}=[wandb]"
        faults.append(Fault(KEY, as_yaml(value), "is not a list", remedy))
        return ()
    entries = [*value]
    if tensorboard and not any(_name(entry) == "tensorboard" for entry in entries):
        entries.append("tensorboard")
    read: list[BuiltIn | OwnTrackerOptions] = []
    for number, entry in enumerate(entries):
        options = _entry(f"{KEY}[{number}]", entry, faults)
        if options is not None and any(options.key == other.key for other in read):
            remedy = "leave one of them out"
            faults.append(Fault(f"{KEY}[{number}]", options.key, "stands there twice", remedy))
        elif options is not None:
            read.append(options)
    return tuple(read)


def _name(entry: object) -> object:
    return entry.get("name") if isinstance(entry, dict) else entry


def _entry(key: str, entry: object, faults: list[Fault]) -> BuiltIn | OwnTrackerOptions | None:
    """Return the options of one entry of the list, or None after adding its faults."""
    if isinstance(entry, dict) and "_target_" in entry:
        return _own(key, entry, faults)
    name = _name(entry)
    if isinstance(entry, dict) and name is None:
        remedy = f"write {key}.name=mlflow or the like, or {key}._target_=my_module.MyTracker"
        faults.append(Fault(f"{key}.name", "", "must be given", remedy))
        return None
    kind = _BY_NAME.get(str(name))
    if kind is None:
        where = f"{key}.name" if isinstance(entry, dict) else key
        remedy = f"{nearest(str(name), _BY_NAME)}, or {{_target_: my_module.MyTracker}}"
        faults.append(Fault(where, as_yaml(name), "is unknown", remedy))
        return None
    given = entry if isinstance(entry, dict) else {"name": name}
    options: BuiltIn | None = validated(kind, given, key, faults)
    if isinstance(options, MlflowOptions) and has_password(options.uri):
        rule = "has a password, which the run directory would keep"
        remedy = "set MLFLOW_TRACKING_URI in the environment instead"
        shown = f"{urlsplit(options.uri or '').scheme}://..."
        faults.append(Fault(f"{key}.uri", shown, rule, remedy))
    return options


def _own(key: str, entry: dict[str, Any], faults: list[Fault]) -> OwnTrackerOptions | None:
    arguments = {str(name): value for name, value in entry.items() if name != "_target_"}
    read: list[Fault] = []
    given = {"target": entry["_target_"], "arguments": arguments}
    options: OwnTrackerOptions | None = validated(OwnTrackerOptions, given, key, read)
    if read:
        rule, remedy = "is not the path of a class", "name one, as my_module.MyTracker"
        faults.append(Fault(f"{key}._target_", as_yaml(entry["_target_"]), rule, remedy))
    return options


def has_password(uri: str | None) -> bool:
    """Return whether a URI contains a password."""
    try:
        return uri is not None and urlsplit(uri).password is not None
    except ValueError:  # not a URI
        return False
