"""Weights that `model.pretrained` names: a folder, or a model of the Hugging Face hub.

Of the hub's models only weights in safetensors and descriptions are taken, never code or pickles,
into the cache that its own tools use.
"""

import re
import sys
from pathlib import Path
from typing import Any

from whale_train.errors import ConfigError, Fault

KEY = "model.pretrained"
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_DESCRIPTIONS = ["*.json", "*.txt", "*.jinja", "*.model"]  # tokenizers among them
_WEIGHTS = ["*.safetensors"]
_OTHER_FORMATS = ["*/*"]  # which some models have in folders of their own


def is_on_hub(pretrained: str) -> bool:
    """Return whether it can only be a model of the hub: `owner/name`, perhaps with `@revision`, and
    no folder here."""
    return _NAME.fullmatch(pretrained) is not None and not Path(pretrained).exists()


def fetch(pretrained: str, weights: bool = True) -> None:
    """Have what `pretrained` names on this machine, where it is a model of the hub: all of it, or
    without its `weights`. What is there already is not fetched again, and is enough where the hub
    is out of reach. Raises ConfigError where it cannot be had."""
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
    """Return the folder that `pretrained` names; of a model of the hub, the one that it was fetched
    to, now if it was not. Raises ConfigError where it cannot be had."""
    if not is_on_hub(pretrained):
        return Path(pretrained)
    # It is the same with weights or without, and would be missed where there are none yet.
    here: dict[str, Any] = {"local_files_only": True, "allow_patterns": _DESCRIPTIONS}
    try:
        return Path(_snapshot(pretrained, **here))
    except FileNotFoundError:  # huggingface_hub's LocalEntryNotFoundError is one
        fetch(pretrained)
        return Path(_snapshot(pretrained, **here))


def _snapshot(pretrained: str, **options: Any) -> str:
    from huggingface_hub import snapshot_download

    found = _NAME.fullmatch(pretrained)
    assert found is not None
    name, revision = found.groups()
    made: str = snapshot_download(
        name, revision=revision, ignore_patterns=_OTHER_FORMATS, **options
    )
    return made
