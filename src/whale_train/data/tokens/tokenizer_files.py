"""Find and copy the files of a transformers tokenizer."""

import shutil
from pathlib import Path

_PATTERNS = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "chat_template*"),
)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in `folder`, by name; none where the folder has no
    tokenizer."""
    matching = {path for pattern in _PATTERNS for path in folder.glob(pattern)}
    return sorted(path for path in matching if path.is_file())


def copy_tokenizer(folder: Path, target: Path) -> None:
    """Copy the files of the tokenizer in `folder` into the folder `target`. Raises OSError."""
    for path in tokenizer_files(folder):
        shutil.copy(path, target / path.name)
