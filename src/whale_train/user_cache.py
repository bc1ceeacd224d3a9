"""Find the user's cache, which holds files that take long to make and can be made again."""

import os
from pathlib import Path

VARIABLE = "WHALE_TRAIN_CACHE"


def user_cache(kind: str) -> Path:
    """Return the folder of one kind of files in $WHALE_TRAIN_CACHE, or in the user's cache. The
    folder may be missing or read-only."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given) / kind
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "whale-train" / kind
