"""Read the configs in a folder of pretrained weights, within bounds."""

import re
from pathlib import Path
from typing import Any

from whale_train.bounds import MOST_BYTES, load_json
from whale_train.errors import ConfigError, Fault, shortened
from whale_train.hub import folder_of as folder_of_hub

KEY = "model.pretrained"
MOST_LAYERS = 10_000  # of a config of transformers, whose lists have an item for each layer
_LAYERS = re.compile(r"layer|block|depth|stage", re.IGNORECASE)
_SIZES = re.compile(r"size|dim|_id|width|length", re.IGNORECASE)


def folder_of(pretrained: str) -> Path:
    """Return the folder that `model.pretrained` names. Raises ConfigError where it cannot be
    downloaded."""
    return folder_of_hub(KEY, pretrained)


def saved_configs(pretrained: str | None) -> dict[str, dict[str, Any]]:
    """Return the contents of the config files in the folder `pretrained`, by file name.

    They are all files that `from_pretrained` may read for a config; none where `pretrained` is
    None. Raises ConfigError for a file that is not a JSON mapping or exceeds a bound, and OSError.
    """
    paths = sorted(folder_of(pretrained).glob("config*.json")) if pretrained else []
    configs: dict[str, dict[str, Any]] = {}
    for path in paths:
        content = load_json(path, MOST_BYTES)
        if not isinstance(content, dict):
            rule, remedy = "is no mapping", "use a folder written by save_pretrained()"
            raise ConfigError([Fault(str(path), "", rule, remedy)])
        configs[path.name] = content
    return configs


def too_many_layers(config: Any, key: str) -> list[Fault]:
    """Return a fault for every number of layers in `config` that is above MOST_LAYERS.

    `key` is the name of `config` in the faults. Nested mappings are searched too.
    """
    faults = []
    for name, value in config.items() if isinstance(config, dict) else ():
        inside = f"{key}.{name}"
        if isinstance(value, dict):
            faults += too_many_layers(value, inside)
        elif _LAYERS.search(str(name)) and not _SIZES.search(str(name)):
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(n, int | float) and n > MOST_LAYERS for n in numbers):
                rule = f"is more than the {MOST_LAYERS:,} layers that are planned for"
                shown = shortened(str(value))
                faults.append(Fault(inside, shown, rule, f"use at most {MOST_LAYERS}"))
    return faults
