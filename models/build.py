"""From the `model` part of a request to an `nn.Module` and its loss.

Owns `ModelOptions` (what conf/model gives), finding and checking the class it names, building it,
matching its forward with the data, and `LossModule`, which turns any model into one that returns
a scalar. It tells models apart by `_target_` only, and measures nothing (see profile.py).
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor, nn
from torch.nn import functional

from whale_train.errors import ConfigError, Fault, nearest
from whale_train.strategies.operations import InputField

HUGGING_FACE = "whale_train.models.build.hugging_face"  # the _target_ of conf/model/hf.yaml
MODEL_PREFIX = "model."  # what LossModule puts before the model's own parameter paths
IGNORED_LABEL = -100  # labels that count for nothing, as in torch and transformers
MISSING = "???"  # how a config says that a value must be given

_OWN_KEYS = ("_target_", "loss", "sync_batchnorm")
_HUGGING_FACE_KEYS = ("architecture", "config", "pretrained")
_RULES = {
    "_target_": ("is not the path of a class", "write model._target_=package.module.Class"),
    "loss": ("is not a loss", "use one of: cross_entropy, model"),
    "sync_batchnorm": ("is not true or false", "use true or false"),
    "architecture": ("is not a name", "write model.architecture=LlamaForCausalLM or the like"),
    "config": ("is not a mapping", "write 'model.config={hidden_size: 64}' or the like"),
    "pretrained": ("is not a folder", "name a folder written by save_pretrained()"),
}
# Names in transformers that look like a model's. Auto classes pick a class; they are none.
_MODEL_NAME = re.compile(r"(?!Auto|TF|Flax)\w*(For[A-Z]\w*|Model)(?<!PreTrainedModel)")
_NO_MODEL_NAME = re.compile(r"\w*(Config|Processor|Pil|Fast|Output|Tokenizer)|\w*Dataset\w*")


class ModelOptions(BaseModel):
    """What the `model` group of a config says.

    `architecture`, `config` and `pretrained` are the options of Hugging Face models; `arguments`
    are the constructor arguments of every other class.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    target: str = Field(alias="_target_", pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")
    loss: Literal["model", "cross_entropy"] = "model"
    sync_batchnorm: bool = True
    architecture: str | None = None
    config: dict[str, Any] = Field(default_factory=dict)
    pretrained: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)

    @field_validator("config", mode="before")
    @classmethod
    def _null_is_empty(cls, value: object) -> object:
        return {} if value is None else value  # conf/model/hf.yaml says why it is null there

    @property
    def is_hugging_face(self) -> bool:
        return self.target == HUGGING_FACE

    @property
    def class_name(self) -> str:
        """The class as a reader knows it, without its module."""
        return (self.is_hugging_face and self.architecture) or self.target.rpartition(".")[2]

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "ModelOptions":
        """Options from the plain mapping of a composed config.

        Raises ConfigError with all faults: missing or malformed keys, and keys that are neither
        options nor, for a Hugging Face model, settings (those go into `config`).
        """
        given = {str(key): value for key, value in mapping.items() if value != MISSING}
        hugging_face = given.get("_target_") == HUGGING_FACE
        keys = _OWN_KEYS + (_HUGGING_FACE_KEYS if hugging_face else ())
        values = {key: given[key] for key in keys if key in given}
        arguments = {key: value for key, value in given.items() if key not in keys}
        faults = []
        if hugging_face:
            if given.get("architecture") is None:
                rule, remedy = "is not given", _RULES["architecture"][1]
                faults.append(Fault("model.architecture", "", rule, remedy))
            for key, value in arguments.items():
                rule = "is not an option of model=hf"
                remedy = f"{nearest(key, keys)}; settings of the architecture go into model.config"
                faults.append(Fault(f"model.{key}", str(value), rule, remedy))
        try:
            options = cls.model_validate({**values, "arguments": arguments})
        except ValidationError as error:
            # One fault a key: a bad mapping is one fault however many of its keys are bad.
            for key in dict.fromkeys(str(problem["loc"][0]) for problem in error.errors()):
                rule, remedy = _RULES[key]
                rule = rule if key in values else "is not given"
                faults.append(Fault(f"model.{key}", str(values.get(key, "")), rule, remedy))
        if faults:
            raise ConfigError(faults)
        return options


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Make `folder` the first place modules are looked for, and tensors made on the way real.

    The default device is the CPU inside: a module first imported while a model is built on the
    meta device would keep its constants there for ever.
    """
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        with torch.device("cpu"):
            yield
    finally:
        sys.path.remove(folder)


def _refusal(key: str, value: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError([Fault(key, value, rule, remedy)])


def _said(error: BaseException) -> str:
    """An exception in one line: its type and text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def load_class(options: ModelOptions) -> Callable[..., Any]:
    """What `options` names: a user's class or factory, or a model class of transformers.

    The current working directory is importable. Constructor arguments, and for Hugging Face
    models the config and the folder of weights, are checked as well. Raises ConfigError with all
    faults found.
    """
    with _importable(os.getcwd()):
        if options.is_hugging_face:
            return _hugging_face_class(options)
        made = _imported(options.target)
    faults = _argument_faults(made, options)
    if faults:
        raise ConfigError(faults)
    return made


def _imported(target: str) -> Callable[..., Any]:
    path, _, name = target.rpartition(".")
    parts = path.split(".")
    module: ModuleType | None = None
    for part in (".".join(parts[: end + 1]) for end in range(len(parts))):
        try:
            module = importlib.import_module(part)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name == part:
                rule = f"cannot be imported: there is no module {part}"
                remedy = "run from the folder that holds it, or install it"
            else:
                rule = f"cannot be imported: {part} raised {_said(error)}"
                remedy = f"correct {part}"
            raise _refusal("model._target_", target, rule, remedy) from error
    if not hasattr(module, name):
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        models = [k for k, v in public.items() if isinstance(v, type) and issubclass(v, nn.Module)]
        remedy = nearest(name, models) if models else f"define a torch.nn.Module in {path}"
        rule = f"cannot be imported: {path} has no {name}"
        raise _refusal("model._target_", target, rule, remedy)
    made = getattr(module, name)
    if not callable(made):
        rule = f"is of type {type(made).__name__}, not a class"
        remedy = "name a torch.nn.Module class, or a function that returns a module"
        raise _refusal("model._target_", target, rule, remedy)
    return made  # type: ignore[no-any-return]


def _argument_faults(made: Callable[..., Any], options: ModelOptions) -> list[Fault]:
    """Arguments the constructor does not know, and those it cannot do without."""
    try:
        parameters = inspect.signature(made).parameters
    except ValueError:  # written in C, without a signature
        return []
    named, open_ended = _by_keyword(parameters)
    faults = []
    for key, value in options.arguments.items():
        if key not in named and not open_ended:
            rule = f"is not an argument of {options.class_name}"
            remedy = nearest(key, named) if named else "leave it out: it takes no arguments"
            if not options.target.startswith("whale_train."):
                # The keys of model=gpt, the default, stay when only _target_ is overridden.
                remedy += "; model=custom starts without arguments"
            faults.append(Fault(f"model.{key}", str(value), rule, remedy))
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in options.arguments:
            rule = f"is not given, and {options.class_name} needs it"
            faults.append(Fault(f"model.{key}", "", rule, f"write model.{key}=VALUE"))
    return faults


def _by_keyword(
    parameters: Mapping[str, inspect.Parameter],
) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters that can be given by name, and whether any other name is taken too."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}
    return named, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def _hugging_face_class(options: ModelOptions) -> Callable[..., Any]:
    name = options.architecture or ""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        rule, remedy = "needs transformers, which is not installed", "install whale-train[hf]"
        raise _refusal("model.architecture", name, rule, remedy) from error
    faults = []
    try:
        made = getattr(transformers, name, None)
    except Exception as error:
        refused = f"cannot be imported: {_said(error)}"
        faults.append(Fault("model.architecture", name, refused, "install what it needs"))
    if not faults and (not isinstance(made, type) or not getattr(made, "config_class", None)):
        # The lazy module lists its names without importing the thousands of them.
        names = [n for n in dir(transformers) if _MODEL_NAME.fullmatch(n)]
        close = get_close_matches(name, [n for n in names if not _NO_MODEL_NAME.fullmatch(n)])
        like = f"did you mean {' or '.join(close)}?" if close else _RULES["architecture"][1]
        faults.append(
            Fault("model.architecture", name, "is not a model class of transformers", like)
        )
    folder, (rule, remedy) = options.pretrained, _RULES["pretrained"]
    if folder is not None and not (Path(folder) / "config.json").is_file():
        rule = "is a folder without a config.json" if Path(folder).is_dir() else rule
        faults.append(Fault("model.pretrained", folder, rule, remedy))
    if not faults:
        faults = _config_faults(made, options)
    if faults:
        raise ConfigError(faults)
    return made  # type: ignore[return-value]


def _config_faults(made: Any, options: ModelOptions) -> list[Fault]:
    """Keys of `model.config` that would be stored and never read, and values that are refused."""
    config_class = made.config_class
    try:
        config = _hugging_face_config(config_class, options.config, options.pretrained)
    except Exception as error:
        rule = f"is refused by {config_class.__name__}: {_said(error)}"
        return [Fault("model.config", str(options.config), rule, "correct the value it names")]
    known = {n for n in inspect.signature(config_class).parameters if not n.startswith("_")}
    known |= set(config_class.attribute_map)
    # Old names (rope_theta) are translated and leave no attribute; a typo leaves its own.
    stored = set(vars(config)) - known - _default_attributes(config_class)
    source = inspect.getsource(sys.modules[made.__module__])
    faults = []
    for key, value in options.config.items():
        # T5 reads config.decoder_start_token_id, which its config class does not declare.
        if key in stored and not re.search(rf"config\.{re.escape(key)}\b", source):
            rule = f"is not a setting of {config_class.__name__}"
            faults.append(Fault(f"model.config.{key}", str(value), rule, nearest(key, known)))
    if options.config.get("use_cache"):
        rule, remedy = "cannot be served: training keeps no cache", "leave it out"
        faults.append(Fault("model.config.use_cache", "True", rule, remedy))
    return faults


def _default_attributes(config_class: Any) -> set[str]:
    try:
        return set(vars(config_class()))
    except Exception:  # composite configs (EncoderDecoderConfig) have no default
        return set()


def _hugging_face_config(
    config_class: Any, settings: dict[str, Any], pretrained: str | None
) -> Any:
    saved = {}
    if pretrained is not None:
        saved = config_class.from_pretrained(pretrained, local_files_only=True).to_dict()
    # Not from_pretrained(**settings): it drops the settings it does not know, silently.
    config = config_class.from_dict({**saved, **settings})
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    for part in parts:
        if hasattr(part, "use_cache"):
            part.use_cache = False  # training needs none, and it cannot be exported
    return config


def hugging_face(
    architecture: str, config: dict[str, Any] | None = None, pretrained: str | None = None
) -> nn.Module:
    """The class `architecture` of transformers, with `config` over its config's defaults.

    Random weights from torch's global generator, or those in the folder `pretrained`, in fp32. On
    the meta device no weights are read.
    """
    import transformers

    made = getattr(transformers, architecture)
    settings = _hugging_face_config(made.config_class, config or {}, pretrained)
    if pretrained is None or torch.get_default_device().type == "meta":
        model = made(settings)
    else:
        model = made.from_pretrained(
            pretrained, config=settings, local_files_only=True, dtype=torch.float32
        )
    assert isinstance(model, nn.Module)
    return model


def build_model(options: ModelOptions) -> nn.Module:
    """The model on the current default device, in train mode.

    Seed torch, or enter `torch.device("meta")`, first. Raises ConfigError when the class cannot be
    had (see `load_class`), when its constructor raises, or when what it gives is not a module.
    """
    made = load_class(options)
    key, value, remedy = "model._target_", options.target, "correct its arguments or its code"
    if options.is_hugging_face:
        key, value, remedy = "model.architecture", options.class_name, "correct model.config"
    try:
        if options.is_hugging_face:
            model = hugging_face(options.class_name, options.config, options.pretrained)
        else:
            model = made(**options.arguments)
    except Exception as error:
        rule = f"cannot be built: {options.class_name} raised {_said(error)}"
        raise _refusal(key, value, rule, remedy) from error
    if not isinstance(model, nn.Module):
        rule = f"gives an object of type {type(model).__name__}, not a torch.nn.Module"
        remedy = "name a torch.nn.Module class, or a function that returns a module"
        raise _refusal(key, value, rule, remedy)
    return model.train()


def _forward_parameters(model: nn.Module) -> tuple[dict[str, inspect.Parameter], bool]:
    return _by_keyword(inspect.signature(model.forward).parameters)


def _takes_labels(model: nn.Module, loss: str) -> bool:
    """Whether the model is given the labels. Under cross_entropy they are the loss's, and a model
    that could do without them would only compute a second loss."""
    named, open_ended = _forward_parameters(model)
    if "labels" not in named:
        return open_ended and loss == "model"
    return loss == "model" or named["labels"].default is inspect.Parameter.empty


def forward_fields(
    model: nn.Module, options: ModelOptions, fields: tuple[InputField, ...]
) -> tuple[str, ...]:
    """The names of the data's fields that `LossModule` is to be given, in the data's order: those
    of the model's forward, and the labels where they are the loss's.

    Raises ConfigError with all faults: a field that neither forward nor the loss takes, a forward
    argument without a field, and a loss without labels.
    """
    named, open_ended = _forward_parameters(model)
    names = [field.name for field in fields]
    listing, owner = ", ".join(names), type(model).__name__
    by_loss = ("labels",) if options.loss == "cross_entropy" else ()
    faults = []
    for name in names:
        if name in named or open_ended or name in by_loss:
            continue
        if name == "labels":
            rule = f"needs a forward that takes labels, and that of {owner} takes none"
            faults.append(Fault("model.loss", "model", rule, "use model.loss=cross_entropy"))
        else:
            rule = f"is not an argument of the forward of {owner}"
            remedy = nearest(name, named) if named else "leave it out: forward takes no arguments"
            faults.append(Fault(f"data.{name}", "", rule, remedy))
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in (*names, *by_loss):
            rule = f"needs {name} in its forward, and the fields of the data are {listing}"
            remedy = f"name one of the data's fields {name}, or give it a default"
            faults.append(Fault("model._target_", options.target, rule, remedy))
    if by_loss and "labels" not in names:
        rule = f"needs labels, and the fields of the data are {listing}"
        remedy = "name the field of the labels labels, or use model.loss=model"
        faults.append(Fault("model.loss", "cross_entropy", rule, remedy))
    if faults:
        raise ConfigError(faults)
    return tuple(names)


class LossModule(nn.Module):
    """A model and its loss as one module: a batch by keyword in, a scalar out.

    The loss is the mean over the batch's samples, or unmasked tokens: the model's own, or the
    cross-entropy of its logits [..., classes] with `labels` [...], where -100 is left out. The
    model's parameter paths get the prefix `MODEL_PREFIX`.
    """

    def __init__(self, model: nn.Module, options: ModelOptions) -> None:
        super().__init__()
        self.model = model
        self.loss = options.loss
        self.takes_labels = _takes_labels(model, options.loss)
        named, open_ended = _forward_parameters(model)
        kind = inspect.Parameter.KEYWORD_ONLY
        names = dict.fromkeys([*named, "labels"])
        parameters = [inspect.Parameter(name, kind, default=None) for name in names]
        if open_ended:
            parameters.append(inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD))
        self.signature = inspect.Signature(parameters)

    @property
    def forward(self) -> Callable[..., Tensor]:  # type: ignore[override]
        """`forward(**batch)` under the names of the model's own arguments: torch.export gives
        each tensor its dynamic shape by the signature's names, and refuses a bare `**batch`."""

        def forward(**batch: Tensor) -> Tensor:
            return self._loss_of(batch)

        forward.__signature__ = self.signature  # type: ignore[attr-defined]
        return forward

    def _loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        given = {k: v for k, v in batch.items() if k != "labels" or self.takes_labels}
        output = self.model(**given)
        wanted = "loss" if self.loss == "model" else "logits"
        found = _member(output, wanted)
        owner = type(self.model).__name__
        if found is None or (wanted == "loss" and found.dim()):
            rule = f"finds no {wanted} in what {owner} returns ({type(output).__name__})"
            other = "cross_entropy" if wanted == "loss" else "model"
            remedy = f"return it as .{wanted}, or use model.loss={other}"
            raise _refusal("model.loss", self.loss, rule, remedy)
        if wanted == "loss":
            return found
        labels = batch["labels"]
        return functional.cross_entropy(
            found.flatten(0, -2).float(),  # a half-precision loss keeps three digits
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
        )


def _member(output: object, name: str) -> Tensor | None:
    """A tensor of a model's output: the attribute or key `name`, else the first tensor of a
    sequence, else the output itself."""
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if found is None and type(output) in (tuple, list):
        found = next((part for part in output if isinstance(part, Tensor)), None)  # type: ignore[attr-defined]
    if found is None and isinstance(output, Tensor):
        found = output
    return found if isinstance(found, Tensor) else None
