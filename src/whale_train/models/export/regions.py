"""Preservation of regions of a forward that an export would lose.

* Regions without autocast. A model is exported outside of autocast and its graph is run inside, so
  that these regions have to be in the graph whether autocast is on or not. torch's own context
  always is. The context of transformers (`maybe_autocast`) leaves itself out where it would do
  nothing, and rotary angles would be products of 16 bits.
* Inference mode, which torch.export does not see. It is traced as what it does to gradients. A
  graph keeps the regions of `torch.no_grad` and `torch.enable_grad`, which notify torch when they
  are entered. `torch.inference_mode` sets the same switch without notifying torch, so that
  gradients would flow through a teacher that a forward runs in it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def keeping_regions() -> Iterator[None]:
    """Have transformers enter torch's autocast context always, also where it would do nothing."""
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


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Have `torch.inference_mode(mode)` set gradients to `not mode` and do nothing else inside.

    A tensor that is made in it is then an ordinary tensor. `torch.is_inference_mode_enabled` goes
    on telling a forward that it is in such a region.
    """
    entered: list[bool] = []

    def enter(self: Any) -> None:
        entered.append(self.mode)
        self._inference_mode_context = torch.set_grad_enabled(not self.mode)

    def leave(self: Any, *error: Any) -> None:
        entered.pop()
        self._inference_mode_context.__exit__(*error)

    region: Any = torch.inference_mode
    before = region.__enter__, region.__exit__, torch.is_inference_mode_enabled
    region.__enter__, region.__exit__ = enter, leave
    torch.is_inference_mode_enabled = lambda: bool(entered and entered[-1])
    try:
        yield
    finally:
        region.__enter__, region.__exit__, torch.is_inference_mode_enabled = before
