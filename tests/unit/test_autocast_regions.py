"""What a model computes outside of autocast, its graph computes outside as well."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from whale_train.models.export.export import export


class Angles(nn.Module):
    """As transformers' rotary embeddings: a product that 16 bits would make another one of."""

    def __init__(self, *, in_full: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 3.0, 8).unsqueeze(0))
        self.in_full = in_full

    def forward(self, positions: Tensor) -> Tensor:
        device = positions.device.type
        with maybe_autocast(device, enabled=False) if self.in_full else nullcontext():
            return (positions @ self.weight).cos()


@pytest.mark.parametrize("in_full", [True, False])
def test_a_region_without_autocast_is_one_in_the_graph(in_full: bool) -> None:
    model = Angles(in_full=in_full)
    positions = torch.arange(100.0).unsqueeze(1)
    graph, why = export(model, {"positions": positions})
    assert graph is not None, why
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = graph(positions=positions), model(positions)
    assert torch.equal(found, wanted)
    assert torch.equal(wanted, model(positions)) == in_full


def test_a_model_on_the_meta_device_has_its_regions() -> None:
    model = Angles(in_full=True).to("meta")
    graph, why = export(model, {"positions": torch.ones(100, 1, device="meta")})
    assert graph is not None, why
    assert any("wrap_with_autocast" in str(node.target) for node in graph.graph.nodes)


def test_it_is_as_before_after_an_export() -> None:
    export(Angles(in_full=True), {"positions": torch.ones(100, 1)})
    with maybe_autocast("meta", enabled=False) as context:
        assert context is None
