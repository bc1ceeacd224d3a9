"""What DeepSpeed clips by where gradients and norms are on two kinds of device: on fake tensors,
which need no GPU and refuse to be mixed as a GPU's would."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from whale_train.runtime.engines.deepspeed_norm import StepNorm

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _optimizer(stage: int, own_norm: Tensor | float, gradient: Tensor) -> Any:
    """What StepNorm takes of DeepSpeed's optimizers: its norm, and where gradients are."""
    if stage == 3:
        partition = SimpleNamespace(grad=gradient)
        return SimpleNamespace(
            clip_grad=1.0,
            _get_norm_groups=lambda: [own_norm],
            fp32_partitioned_groups_flat=[partition],
        )
    return SimpleNamespace(clip_grad=1.0, scaled_global_norm=lambda: own_norm)


def _step(optimizer: Any, stage: int, gradient: Tensor) -> Any:
    """As DeepSpeed: measure, then scale the first group's gradients."""
    measure = optimizer._get_norm_groups if stage == 3 else optimizer.scaled_global_norm
    norm = measure()
    optimizer.unscale_and_clip_grads(0 if stage == 3 else [gradient], norm)
    return norm[0] if stage == 3 else norm


def _devices_seen(norm: StepNorm, optimizer: Any, stage: int, gradient: Tensor) -> set[str]:
    seen = list[Tensor]()
    with norm.taking_over(seen.append):
        seen.append(_step(optimizer, stage, gradient))
    return {str(x.device) for x in seen}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("is_scaled", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("own_is", ["on the host", "a number", "on the GPU"])
def test_gradients_on_the_host_are_clipped_by_a_norm_of_the_gpu(
    stage: int, is_scaled: bool, own_is: str
) -> None:
    with FakeTensorMode():
        gradient = torch.ones(4, device=CPU)
        own: Tensor | float = 2.0
        if own_is != "a number":
            own = torch.ones((), device=CPU if own_is == "on the host" else CUDA)
        scale = torch.ones((), device=CUDA) if is_scaled else None
        optimizer = _optimizer(stage, own, gradient)
        others = torch.ones((), device=CUDA)
        norm = StepNorm(optimizer, stage, (CUDA, CPU), lambda x: x + others, scale)
        assert _devices_seen(norm, optimizer, stage, gradient) == {"cuda:0", "cpu"}


def test_mixing_the_two_devices_is_refused_here() -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="same device"):
        torch.ones(4).mul_(torch.ones((), device=CUDA))


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_clipped_by_the_norm_over_all_engines(stage: int) -> None:
    gradient = torch.tensor([3.0, 4.0])
    optimizer = _optimizer(stage, torch.tensor(5.0), gradient)
    norm = StepNorm(optimizer, stage, (CPU, CPU), lambda own: own + 144.0, None)
    with norm.taking_over(lambda _: None):
        assert _step(optimizer, stage, gradient) == pytest.approx(13.0)
    torch.testing.assert_close(gradient, torch.tensor([3.0, 4.0]) / 13)
    assert not hasattr(optimizer, "unscale_and_clip_grads")
