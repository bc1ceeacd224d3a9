"""Optimizer and parameters on the host: on one device too, and as much as does not fit."""

from pathlib import Path

import numpy as np
import pytest
from tests.distributed.equality import Jobs
from tests.distributed.served import Served
from tests.distributed.test_offloaded_activations import DROPS, planned
from tests.distributed.test_parallel_strategies import Case
from tests.distributed.test_rehearse import rehearsed

from whale_train.rehearsal import Rehearsal
from whale_train.strategies.plan.plan import Plan

DEVICE = "{name: small, flops: {fp32: 15e12, bf16: 60e12}, memory_bytes: 8e9, "
LARGE = [  # 1.6 billion parameters
    *("model=gpt", "model.width=1600", "model.depth=48", "model.heads=25", "data=text"),
    *("model.vocab_size=50257", "model.sequence_length=1024", "data.sequence_length=1024"),
    *("hardware=h200", "train.precision=bf16"),
    f"hardware.nodes=[{{count: 1, devices: 1, device: {DEVICE}"
    "memory_bandwidth_bytes_s: 4e11}, link: pcie3_x16}]",
]
AUTO = "strategy.graph={replicate: {recompute: auto, offload: auto}}"
HOST = "{replicate: {degree: 1, zero: 3, offload: {optimizer: cpu, parameters: cpu}}}"


def test_one_device_trains_from_its_host(jobs: Jobs, arrays: Path) -> None:
    of_case = Case("bert", "copies_again", "adamw", ("hardware.devices=1",)).overrides(arrays)
    common = [*DROPS, *(x for x in of_case if not x.startswith(("model", "strategy.graph")))]
    plain, hosted = (
        jobs.run([*common, f"strategy.graph={graph}"])
        for graph in ("{replicate: {degree: 1}}", HOST)
    )
    assert hosted.losses == pytest.approx(plain.losses, rel=1e-5)
    for path, (one, *_) in plain.values.items():
        assert np.allclose(one, hosted.values[path][0], rtol=1e-4, atol=1e-6), path


@pytest.mark.parametrize(
    ("batch", "zero", "parameters", "text"),
    [
        (4, 2, "none", "optimizer on the host, zero: 2"),
        (8, 3, "cpu", "optimizer and parameters on the host, zero: 3"),
    ],
)
def test_a_device_of_8_gb_trains_1_6_billion_parameters(
    batch: int, zero: int, parameters: str, text: str, served: Served
) -> None:
    overrides = [*LARGE, AUTO, f"train.global_batch={batch}"]
    plan = Plan.from_json(served.ask(planned, overrides=overrides))
    (graph,), chosen = plan.task_graphs, plan.decisions[0]
    assert (graph.zero, graph.offload) == (zero, {"optimizer": "cpu", "parameters": parameters})
    assert chosen.key == "strategy.graph.replicate.offload"
    assert (chosen.chosen, chosen.rejected) == (text, "none")
    assert "none is 18." in chosen.reason
    said = Rehearsal.from_json(served.ask(rehearsed, overrides=overrides))
    assert said.is_clean
    assert said.kinds[0].peak == pytest.approx(said.kinds[0].planned, rel=0.08)
    assert said.kinds[0].peak < 8e9
