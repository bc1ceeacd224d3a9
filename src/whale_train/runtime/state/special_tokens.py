"""Give the config of a new model the special tokens of the tokenizer that is saved with it.

A config with its class's defaults names tokens of another tokenizer (GPT-2's end of text is 50256),
so `generate` would never reach its end of text.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from whale_train.runtime.state.tensor_files import record_json

_TOKENS = ("bos_token", "eos_token", "pad_token")
_SPECIAL = ("tokenizer_config.json", "special_tokens_map.json")  # the first that names a token
_CONFIGS = ("config.json", "generation_config.json")


def special_ids(folder: Path) -> dict[str, int]:
    """Return the ids of the special tokens that a tokenizer's files name, by key such as
    `eos_token_id`.

    The result is empty for a tokenizer without a tokenizer.json.
    """
    content = _json(folder / "tokenizer.json")
    vocabulary = content.get("model", {}).get("vocab", {})
    numbers = dict(vocabulary) if isinstance(vocabulary, Mapping) else {}
    numbers |= {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    described = [_json(folder / name) for name in _SPECIAL]
    ids = {}
    for name in _TOKENS:
        given = next((x[name] for x in described if x.get(name) is not None), None)
        text = given.get("content") if isinstance(given, Mapping) else given
        if text in numbers:
            ids[f"{name}_id"] = int(numbers[text])
    return ids


def align_special_tokens(folder: Path, token_ids: Collection[str]) -> None:
    """Write the special tokens of the tokenizer in a model's folder into the model's configs.

    A token that the tokenizer does not have, and whose id is beyond the vocabulary, becomes null.
    Tokens that a config does not name are not added. Raises OSError.

    token_ids: keys that the user has set, such as `eos_token_id`, which are not changed.
    """
    ids = special_ids(folder)
    size = _json(folder / "config.json").get("vocab_size")
    for name in _CONFIGS:
        config = _json(folder / name)
        aligned = dict(config)
        for key in {f"{token}_id" for token in _TOKENS} & config.keys() - set(token_ids):
            is_beyond = isinstance(size, int) and isinstance(config[key], int)
            lost = None if is_beyond and config[key] >= size else config[key]
            aligned[key] = ids.get(key, lost)
        if ids and aligned != config:
            record_json(folder, name, aligned)


def _json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, or {} if it cannot be read."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}
