"""Turn short texts into token numbers while samples are read, by a tokenizer's `tokenizer.json`.

Long texts are tokenised once, into a store (`make_store.py`), by a process of their own. A caption
is tokenised where it is read, and the package tokenizers is imported with the first of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whale_train.errors import ConfigError, Fault
from whale_train.extras import how_to_install
from whale_train.hub import folder_of
from whale_train.own_code import said

TOKENIZER_KEY = "data.tokenizer"
Encoder = Callable[[str], NDArray[np.int64]]


def tokenizer_folder(tokenizer: str) -> Path:
    """Return the folder that `data.tokenizer` names. Raises ConfigError where there is none."""
    folder = folder_of(TOKENIZER_KEY, tokenizer)
    if not folder.is_dir():
        rule = "is no folder, and no name of the Hugging Face hub (owner/name)"
        remedy = "name a folder that a tokenizer's save_pretrained() wrote"
        raise ConfigError([Fault(TOKENIZER_KEY, tokenizer, rule, remedy)])
    return folder


def text_encoder(folder: Path) -> tuple[Encoder, int]:
    """Return the function that makes token numbers of a text, and the largest number plus one.

    The special tokens that the tokenizer puts around a text are among the result, int64
    `[tokens]`. Nothing is truncated or padded, whatever the file says. Raises ConfigError where
    `folder` has no tokenizer.json, or tokenizers is not installed.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        rule, remedy = "has no tokenizer.json", "save a fast tokenizer with save_pretrained()"
        raise ConfigError([Fault(TOKENIZER_KEY, str(folder), rule, remedy)])
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        if error.name != "tokenizers":
            raise
        rule = "needs the package tokenizers, which is not installed"
        remedy = how_to_install("transformers")
        raise ConfigError([Fault(TOKENIZER_KEY, str(folder), rule, remedy)]) from error
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:
        rule = f"is no tokenizer ({said(error)[:300]})"
        raise ConfigError([Fault(TOKENIZER_KEY, str(folder), rule, "save it again")]) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1

    def encode(text: str) -> NDArray[np.int64]:
        return np.array(tokenizer.encode(text).ids, np.int64)

    return encode, vocabulary
