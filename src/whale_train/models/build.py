"""Build an `nn.Module` from the options of a model, after importing and checking its class.

Models are told apart by `_target_` only. Nothing is measured here (see `profile/measure.py`).
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedParameter

from whale_train.errors import ConfigError, Fault, nearest
from whale_train.extras import how_to_install
from whale_train.models.adapters import adapter_faults, add_adapters
from whale_train.models.nf4 import quantise_faults
from whale_train.models.options import RULES, ModelOptions
from whale_train.models.weights.saved_configs import folder_of, saved_configs, too_many_layers
from whale_train.models.weights.shared_layers import share_layers
from whale_train.models.weights.stored import open_folder
from whale_train.own_code import TargetKind, argument_faults, importable, imported, said

MODULE = TargetKind("torch.nn.Module", lambda made: issubclass(made, nn.Module))
MOST_PARTS = 250_000  # modules and parameters of a model

# Names in transformers that look like a model's. Auto classes choose a model and are not models.
_MODEL_NAME = re.compile(r"(?!Auto|TF|Flax)\w*(For[A-Z]\w*|Model)(?<!PreTrainedModel)")
_NO_MODEL_NAME = re.compile(r"\w*(Config|Processor|Pil|Fast|Output|Tokenizer)|\w*Dataset\w*")

# `config.key`, also of self.config and decoder_config; getattr(config, "key", ...).
_READS_SETTING = re.compile(
    r"""config\.(\w+)\b(?!\s*\()|(?:get|has)attr\(\s*[\w.]*config,\s*["'](\w+)["']"""
)


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Put `folder` first on the module search path, and make the CPU the default device.

    A module that is first imported while a model is built on the meta device would otherwise keep
    its constants on the meta device for ever.
    """
    with importable(folder), torch.device("cpu"):
        yield


def _refusal(key: str, value: str, rule: str, remedy: str) -> ConfigError:
    """Return a ConfigError with one fault."""
    return ConfigError([Fault(key, value, rule, remedy)])


def load_class(options: ModelOptions) -> Callable[..., Any]:
    """Return the class or function that `options` names: a user's, or a model of transformers.

    The current working directory is importable. Constructor arguments are checked, and for Hugging
    Face models also the config and the folder of weights. Raises ConfigError with all faults.
    """
    with _importable(os.getcwd()):
        if options.is_hugging_face:
            return _hugging_face_class(options)
        made = imported("model._target_", options.target, MODULE)
    faults = _argument_faults(made, options)
    if faults:
        raise ConfigError(faults)
    return made


def _argument_faults(made: Callable[..., Any], options: ModelOptions) -> list[Fault]:
    """Return the faults of constructor arguments: unknown and missing ones."""
    hint = ""
    if not options.target.startswith("whale_train."):
        # The keys of model=gpt, the default, stay when only _target_ is overridden.
        hint = "; model=custom starts without arguments"
    return argument_faults(made, options.arguments, "model", options.class_name, hint)


def _hugging_face_class(options: ModelOptions) -> Callable[..., Any]:
    """Return the model class of transformers that `options` names.

    Raises ConfigError with all faults.
    """
    name = options.architecture or ""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        rule, remedy = "needs transformers, which is not installed", how_to_install("transformers")
        raise _refusal("model.architecture", name, rule, remedy) from error
    faults = []
    try:
        made = getattr(transformers, name, None)
    except Exception as error:
        refused = f"cannot be imported: {said(error)}"
        faults.append(Fault("model.architecture", name, refused, "install what it needs"))
    if not faults and (not isinstance(made, type) or not getattr(made, "config_class", None)):
        # `dir` lists the names of the lazy module without importing the thousands of them.
        names = [n for n in dir(transformers) if _MODEL_NAME.fullmatch(n)]
        close = get_close_matches(name, [n for n in names if not _NO_MODEL_NAME.fullmatch(n)])
        like = f"did you mean {' or '.join(close)}?" if close else RULES["architecture"][1]
        faults.append(
            Fault("model.architecture", name, "is not a model class of transformers", like)
        )
    named, (rule, remedy) = options.pretrained, RULES["pretrained"]
    folder = None if named is None else folder_of(named)
    if folder is not None and not (folder / "config.json").is_file():
        rule = "is a folder without a config.json" if folder.is_dir() else rule
        faults.append(Fault("model.pretrained", str(named), rule, remedy))
    if not faults:
        faults = too_many_layers(options.config, "model.config")
        for name, saved in saved_configs(options.pretrained).items():
            faults += too_many_layers(saved, str(folder_of(str(named)) / name))
    if not faults:
        faults = _config_faults(made, options)
    if options.adapters is not None:
        faults += adapter_faults(options.adapters)
    if options.quantize is not None:
        faults += quantise_faults(options.adapters)
    if faults:
        raise ConfigError(faults)
    return made  # type: ignore[return-value]


def _config_faults(made: Any, options: ModelOptions) -> list[Fault]:
    """Return the faults of `model.config`: keys that no code reads, values that are refused, and
    `use_cache`."""
    config_class = made.config_class
    try:
        config = training_config(config_class, options.config, options.pretrained)
    except Exception as error:
        rule = f"is refused by {config_class.__name__}: {said(error)}"
        return [Fault("model.config", str(options.config), rule, "correct the value it names")]
    known = {n for n in inspect.signature(config_class).parameters if not n.startswith("_")}
    known |= set(config_class.attribute_map)
    # Old names (rope_theta) are translated and become no attribute. A typo becomes one.
    stored = set(vars(config)) - known - _default_attributes(config_class)
    undeclared = [key for key in options.config if key in stored]
    read = _read_settings(made) if undeclared else frozenset()
    faults = []
    for key, value in options.config.items():
        if key in undeclared and key not in read:
            rule = f"is not a setting of {config_class.__name__}"
            remedy = nearest(key, known | read)
            faults.append(Fault(f"model.config.{key}", str(value), rule, remedy))
    if options.config.get("use_cache"):
        rule, remedy = "cannot be served: training keeps no cache", "leave it out"
        faults.append(Fault("model.config.use_cache", "True", rule, remedy))
    return faults


def _read_settings(made: type) -> frozenset[str]:
    """Return the settings that the source of the model class `made` reads from its config.

    Undeclared settings are included: T5's decoder_start_token_id, and DebertaV2's share_att_key,
    whose default is in a getattr alone. The source is the module of the class, and the modules of
    other models whose classes and functions it uses. The source that all models share is left out:
    it reads settings that only some models act upon.
    """
    own = vars(sys.modules[made.__module__]).values()
    names = {x.__module__ for x in own if isinstance(x, type) or inspect.isfunction(x)}
    names = {name for name in names if name.startswith("transformers.models.")}
    sources = [inspect.getsource(sys.modules[name]) for name in sorted({made.__module__, *names})]
    pairs = _READS_SETTING.findall("\n".join(sources))
    return frozenset(first or second for first, second in pairs)


def _default_attributes(config_class: Any) -> set[str]:
    """Return the attributes of the default config of a class; none where the class has no
    default."""
    try:
        return set(vars(config_class()))
    except Exception:  # composite configs (EncoderDecoderConfig) have no default
        return set()


def given_config(config_class: Any, settings: dict[str, Any], pretrained: str | None) -> Any:
    """Return the config that a request gives a model of transformers.

    It is the config saved in `pretrained`, if that is given, updated with `settings`. Keys that the
    class does not know are kept.
    """
    saved = {}
    if pretrained is not None:
        folder = folder_of(pretrained)
        saved = config_class.from_pretrained(folder, local_files_only=True).to_dict()
    # Not from_pretrained(**settings): it drops the settings it does not know, silently.
    return config_class.from_dict({**saved, **settings})


def training_config(config_class: Any, settings: dict[str, Any], pretrained: str | None) -> Any:
    """Return the config that a model of transformers is trained with: `given_config` without the
    cache of generation."""
    config = given_config(config_class, settings, pretrained)
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    for part in parts:
        if hasattr(part, "use_cache"):
            part.use_cache = False  # training needs none, and it cannot be exported
    return config


def hugging_face(
    architecture: str,
    config: dict[str, Any] | None = None,
    pretrained: str | None = None,
    adapters: dict[str, Any] | None = None,
) -> nn.Module:
    """Return a model of the class `architecture` of transformers.

    The model's config is the default, or the one of `pretrained`, updated with `config`. The
    weights are fp32: random ones from torch's global generator, or those that `pretrained` names.
    With `adapters`, these weights are frozen and have adapters. On the meta device no weights are
    read. Raises ConfigError for a folder without readable weights.
    """
    import transformers

    made = getattr(transformers, architecture)
    settings = training_config(made.config_class, config or {}, pretrained)
    if pretrained is None or torch.get_default_device().type == "meta":
        model = made(settings)
    else:
        model, _ = open_folder(made, settings, folder_of(pretrained))
    assert isinstance(model, nn.Module)
    return model if adapters is None else add_adapters(model, adapters)


class _TooManyPartsError(Exception):
    """A model's constructor has registered more than MOST_PARTS modules and parameters."""


@contextmanager
def _bounded_parts() -> Iterator[None]:
    """Raise _TooManyPartsError where more than MOST_PARTS modules and parameters are registered in
    the context."""
    left = MOST_PARTS

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise _TooManyPartsError

    handles = [
        register_module_module_registration_hook(count),
        register_module_parameter_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def build_model(options: ModelOptions) -> nn.Module:
    """Return the model on the current default device, in train mode.

    Seed torch, or enter `torch.device("meta")`, first. Raises ConfigError when the class cannot be
    imported (see `load_class`), when the constructor raises or makes too many modules and
    parameters, when a function does not return a module, for parameters without a shape or of
    complex numbers, and when layers are to be shared and no two are alike.
    """
    made = load_class(options)
    key, value, remedy = "model._target_", options.target, "correct its arguments or its code"
    if options.is_hugging_face:
        key, value, remedy = "model.architecture", options.class_name, "correct model.config"
    try:
        with _bounded_parts():
            if options.is_hugging_face:
                given = (options.config, options.pretrained, options.adapters)
                model = hugging_face(options.class_name, *given)
            else:
                model = made(**options.arguments)
    except ConfigError:
        raise
    except _TooManyPartsError:
        rule = f"makes more than {MOST_PARTS:,} modules and parameters"
        raise _refusal(key, value, rule, "use fewer layers") from None
    except Exception as error:
        rule = f"cannot be built: {options.class_name} raised {said(error)}"
        raise _refusal(key, value, rule, remedy) from error
    if not isinstance(model, nn.Module):
        rule = f"gives an object of type {type(model).__name__}, not a torch.nn.Module"
        raise _refusal(key, value, rule, MODULE.remedy)
    for path, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            rule = f"has a parameter without a shape before its first forward ({path})"
            raise _refusal(key, value, rule, "give its sizes, as to nn.Linear for nn.LazyLinear")
        if parameter.is_complex():
            rule = f"has a parameter of complex numbers ({path})"
            remedy = "keep real and imaginary parts in a real one, and use torch.view_as_complex"
            raise _refusal(key, value, rule, remedy)
    if options.share_layers:
        share_layers(model)
    return model.train()
