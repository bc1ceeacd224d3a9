"""Models and tokenizers that a config names: a folder, or a model of the Hugging Face hub.

Of the hub's models only weights in safetensors and descriptions are taken, never code or pickles,
into the cache that its own tools use.
"""

import re
import sys
from pathlib import Path
from typing import Any

from whale_train.errors import ConfigError, Fault

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_DESCRIPTIONS = ["*.json", "*.txt", "*.jinja", "*.model"]  # tokenizers among them
_WEIGHTS = ["*.safetensors"]
_OTHER_FORMATS = ["*/*"]  # which some models have in folders of their own


def is_on_hub(pretrained: str) -> bool:
    """Return whether `pretrained` can only be a model of the hub.

    That is `owner/name`, perhaps with `@revision`, where no such path exists on this machine.
    """
    return _NAME.fullmatch(pretrained) is not None and not Path(pretrained).exists()


def fetch(key: str, pretrained: str, weights: bool = True) -> None:
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
        raise ConfigError([Fault(key, pretrained, rule, remedy)]) from error


def folder_of(key: str, pretrained: str) -> Path:
    """Return the folder that `pretrained` names.

    For a model of the hub it is the folder of its download, which is made if there is none. Raises
    ConfigError, with the config's `key`, where the model cannot be had.
    """
    if not is_on_hub(pretrained):
        return Path(pretrained)
    # The folder is the same with weights or without; one without would be missed if asked for them.
    here: dict[str, Any] = {"local_files_only": True, "allow_patterns": _DESCRIPTIONS}
    try:
        return Path(_snapshot(pretrained, **here))
    except FileNotFoundError:  # huggingface_hub's LocalEntryNotFoundError is one
        fetch(key, pretrained)
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
