"""Regions in which a forward turns autocast off, kept where there is none to turn off.

A model is exported outside of autocast and its graph run inside, so a region has to be in the
graph whether autocast is on or not. torch's own context always is. That of transformers
(`maybe_autocast`) leaves itself out where it would do nothing, and rotary angles would be products
of 16 bits.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def keeping_regions() -> Iterator[None]:
    """Inside it, what transformers computes outside of autocast says so."""
    generic = sys.modules.get("transformers.utils.generic")
    context = getattr(generic, "maybe_autocast", None)
    if context is None:
        yield
        return
    # Its code, as models have imported the function by name.
    before, context.__code__ = context.__code__, _always.__code__
    try:
        yield
    finally:
        context.__code__ = before


def _always(
    device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
) -> Any:
    import torch  # among the globals of the function whose code this becomes, it need not be

    # torch has no autocast for the meta device. Where the graph runs, it says its own.
    device = "cpu" if device_type == "meta" else device_type
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
