"""Weights of 16 bits under ZeRO: what they are added up in, begin with, and leave behind."""

import os
from typing import Any

import pytest
import torch
from tests.distributed.harness import run_ranks
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from whale_train.runtime.base.copies import Copies
from whale_train.runtime.engines.deepspeed import DeepSpeedEngine
from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.resolver.deepspeed_config import deepspeed_config, deepspeed_optimizer

WIDTH = 64
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Scaled(nn.Module):
    """A product with `weight`, then `scale` times what it gives."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH, WIDTH), weight))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) * self.scale


def engine_of(model: Scaled, precision: str, node: dict[str, Any]) -> DeepSpeedEngine:
    rank = dist.get_rank()
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    optimizer = deepspeed_optimizer("sgd", {"lr": 1.0}, False)
    config = deepspeed_config(Replicate("", **node), 1, 0.0, optimizer, True)
    assert config is not None
    copies = Copies(dist.group.WORLD, narrow=frozenset([model.weight]))
    return DeepSpeedEngine(model, copies, config, torch.device("cpu"), precision)


LARGE, SMALL, PIECES = 256.0, 0.5, 64


def summed(precision: str, node: dict[str, Any]) -> tuple[float, float, list[torch.dtype]]:
    """The least and the most that an element of the weight moves in a step of many micro-batches,
    whose gradients are LARGE and then SMALL; and the dtypes of its parameters."""
    engine = engine_of(Scaled(0.0), precision, node)
    for number in range(PIECES + 1):
        piece = torch.full((1, WIDTH), LARGE if number == 0 else SMALL)
        # Each copy's half of the mean over the samples of both.
        engine.backward([engine(piece).sum() / 2], [torch.ones(())])
    engine.finish_backward()
    engine.step(lambda squared: squared)
    dtypes = [parameter.dtype for parameter in engine._trained]
    moved = dict(engine.values())
    found = next(x for p, x in moved.items() if x is None or x.shape == (WIDTH, WIDTH))
    return (0.0, 0.0, dtypes) if found is None else (float(found.min()), float(found.max()), dtypes)


NODES: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 2},
    {"zero": 3},
    {"zero": 1, "offload_optimizer": "cpu"},
    {"zero": 2, "offload_optimizer": "cpu"},
    {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
]


BETWEEN = 1.0 + 2.0**-12  # of fp32; 16 bits have 1.0 there


def begun(precision: str, node: dict[str, Any]) -> list[float]:
    engine = engine_of(Scaled(BETWEEN), precision, node)
    (found, _) = (x for _, x in engine.values())
    return [] if found is None else [float(found.min()), float(found.max())]


def kept_copies(precision: str) -> int:
    """How many tensors as large as the weight autograd keeps of a forward under ZeRO 3 that are not
    the parameter itself, which ZeRO 3 takes away meanwhile."""
    engine = engine_of(Scaled(1.0), precision, {"zero": 3})
    weight = next(p for p in engine._trained if p.dtype != torch.float32)
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with hooks:
        engine(torch.ones(1, WIDTH))
    return sum(x.numel() >= WIDTH * WIDTH and x is not weight for x in kept)


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, str, str], Any]:
    """What rank 0 has of every function, precision and node."""
    found: dict[tuple[str, str, str], Any] = run_ranks(in_ranks, 2)[0]
    return found


def in_ranks() -> dict[tuple[str, str, str], Any]:
    found = {
        (function.__name__, precision, str(node)): function(precision, node)
        for function in (summed, begun)
        for precision in NARROW
        for node in NODES
    }
    return found | {("kept_copies", precision, ""): kept_copies(precision) for precision in NARROW}


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("node", NODES, ids=str)
def test_micro_batches_are_added_up_in_fp32(
    precision: str, node: dict[str, Any], seen: dict[tuple[str, str, str], Any]
) -> None:
    """256 and 64 halves: 288. In bf16, whose numbers are 2 apart there, the sum stands still at
    256."""
    least, most, dtypes = seen["summed", precision, str(node)]
    assert (least, most) == (-288.0, -288.0)
    assert set(dtypes) == {NARROW[precision], torch.float32}


@pytest.mark.parametrize("precision", NARROW)
@pytest.mark.parametrize("node", NODES, ids=str)
def test_the_master_begins_with_the_fp32_value(
    precision: str, node: dict[str, Any], seen: dict[tuple[str, str, str], Any]
) -> None:
    assert seen["begun", precision, str(node)] == [BETWEEN, BETWEEN]


@pytest.mark.parametrize("precision", NARROW)
def test_zero_3_keeps_no_whole_weight_for_the_backward(
    precision: str, seen: dict[tuple[str, str, str], Any]
) -> None:
    assert seen["kept_copies", precision, ""] == 0
