"""Weights that `model.pretrained` names: a folder, or a model of the Hugging Face hub.

Of the hub's models only weights in safetensors and descriptions are taken, never code or pickles,
into the cache that its own tools use.
"""

import re
import sys
from pathlib import Path
from typing import Any

from whale_train.bounds import MOST_BYTES, load_json
from whale_train.errors import ConfigError, Fault, shortened

KEY = "model.pretrained"
MOST_LAYERS = 10_000  # of a config of transformers, whose lists have an item for each
_LAYERS = re.compile(r"layer|block|depth|stage", re.IGNORECASE)
_SIZES = re.compile(r"size|dim|_id|width|length", re.IGNORECASE)
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_DESCRIPTIONS = ["*.json", "*.txt", "*.jinja", "*.model"]  # tokenizers among them
_WEIGHTS = ["*.safetensors"]
_OTHER_FORMATS = ["*/*"]  # which some models have in folders of their own


def is_on_hub(pretrained: str) -> bool:
    """Return whether `pretrained` can only be a model of the hub.

    That is `owner/name`, perhaps with `@revision`, where no such path exists on this machine.
    """
    return _NAME.fullmatch(pretrained) is not None and not Path(pretrained).exists()


def fetch(pretrained: str, weights: bool = True) -> None:
    """Download the model of the hub that `pretrained` names, unless it is on this machine.

    Without `weights`, only its descriptions are downloaded. Nothing happens for a folder. Files
    that are here already are not downloaded again, and are enough where the hub is out of reach.
    Raises ConfigError where the model cannot be had.
    """
    if not is_on_hub(pretrained):
        return
    try:
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        _snapshot(pretrained, allow_patterns=_DESCRIPTIONS + (_WEIGHTS if weights else []))
    except Exception as error:  # of the network, of who may see it, of the disk
        said = " ".join(f"{type(error).__name__}: {error}".split())
        rule = f"is no folder here, and cannot be had from the Hugging Face hub ({said})"
        remedy = "name a folder written by save_pretrained(), or a model of the hub"
        raise ConfigError([Fault(KEY, pretrained, rule, remedy)]) from error


def folder_of(pretrained: str) -> Path:
    """Return the folder that `pretrained` names.

    For a model of the hub it is the folder of its download, which is made if there is none. Raises
    ConfigError where the model cannot be had.
    """
    if not is_on_hub(pretrained):
        return Path(pretrained)
    # The folder is the same with weights or without; one without would be missed if asked for them.
    here: dict[str, Any] = {"local_files_only": True, "allow_patterns": _DESCRIPTIONS}
    try:
        return Path(_snapshot(pretrained, **here))
    except FileNotFoundError:  # huggingface_hub's LocalEntryNotFoundError is one
        fetch(pretrained)
        return Path(_snapshot(pretrained, **here))


def _snapshot(pretrained: str, **options: Any) -> str:
    from huggingface_hub import snapshot_download

    match = _NAME.fullmatch(pretrained)
    assert match is not None
    name, revision = match.groups()
    made: str = snapshot_download(
        name, revision=revision, ignore_patterns=_OTHER_FORMATS, **options
    )
    return made


def saved_configs(pretrained: str | None) -> dict[str, dict[str, Any]]:
    """Return the contents of the config files in the folder `pretrained`, by file name.

    They are all that `from_pretrained` may read for a config. Without a folder there are none.
    Raises ConfigError for a file that is no JSON mapping or passes a bound, and OSError.
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

    `key` is the name of `config` in the faults. Mappings inside it are searched too.
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
