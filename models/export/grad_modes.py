"""Inference mode, which torch.export does not see, traced as what it does to gradients.

A graph keeps the regions of `torch.no_grad` and `torch.enable_grad`, which tell torch of themselves
when they are entered. `torch.inference_mode` sets the same switch past that, so that gradients
would flow through a teacher that a forward runs in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """Have `torch.inference_mode(mode)` set gradients to `not mode` and do nothing else inside.

    What is made in it is then an ordinary tensor. `torch.is_inference_mode_enabled` goes on telling
    a forward that it is in such a region.
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
