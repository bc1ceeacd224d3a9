"""Make a DeepSpeed engine clip by the gradient norm over all engines, instead of its own norm."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from whale_train.runtime.engines.base import CLIP_EPS


class StepNorm:
    """The norm by which DeepSpeed's `optimizer` of ZeRO `stage` clips in one step.

    devices: the device that the modules compute on, and the device of the optimizer's gradients
        (the host for an offloaded optimizer).
    global_norm: maps this engine's squared norm to the squared norm over all engines. Both are fp32
        scalars on the device of the modules.
    loss_scale: the scalar that the gradients are multiplied by; None: 1.
    """

    def __init__(
        self,
        optimizer: Any,
        stage: int,
        devices: tuple[torch.device, torch.device],
        global_norm: Callable[[Tensor], Tensor],
        loss_scale: Tensor | None,
    ) -> None:
        self._optimizer, self._stage = optimizer, stage
        self._device, self._gradients_device = devices
        self._global_norm = global_norm
        self._loss_scale = loss_scale
        self._factor: Tensor | None = None

    @contextmanager
    def taking_over(self, on_norm: Callable[[Tensor], None]) -> Iterator[None]:
        """Make steps of the optimizer in this context measure and scale by the global norm.

        `on_norm` is called with the norm after the norm is measured and before gradients are
        scaled. DeepSpeed computes the norm only inside its step, so the context replaces
        DeepSpeed's norm function and the function that scales gradients by the norm.
        """
        optimizer = self._optimizer
        name = "_get_norm_groups" if self._stage == 3 else "scaled_global_norm"
        own_norm = getattr(optimizer, name)

        def norm(*args: Any, **kwargs: Any) -> Any:
            measured = own_norm(*args, **kwargs)
            total = self._whole(measured if isinstance(measured, list) else [measured])
            on_norm(total)
            self._factor = self._scaling(total).to(self._gradients_device)
            total = total.to(self._gradients_device)
            return [total] if isinstance(measured, list) else total

        setattr(optimizer, name, norm)
        optimizer.unscale_and_clip_grads = self._scale
        try:
            yield
        finally:
            delattr(optimizer, name)
            del optimizer.unscale_and_clip_grads

    def _whole(self, parts: Sequence[Tensor | float]) -> Tensor:
        """Return the norm over all engines, given the norms of this engine's parts.

        DeepSpeed marks a norm that is not finite by -1; a part of -1 makes the result infinite.
        """
        norms = torch.stack([_on(self._device, x) for x in parts])
        norms = torch.where(norms < 0, torch.inf, norms)
        return self._global_norm((norms**2).sum()).sqrt()

    def _scaling(self, norm: Tensor) -> Tensor:
        """Return the factor that removes the loss scale from gradients of this scaled norm, and
        clips them."""
        factor = torch.ones_like(norm)
        if self._loss_scale is not None:
            factor = self._loss_scale.reciprocal()
            norm = norm * factor
        clip = self._optimizer.clip_grad
        return factor * (clip / (norm + CLIP_EPS)).clamp(max=1.0) if clip else factor

    def _scale(self, gradients: Any, _: Any) -> None:
        """Multiply gradients by the factor; this replaces DeepSpeed's `unscale_and_clip_grads`."""
        if self._stage == 3:  # the argument is the number of a sub-group
            gradients = [self._optimizer.fp32_partitioned_groups_flat[gradients].grad]
        for gradient in gradients:
            gradient.data.mul_(self._factor)


def _on(device: torch.device, norm: Tensor | float) -> Tensor:
    """Return a norm as an fp32 scalar on `device`. The norm of an offloaded optimizer may be a
    float."""
    if isinstance(norm, Tensor):
        return norm.to(device, torch.float32)
    return torch.full((), norm, device=device)
