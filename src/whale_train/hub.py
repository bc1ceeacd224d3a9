"""Fetch the models and tokenizers that a config names: a folder, or a model of the Hugging Face
hub.

Only safetensors weights and descriptions are downloaded, never code or pickles. They go into the
cache of the hub's own tools.
"""

import re
import sys
from pathlib import Path
from typing import Any

from whale_train.errors import ConfigError, Fault

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_DESCRIPTIONS = ["*.json", "*.txt", "*.jinja", "*.model"]  # tokenizers among them
_WEIGHTS = ["*.safetensors"]
_OTHER_FORMATS = ["*/*"]  # some models have other formats in folders of their own


def is_on_hub(pretrained: str) -> bool:
    """Return whether `pretrained` can only be a model of the hub.

    A hub model is `owner/name`, perhaps with `@revision`, where this machine has no such path.
    """
    return _NAME.fullmatch(pretrained) is not None and not Path(pretrained).exists()


def fetch(key: str, pretrained: str, weights: bool = True) -> None:
    """Download the model of the hub that `pretrained` names, unless this machine has it.

    Does nothing for a folder. Without `weights`, only the descriptions are downloaded. Files in the
    cache are not downloaded again, and are enough where the hub is out of reach. Raises
    ConfigError, with the config's `key`, where the model cannot be downloaded.
    """
    if not is_on_hub(pretrained):
        return
    try:
        from huggingface_hub.utils import disable_progress_bars

        if not sys.stderr.isatty():
            disable_progress_bars()
        _snapshot(pretrained, allow_patterns=_DESCRIPTIONS + (_WEIGHTS if weights else []))
    except Exception as error:  # of the network, of access rights, of the disk
        said = " ".join(f"{type(error).__name__}: {error}".split())
        rule = f"is no folder here, and cannot be had from the Hugging Face hub ({said})"
        remedy = "name a folder written by save_pretrained(), or a model of the hub"
        raise ConfigError([Fault(key, pretrained, rule, remedy)]) from error


def folder_of(key: str, pretrained: str) -> Path:
    """Return the folder that `pretrained` names.

    A model of the hub is downloaded where the cache does not have it, and the folder is in the
    cache. Raises ConfigError, with the config's `key`, where the model cannot be downloaded.
    """
    if not is_on_hub(pretrained):
        return Path(pretrained)
    # Weights do not change the folder's name. Asking for them would miss a folder without weights.
    here: dict[str, Any] = {"local_files_only": True, "allow_patterns": _DESCRIPTIONS}
    try:
        return Path(_snapshot(pretrained, **here))
    except FileNotFoundError:  # huggingface_hub's LocalEntryNotFoundError is one
        fetch(key, pretrained)
        return Path(_snapshot(pretrained, **here))


def _snapshot(pretrained: str, **options: Any) -> str:
    """Return the folder of a snapshot of `owner/name[@revision]` in the hub's cache. `options` go
    to `huggingface_hub.snapshot_download`."""
    from huggingface_hub import snapshot_download

    match = _NAME.fullmatch(pretrained)
    assert match is not None
    name, revision = match.groups()
    folder: str = snapshot_download(
        name, revision=revision, ignore_patterns=_OTHER_FORMATS, **options
    )
    return folder
