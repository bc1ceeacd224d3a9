"""Weights on the host: what is on the device of them, and for how long."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from whale_train.runtime.kernels.streamed_weights import StreamedWeights

CPU = torch.device("cpu")


def a_weight() -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(6, 4))


class Counted(StreamedWeights):
    """Counts how often the device gets a weight, in storage of its own."""

    fetched = 0

    def values(self, parameter: nn.Parameter) -> Tensor:
        self.fetched += 1
        return super().values(parameter).clone()


def is_gone(storage: Any) -> bool:
    return bool(storage.expired())


def test_nothing_stays_between_forward_and_backward() -> None:
    weight, x = a_weight(), torch.randn(3, 6, requires_grad=True)
    weights = Counted({weight: torch.float32}, CPU)
    with weights.keeping_none():
        there = weights.fetch(weight, weight)
        held = StorageWeakRef(there.untyped_storage())  # type: ignore[no-untyped-call]
        made = (x @ there).square().sum() + (x @ there.t().t()).sum()
        del there
    assert is_gone(held)
    made.backward()
    assert weights.fetched == 3  # once for the forward, and for each product's backward
    found = (weight.grad, x.grad)
    weight.grad = x.grad = None
    ((x @ weight).square().sum() + (x @ weight).sum()).backward()
    for gradient, expected in zip(found, (weight.grad, x.grad), strict=True):
        assert gradient is not None
        assert expected is not None
        torch.testing.assert_close(gradient, expected)


def test_other_values_are_kept_as_ever() -> None:
    weight, x = a_weight(), torch.randn(3, 6, requires_grad=True)
    weights = Counted({weight: torch.float32}, CPU)
    with weights.keeping_none():
        made = (x.exp() * x).sum() + weights.fetch(weight, weight).sum()
    made.backward()
    assert weights.fetched == 1
    torch.testing.assert_close(x.grad, (x.exp() * x + x.exp()).detach())


@pytest.mark.parametrize("fused", [True, False])
def test_sixteen_bits_follow_what_is_updated(fused: bool) -> None:
    weight = a_weight()
    weights = StreamedWeights({weight: torch.bfloat16}, CPU)
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=fused)
    first = weights.fetch(weight, weight)
    assert first.dtype == torch.bfloat16
    first.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    before = first.detach().clone()
    optimizer.step()
    weights.changed()
    after = weights.values(weight)
    assert torch.equal(after, weight.detach().bfloat16())
    assert not torch.equal(after, before)
