"""Read and check the options of the `model` group of a config, without importing any model."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from whale_train.errors import ConfigError, Fault, nearest
from whale_train.own_code import PATH
from whale_train.validation import no_truth_value

HUGGING_FACE = "whale_train.models.build.hugging_face"  # the _target_ of conf/model/hf.yaml
ADAPTERS = "model.adapters"
QUANTIZE = "model.quantize"
MISSING = "???"  # the value in a config that must be given

_OWN_KEYS = (
    *("_target_", "loss", "class_dim", "sync_batchnorm", "loss_over", "samples_are_independent"),
    *("init", "share_layers"),
)
_HUGGING_FACE_KEYS = ("architecture", "config", "pretrained", "adapters", "quantize")
# The keys that the model group defines; every other key under model is an argument of its class.
MODEL_KEYS = (*_OWN_KEYS, *_HUGGING_FACE_KEYS)
RULES = {
    "_target_": ("is not the path of a class", "write model._target_=package.module.Class"),
    "loss": (
        "is not a loss",
        "use one of: cross_entropy, model, or {_target_: torch.nn.MSELoss} or the like",
    ),
    "class_dim": ("is not a dimension that classes are read from", "use 1, -1 or null"),
    "sync_batchnorm": ("is not true or false", "use true or false"),
    "loss_over": ("is not what a loss can be of its samples'", "use mean, sum or null"),
    "samples_are_independent": ("is not true or false", "use true or false"),
    "share_layers": ("is not true or false", "use true or false"),
    "init": ("is no way to make initial weights", "use one of: sharded, whole"),
    "architecture": ("is not a name", "write model.architecture=LlamaForCausalLM or the like"),
    "config": ("is not a mapping", "write 'model.config={hidden_size: 64}' or the like"),
    "pretrained": ("is not a folder", "name a folder written by save_pretrained()"),
    "adapters": ("is not a mapping", "write 'model.adapters={r: 8, target_modules: [q_proj]}'"),
    "quantize": ("is no form that weights are stored in", "use one of: nf4, null"),
}


OWN_LOSS = "own"  # the value of `loss` for a loss of the user's own


class LossOptions(BaseModel):
    """Options of a loss of the user's own, `model.loss` with a `_target_`.

    target: path of a function of predictions and labels that returns a tensor, or of a class whose
        objects are such functions.
    arguments: keyword arguments of the function, or of the class's constructor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Annotated[str, Field(pattern=PATH)]
    arguments: dict[str, Any] = Field(default_factory=dict)


class ModelOptions(BaseModel):
    """Options of the `model` group of a config.

    target: path of the class or function that makes the model.
    loss: the model's own loss, the cross-entropy of its logits, or a loss of the user's own.
    own_loss: the loss of the user's own; None where there is none.
    class_dim: dimension of the classes in the logits that `loss=cross_entropy` reads; None infers
        it from their shape (`models/class_dim.py`).
    sync_batchnorm: whether batch norms are computed over the whole batch.
    loss_over: whether a batch's loss is the mean or the sum of its samples' losses, where the
        model's graph does not tell; None where it tells.
    samples_are_independent: whether the user vouches that a batch may be split, where nothing has
        proven that the model then trains equally.
    init: how weights are initialised that no folder has. `whole` draws them as one process would.
        `sharded` draws each tensor where it is needed, for models that no host could hold; the
        draws differ from those of `whole`, and are the same under every plan.
    share_layers: whether equal layers of a list share the weights of the first.
    architecture: class of a Hugging Face model.
    config: settings of a Hugging Face model.
    pretrained: folder or model of the hub with the weights of a Hugging Face model.
    adapters: settings of low-rank adapters for a Hugging Face model, which alone are trained; None
        trains the whole model.
    quantize: how the frozen weights of linear layers are stored, beside adapters; None: as they
        are.
    arguments: constructor arguments of every other class.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    target: str = Field(alias="_target_", pattern=PATH)
    loss: Literal["model", "cross_entropy", "own"] = "model"
    own_loss: LossOptions | None = None
    class_dim: Annotated[Literal[1, -1] | None, BeforeValidator(no_truth_value)] = None
    sync_batchnorm: bool = True
    loss_over: Literal["mean", "sum"] | None = None
    samples_are_independent: bool = False
    init: Literal["whole", "sharded"] = "whole"
    share_layers: bool = False
    architecture: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    pretrained: str | None = None
    adapters: dict[str, Any] | None = None
    quantize: Literal["nf4"] | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)

    @field_validator("config", mode="before")
    @classmethod
    def _null_is_empty(cls, value: object) -> object:
        return {} if value is None else value  # conf/model/hf.yaml says why it is null there

    @property
    def is_hugging_face(self) -> bool:
        return self.target == HUGGING_FACE

    @property
    def adds_to_a_folder(self) -> bool:
        """Return whether the model's frozen weights come from a folder, which every run can
        read."""
        return self.adapters is not None and self.pretrained is not None

    @property
    def is_built_whole(self) -> bool:
        """Return whether the whole model is built in memory before ranks take their shards."""
        return self.init == "whole" and self.pretrained is None

    @property
    def class_name(self) -> str:
        """Return the name of the model's class, without its module."""
        return (self.is_hugging_face and self.architecture) or self.target.rpartition(".")[2]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "ModelOptions":
        """Return the options in the plain mapping of a composed config.

        Raises ConfigError with all faults: missing or malformed keys, and for a Hugging Face model
        keys that are not options. Settings of its architecture belong in `config`.
        """
        given = {str(key): value for key, value in mapping.items() if value != MISSING}
        hugging_face = given.get("_target_") == HUGGING_FACE
        keys = _OWN_KEYS + (_HUGGING_FACE_KEYS if hugging_face else ())
        values = {key: given[key] for key in keys if key in given}
        arguments = {key: value for key, value in given.items() if key not in keys}
        if isinstance(values.get("loss"), Mapping):
            own = {str(name): item for name, item in values["loss"].items()}
            values["own_loss"] = {"target": own.pop("_target_", ""), "arguments": own}
            values["loss"] = OWN_LOSS
        elif values.get("loss") == OWN_LOSS:  # users cannot write this value
            values["loss"] = ""
        faults = []
        if hugging_face:
            if given.get("architecture") is None:
                rule, remedy = "is not given", RULES["architecture"][1]
                faults.append(Fault("model.architecture", "", rule, remedy))
            for key, value in arguments.items():
                rule = "is not an option of model=hf"
                close = nearest(key, set(keys) - {"_target_"})
                remedy = f"{close}; settings of the architecture go into model.config"
                faults.append(Fault(f"model.{key}", str(value), rule, remedy))
        try:
            options = cls.model_validate({**values, "arguments": arguments})
        except ValidationError as error:
            # There is one fault per key: a bad mapping is one fault, even with several bad keys.
            for key in dict.fromkeys(str(problem["loc"][0]) for problem in error.errors()):
                key = "loss" if key == "own_loss" else key
                rule, remedy = RULES[key]
                rule = rule if key in values else "is not given"
                shown = given.get(key, "") if key == "loss" else values.get(key, "")
                faults.append(Fault(f"model.{key}", str(shown), rule, remedy))
        if not faults and options.class_dim is not None and options.loss != "cross_entropy":
            rule = f"has no effect on model.loss={options.loss}"
            remedy = "use model.loss=cross_entropy, or null"
            faults.append(Fault("model.class_dim", str(options.class_dim), rule, remedy))
        if faults:
            raise ConfigError(faults)
        return options
