"""Preserve regions of a forward that an export would lose.

* Regions without autocast. A model is exported outside of autocast, and its graph runs inside, so
  that the graph must have these regions whether autocast is on or not. torch's own context is
  always recorded. The context of transformers (`maybe_autocast`) is skipped where it would do
  nothing, and rotary angles would then be 16-bit products.
* Inference mode, which torch.export does not see. It is traced by its effect on gradients. A graph
  keeps the regions of `torch.no_grad` and `torch.enable_grad`, which notify torch when they are
  entered. `torch.inference_mode` sets the same switch without notifying torch, so that gradients
  would flow through a teacher model that a forward runs inside of it.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def keeping_regions() -> Iterator[None]:
    """Make transformers always enter torch's autocast context, even where it would do nothing."""
    generic = sys.modules.get("transformers.utils.generic")
    context = getattr(generic, "maybe_autocast", None)
    if context is None:
        yield
        return
    # The code is replaced, and not the function, because models have imported it by name.
    before, context.__code__ = context.__code__, _always.__code__
    try:
        yield
    finally:
        context.__code__ = before


def _always(
    device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
) -> Any:
    """Return torch's autocast context. Its code replaces that of transformers' `maybe_autocast`."""
    import torch  # the globals of transformers' function may lack it

    # torch has no autocast for the meta device. A rank replaces the device when it runs the graph.
    device = "cpu" if device_type == "meta" else device_type
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Make `torch.inference_mode(mode)` only set gradients to `not mode` inside of the context.

    Tensors made in it are ordinary tensors. `torch.is_inference_mode_enabled` still tells a forward
    whether it is in such a region.
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
