"""What blocks save goes to the host and comes back: the same bits, in less memory of the device."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.equality import Jobs
from tests.distributed.served import Served
from tests.distributed.test_parallel_strategies import Case, hf
from tests.distributed.test_rehearse import LARGE, rehearsed
from torch import nn

from whale_train.config import read_request
from whale_train.errors import PlanError
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.rehearsal import Rehearsal
from whale_train.runtime.base.host_copies import HostCopies
from whale_train.strategies.graph.saved_tensors import SENT_BYTES
from whale_train.strategies.plan.plan import Plan

# The products between the two linear layers of a block are large enough to be sent.
DROPS = hf(
    "BertForMaskedLM",
    "vocab_size: 67, hidden_size: 32, intermediate_size: 4096, num_hidden_layers: 3, "
    "num_attention_heads: 4, max_position_embeddings: 16",
)
SENT = "offload: {activations: cpu}"


@pytest.mark.parametrize(
    ("graph", "more"),
    [
        ("{{replicate: {{{0}}}}}", ()),
        ("{{replicate: {{{0}, recompute: full}}}}", ()),
        ("{{replicate: {{{0}, zero: 3}}}}", ()),
        ("{{replicate: {{degree: 1, {0}, of: {{split: {{}}}}}}}}", ()),
        pytest.param("{{replicate: {{{0}}}}}", ("train.compile=true",), marks=pytest.mark.full),
        pytest.param(
            "{{replicate: {{{0}}}}}",
            ("train.precision=bf16", "train.global_batch=16"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            "{{replicate: {{degree: 1, {0}, of: {{pipeline: {{stages: 2, micro_batches: 2}}}}}}}}",
            ("train.global_batch=16",),
            marks=pytest.mark.full,
        ),
    ],
)
def test_losses_and_weights_are_those_without(
    graph: str, more: tuple[str, ...], jobs: Jobs, arrays: Path
) -> None:
    case = Case("bert", "copies_again", "adamw", more)
    of_case = case.overrides(arrays)
    overrides = [*DROPS, *(x for x in of_case if not x.startswith(("model", "strategy.graph")))]
    here, there = (
        jobs.run([*overrides, f"strategy.graph={graph.format(value)}"])
        for value in ("modules: '*'", SENT)
    )
    assert here.losses == there.losses
    # Where a graph is cut into blocks, squares are added in another order.
    assert here.norms == pytest.approx(there.norms, rel=1e-6)
    for path, copies in here.values.items():
        for one, other in zip(copies, there.values[path], strict=True):
            assert np.array_equal(one, other), path
    assert "offloaded" not in str(here.plan)
    assert "bert.encoder.layer.2" in str(there.plan)


class Halves(nn.Module):
    """A block that saves views of one product, and a table that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 1024), nn.Linear(512, 64)
        self.register_buffer("table", torch.rand(512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.into(x).chunk(2, dim=-1)
        return x + self.out(gate.sigmoid() * value.tanh() @ self.table)


def test_a_storage_is_sent_once_and_weights_stay() -> None:
    torch.manual_seed(0)
    blocks = [Halves() for _ in range(3)]
    x = torch.rand(512, 64, requires_grad=True)
    copies = HostCopies(torch.device("cpu"))
    grads = []
    for sends in (False, True):
        y = x
        for block in blocks:
            if sends:
                with copies.sending((*block.parameters(), *block.buffers())):
                    y = block(y)
            else:
                y = block(y)
        y.square().sum().backward()
        grads.append([p.grad.clone() for block in blocks for p in block.parameters()])
        grads[-1].append(x.grad.clone())
        for tensor in (x, *(p for block in blocks for p in block.parameters())):
            tensor.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert 4 * 512 * 512 >= SENT_BYTES > 4 * 512 * 64
    # Of each block the sigmoid, the hyperbolic tangent, and the product that the last layer reads.
    assert copies.num_sent == 9


@pytest.mark.parametrize(
    ("graph", "batch", "within"),
    [
        (f"{{replicate: {{{SENT}}}}}", 64, 0.05),
        (f"{{replicate: {{recompute: full, {SENT}}}}}", 256, 0.05),
        (f"{{replicate: {{zero: 3, {SENT}}}}}", 64, 0.10),
        (f"{{replicate: {{degree: 1, {SENT}, of: {{split: {{}}}}}}}}", 64, 0.10),
    ],
)
def test_the_device_has_no_more_than_planned(
    graph: str, batch: int, within: float, served: Served
) -> None:
    more = [f"strategy.graph={graph}", "train.precision=fp32", f"train.global_batch={batch}"]
    said = Rehearsal.from_json(served.ask(rehearsed, overrides=[*LARGE, *more]))
    assert said.is_clean, [(kind.error, kind.place) for kind in said.kinds]
    kept = Rehearsal.from_json(
        served.ask(rehearsed, overrides=[*LARGE, more[0].replace(SENT, "modules: '*'"), *more[1:]])
    )
    for kind, other in zip(said.kinds, kept.kinds, strict=True):
        assert kind.peak == pytest.approx(kind.planned, rel=within), (kind.rank, kind.peak_bytes)
        assert kind.peak < other.peak


def planned(overrides: list[str]) -> str:
    """The plan of a request as JSON, or what it is refused with."""
    config = composed(rewritten([*overrides, "mode=plan"]))
    try:
        plan = resolve_request(read_request(config, {"hardware": "h", "strategy": "s"})).plan
    except PlanError as error:
        return str(error)
    return plan.to_json()


TIGHT = [*LARGE, "model.width=2048", "model.depth=24", "model.heads=16"]


def test_auto_offloads_the_fewest_first_blocks_that_fit(served: Served) -> None:
    graph = "strategy.graph={replicate: {offload: {activations: auto}}}"
    plans = {
        batch: Plan.from_json(
            served.ask(planned, overrides=[*TIGHT, graph, f"train.global_batch={batch}"])
        )
        for batch in (64, 4096)
    }
    assert plans[64].offloaded == ()
    sent = plans[4096].offloaded
    assert 0 < len(sent) < 24
    assert [path.rpartition(".")[2] for path in sent] == [str(x) for x in range(len(sent))]
    notes = {note.key: note for note in plans[4096].decisions}
    assert (
        notes["strategy.graph.replicate.offload.activations"].chosen == f"{len(sent)} of 24 blocks"
    )
    assert notes["strategy.graph.replicate.offload"].reason.startswith("activations on the hosts: ")
    everything = graph.replace("auto", "cpu")
    whole = Plan.from_json(
        served.ask(planned, overrides=[*TIGHT, everything, "train.global_batch=4096"])
    )
    assert len(whole.offloaded) == 24
    assert whole.predicted.step_time_s > plans[4096].predicted.step_time_s
    assert whole.ranks[0].memory_bytes.total < plans[4096].ranks[0].memory_bytes.total


def test_parts_beside_copies_are_refused(served: Served) -> None:
    graph = f"strategy.graph=[{{replicate: {{{SENT}}}}}, {{split: {{modules: head}}}}]"
    assert served.ask(planned, overrides=[*LARGE, graph]) == (
        "strategy.graph[0].replicate.offload.activations=cpu is for copies of whole layers, and "
        "here modules are split beside the copies; use none, and recompute: full"
    )
