"""ZeRO 3 in pieces: many sub-groups, one fp32 partition; and initial weights that are let go."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.distributed.harness import run_ranks
from torch import distributed as dist
from torch import nn

from whale_train.models.options import ModelOptions
from whale_train.runtime.assembly.shared_init import build_shared, let_go, own_copy
from whale_train.runtime.base.copies import Copies
from whale_train.runtime.engines.deepspeed import DeepSpeedEngine, import_deepspeed
from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.resolver.deepspeed_config import deepspeed_config, deepspeed_optimizer

OPTIMIZER = {"lr": 0.05, "momentum": 0.9}
STEPS, BATCH = 3, 6
Trained = tuple[list[NDArray[Any]], list[float], list[bool]]


def test_deepspeed_asks_no_compiler_what_it_could_compile() -> None:
    deepspeed = import_deepspeed()
    assert import_module("deepspeed.comm.torch").build_shm_op() is None
    assert "__compatible_ops__" not in vars(deepspeed.ops)  # made by asking, for all operations


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def batch(step: int) -> torch.Tensor:
    torch.manual_seed(100 + step)
    return torch.randn(BATCH, 5)


def in_ranks(offload: dict[str, str]) -> Trained:
    """What rank 0 has after STEPS: the parameters, the squared norms of the steps' gradients, and
    for every sub-group whether its weights and what the optimizer updates are the same memory."""
    rank = dist.get_rank()
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    node = Replicate("", zero=3, **offload)  # type: ignore[arg-type]
    optimizer = deepspeed_optimizer("sgd", OPTIMIZER, False)
    config = deepspeed_config(node, BATCH // 2, 0.0, optimizer, True)
    assert config is not None
    config["zero_optimization"]["sub_group_size"] = 10
    engine = DeepSpeedEngine(net(), Copies(dist.group.WORLD), config, torch.device("cpu"), "fp32")
    norms: list[float] = []

    def noted(squared: torch.Tensor) -> torch.Tensor:
        norms.append(squared.item())
        return squared

    for step in range(STEPS):
        loss = engine(batch(step)[rank::2]).square().mean() / 2
        engine.backward([loss], [torch.ones(())])
        engine.finish_backward()
        engine.step(noted)
    values = [x.numpy().copy() for _, x in engine.values() if x is not None]
    stage_3 = engine._optimizer
    flats = zip(
        stage_3.fp32_partitioned_groups_flat, stage_3.fp16_partitioned_groups_flat, strict=True
    )
    return values, norms, [a.data_ptr() == b.data_ptr() for a, b in flats]


@pytest.mark.parametrize(
    "offload", [{}, {"offload_optimizer": "cpu"}, {"offload_parameters": "cpu"}], ids=str
)
def test_it_is_one_process_and_one_copy(offload: dict[str, str]) -> None:
    (values, norms, same), _ = run_ranks(in_ranks, 2, offload)
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), **OPTIMIZER)
    squared = []
    for step in range(STEPS):
        optimizer.zero_grad()
        module(batch(step)).square().mean().backward()
        squared.append(sum(p.grad.square().sum().item() for p in module.parameters()))
        optimizer.step()
    np.testing.assert_allclose(norms, squared, rtol=1e-5)
    for found, expected in zip(values, module.parameters(), strict=True):
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    # Partitions of 18, 4 + 32, 5 + 14 and 2 elements: a sub-group is closed at 10.
    assert same == [not offload] * 4


SHAPES = ((1024, 256), (2000, 512))


def mapped() -> list[str]:
    """The files of initial weights this process has mapped, one entry a mapping."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split("/")[-1] for line in lines if "whale-train-" in line]


def test_initial_weights_are_let_go_one_by_one() -> None:
    target = "whale_train.models.class_head.ClassHead"
    options = ModelOptions.from_mapping({"_target_": target, "num_classes": 2000})
    before = len(mapped())
    module = build_shared(options, 0)
    # 256 x 1024, 1024 x 512 and 512 x 2000 have files of their own, of 1 MiB and more.
    assert len(mapped()) - before == 4
    body, last = (max(module.parameters(), key=lambda p: p.shape == s) for s in SHAPES)
    values = last.detach().clone()
    own_copy([last], torch.device("cpu"))
    assert len(mapped()) - before == 3
    assert torch.equal(last, values)
    let_go(module)
    assert list(module.parameters()) == [last]
    # Who still has one may read it.
    assert len(mapped()) - before == 1
    assert body.abs().sum() > 0
