"""Read `state.json` of a checkpoint: all state of a run that is not in tensors."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whale_train.checkpoints.safetensors_files import BrokenCheckpoint, read_json
from whale_train.checkpoints.url_path import Place
from whale_train.data.fingerprint import Fingerprint

STATE = "state.json"
_Count = Annotated[int, Field(ge=0, lt=2**63, strict=True)]


class LossScaleState(BaseModel):
    """The state of fp16's loss scale.

    value: the loss scale.
    good_steps: number of finite steps in a row since the scale last changed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    value: float = Field(gt=0)
    good_steps: _Count


class CheckpointState(BaseModel):
    """The state of a run after a step.

    step: number of optimizer steps done.
    samples: number of samples seen.
    num_samples: number of samples in the data; None where the checkpoint does not say.
    loss_scale: the state of fp16's loss scale; None in other precisions.
    delinks: whether layers that share their weights are delinked at this step.
    skipped: number of steps without an update, among those done.
    data: the fingerprint of the data; None in checkpoints without one.
    trackers: the state that each tracker returned, by tracker.
    watched: the best values of evaluations so far, by the option that watches them.
    stream: the pass over a stream of the user's own, and the result of its `state_dict`; None for
        other data.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)

    step: _Count
    samples: _Count
    num_samples: _Count | None = None
    loss_scale: LossScaleState | None = None
    delinks: bool = False
    skipped: _Count = 0
    data: Fingerprint | None = None
    trackers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    watched: dict[str, dict[str, Any]] = Field(default_factory=dict)
    stream: Any = None

    @classmethod
    def read(cls, checkpoint: Place) -> "CheckpointState":
        """Return the state of a checkpoint. Raises BrokenCheckpoint where `state.json` is missing
        or not valid."""
        path = checkpoint / STATE
        content: Any = read_json(path)
        try:
            if isinstance(content, dict) and content.get("data") is not None:
                content = {**content, "data": Fingerprint.from_plain(content["data"])}
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            why = f"{where}: {first['msg']}"
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            why = f"data: {error}"
        raise BrokenCheckpoint(f"{path} cannot be read ({why})")
