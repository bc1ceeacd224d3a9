"""Find the user's cache, which keeps what takes long to make and can be made again."""

import os
from pathlib import Path

VARIABLE = "WHALE_TRAIN_CACHE"


def user_cache(kind: str) -> Path:
    """Return the folder of one kind of files in $WHALE_TRAIN_CACHE, or in the user's cache. It may
    not be there, and may be one that nothing can be written to."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given) / kind
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "whale-train" / kind
