"""Building of an `nn.Module` from the options of a model, after finding and checking its class.

It tells models apart by `_target_` only, and measures nothing (see `profile/measure.py`).
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
from whale_train.models.options import RULES, ModelOptions
from whale_train.models.weights.saved_configs import folder_of, saved_configs, too_many_layers
from whale_train.models.weights.shared_layers import share_layers
from whale_train.models.weights.stored import open_folder
from whale_train.own_code import TargetKind, argument_faults, importable, imported, said

MODULE = TargetKind("torch.nn.Module", lambda made: issubclass(made, nn.Module))
MOST_PARTS = 250_000  # modules and parameters of a model

# Names in transformers that look like a model's. Auto classes pick a class; they are none.
_MODEL_NAME = re.compile(r"(?!Auto|TF|Flax)\w*(For[A-Z]\w*|Model)(?<!PreTrainedModel)")
_NO_MODEL_NAME = re.compile(r"\w*(Config|Processor|Pil|Fast|Output|Tokenizer)|\w*Dataset\w*")

# `config.key`, also of self.config and decoder_config; getattr(config, "key", ...).
_READS_SETTING = re.compile(
    r"""config\.(\w+)\b(?!\s*\()|(?:get|has)attr\(\s*[\w.]*config,\s*["'](\w+)["']"""
)


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Make `folder` the first place modules are looked for, and tensors made on the way real.

    The default device is the CPU inside: a module first imported while a model is built on the meta
    device would keep its constants there for ever.
    """
    with importable(folder), torch.device("cpu"):
        yield


def _refusal(key: str, value: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError([Fault(key, value, rule, remedy)])


def load_class(options: ModelOptions) -> Callable[..., Any]:
    """Return the class or function that `options` names: a user's, or a model of transformers.

    The current working directory is importable. Constructor arguments, and for Hugging Face models
    the config and the folder of weights, are checked as well. Raises ConfigError with all faults
    found.
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
    """Return the faults of constructor arguments: those it does not know, and missing ones."""
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
        # The lazy module lists its names without importing the thousands of them.
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
    if faults:
        raise ConfigError(faults)
    return made  # type: ignore[return-value]


def _config_faults(made: Any, options: ModelOptions) -> list[Fault]:
    """Return the faults of `model.config`.

    They are keys that would be stored and never read, values that are refused, and `use_cache`.
    """
    config_class = made.config_class
    try:
        config = training_config(config_class, options.config, options.pretrained)
    except Exception as error:
        rule = f"is refused by {config_class.__name__}: {said(error)}"
        return [Fault("model.config", str(options.config), rule, "correct the value it names")]
    known = {n for n in inspect.signature(config_class).parameters if not n.startswith("_")}
    known |= set(config_class.attribute_map)
    # Old names (rope_theta) are translated and leave no attribute; a typo leaves its own.
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
    """Return the settings that the source of the model class `made` reads of a config.

    A setting counts whether a config class declares it or not: T5's decoder_start_token_id, and
    DebertaV2's share_att_key, whose default is in a getattr alone. The source is the module of the
    class, and modules of other models that it takes classes and functions from. The source that all
    models share is left out: it reads what only some of them act upon.
    """
    own = vars(sys.modules[made.__module__]).values()
    names = {x.__module__ for x in own if isinstance(x, type) or inspect.isfunction(x)}
    names = {name for name in names if name.startswith("transformers.models.")}
    sources = [inspect.getsource(sys.modules[name]) for name in sorted({made.__module__, *names})]
    pairs = _READS_SETTING.findall("\n".join(sources))
    return frozenset(first or second for first, second in pairs)


def _default_attributes(config_class: Any) -> set[str]:
    """Return the attributes of a config with its defaults; none of a class that has no default."""
    try:
        return set(vars(config_class()))
    except Exception:  # composite configs (EncoderDecoderConfig) have no default
        return set()


def given_config(config_class: Any, settings: dict[str, Any], pretrained: str | None) -> Any:
    """Return the config that a request gives a model of transformers.

    It is the config saved in `pretrained`, if that is given, with `settings` over it. Keys that the
    class does not know are kept.
    """
    saved = {}
    if pretrained is not None:
        folder = folder_of(pretrained)
        saved = config_class.from_pretrained(folder, local_files_only=True).to_dict()
    # Not from_pretrained(**settings): it drops the settings it does not know, silently.
    return config_class.from_dict({**saved, **settings})


def training_config(config_class: Any, settings: dict[str, Any], pretrained: str | None) -> Any:
    """Return the config that a model of transformers is trained with.

    It is `given_config`'s without the cache of generation.
    """
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

    Its config is `config` over the defaults or over that of `pretrained`. Its weights are random,
    from torch's global generator, or those that `pretrained` names, in fp32. With `adapters`, these
    weights are frozen and have adapters. On the meta device no weights are read. Raises ConfigError
    for a folder without weights that can be read.
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
    """Raised where a model's constructor registers more than MOST_PARTS modules and parameters."""


@contextmanager
def _bounded_parts() -> Iterator[None]:
    """Raise _TooManyPartsError inside where more than MOST_PARTS parts are registered.

    Parts are modules and parameters.
    """
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
    had (see `load_class`), when its constructor raises or makes too many modules and parameters,
    when a function gives no module though it says so, for parameters without a shape or of complex
    numbers, and when layers are to be shared and no two are alike.
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
