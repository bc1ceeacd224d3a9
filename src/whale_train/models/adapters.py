"""Low-rank adapters for a model's weights (LoRA, arXiv 2106.09685), made and named by peft.

The weights with adapters are frozen, and only the adapters are trained. This file owns the calls of
peft: the settings that peft knows, the model with adapters, and the folder that
`PeftModel.from_pretrained` opens.
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whale_train.errors import ConfigError, Fault, nearest
from whale_train.extras import how_to_install
from whale_train.hub import is_on_hub
from whale_train.models.options import ADAPTERS as KEY

WEIGHTS_FILE = "adapter_model.safetensors"  # the file that peft reads
# Values of `init_lora_weights` that leave the base weights unchanged. Other values change them, and
# the adapters are useless without the changed weights.
_STARTS = (True, False, "gaussian", "orthogonal")
# Settings that peft writes itself: the type of adapters, and the class of the model.
_NOT_SET_HERE = ("peft_type", "auto_mapping", "peft_version", "inference_mode", "runtime_config")


def adapter_faults(settings: Mapping[str, Any]) -> list[Fault]:
    """Return the faults of the settings of a LoraConfig that can be found without a model."""
    if find_spec("peft") is None:
        remedy = how_to_install("peft")
        return [Fault(KEY, str(settings), "needs peft, which is not installed", remedy)]
    from peft import LoraConfig

    known = [field.name for field in fields(LoraConfig) if field.name not in _NOT_SET_HERE]
    faults = [
        Fault(f"{KEY}.{key}", str(value), "is not a setting of LoraConfig", nearest(key, known))
        for key, value in settings.items()
        if key not in known
    ]
    start = settings.get("init_lora_weights", True)
    if start not in _STARTS:
        rule = "changes the weights that it adds to, which are not exported with the additions"
        remedy = f"use one of: {', '.join(str(x).lower() for x in _STARTS)}"
        faults.append(Fault(f"{KEY}.init_lora_weights", str(start), rule, remedy))
    return faults


def add_adapters(model: nn.Module, settings: Mapping[str, Any]) -> nn.Module:
    """Return `model` with adapters for the weights that the LoraConfig of `settings` selects.

    Only the adapters are trainable. They are drawn from torch's global generator. Raises
    ConfigError where peft refuses the settings.
    """
    from peft import LoraConfig, inject_adapter_in_model

    try:
        made: nn.Module = inject_adapter_in_model(LoraConfig(**settings), model)
    except Exception as error:
        rule = f"is refused by peft: {' '.join(str(error).split())}"
        raise ConfigError([Fault(KEY, str(dict(settings)), rule, "correct it")]) from error
    return made


def stacked_additions(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules in `model` whose stacked expert weights have adapters.

    peft computes the sum of a stack and its adapter anew in every call, by
    `torch.nn.utils.parametrize`.
    """
    if not has_adapters(model):
        return ()
    from peft.tuners.lora.layer import ParamWrapper

    wrappers = ((path, x) for path, x in model.named_modules() if isinstance(x, ParamWrapper))
    return tuple(path for path, x in wrappers if x.get_param().dim() > 2)


def has_adapters(model: nn.Module) -> bool:
    """Return whether `model` has adapters of peft, no matter what added them."""
    return isinstance(getattr(model, "peft_config", None), dict)


def adapter_names(model: nn.Module, paths: Iterable[str]) -> dict[str, str]:
    """Return the name in peft's files of every adapter among the tensors at `paths`, by path.

    `paths` are paths in `model`.
    """
    from peft import get_peft_model_state_dict

    held = {path: torch.empty(0) for path in paths}  # peft reads only the names
    path_of = {id(tensor): path for path, tensor in held.items()}
    named: dict[str, torch.Tensor] = get_peft_model_state_dict(
        model, state_dict=held, save_embedding_layers=False
    )
    prefix = "base_model.model."  # where a PeftModel has the model
    return {
        path_of[id(tensor)]: name if name.startswith(prefix) else prefix + name
        for name, tensor in named.items()
    }


def describe_adapters(model: Any, pretrained: str | None, folder: Path) -> None:
    """Write peft's config for the adapters of `model` into `folder`.

    `pretrained` names the weights that have adapters; None for random weights.
    """
    (config,) = model.peft_config.values()
    config = copy(config)
    config.inference_mode = True  # as peft saves it
    config.base_model_name_or_path = pretrained
    if pretrained is not None and is_on_hub(pretrained):
        name, _, revision = pretrained.partition("@")
        config.base_model_name_or_path, config.revision = name, revision or None
    if config.task_type is None:  # without it, peft needs the class that opens the weights
        made = type(model)
        config.auto_mapping = {
            "base_model_class": made.__name__,
            "parent_library": made.__module__,
        }
    if isinstance(config.target_modules, set):  # its order changes from run to run
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(folder)
