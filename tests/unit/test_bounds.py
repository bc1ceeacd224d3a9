"""Estimates of a search are below the step, where collectives are trees of few bytes and rings of
many: on nodes of up to 8 devices, over repeated blocks."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.operation_graphs import Sketch
from tests.unit.plan_requests import shipped, strategy_of

from whale_train.errors import PlanError
from whale_train.strategies.auto import search
from whale_train.strategies.catalogue import DEVICES, LINKS
from whale_train.strategies.cluster import Cluster, Node
from whale_train.strategies.findings import Findings
from whale_train.strategies.operations import ModelProfile
from whale_train.strategies.resolve import consider, resolve
from whale_train.strategies.space import Arrangement, Candidate, Part
from whale_train.strategies.training import Training
from whale_train.strategies.used_bounds import UsedBounds

CLASSES = 64


def blocks(depth: int, rows: int, width: int) -> ModelProfile:
    """Residual blocks of two products on so many `rows` a sample, four times as wide between, and
    a head."""
    s = Sketch()
    for i in range(depth):
        s.parameter(f"blocks.{i}.up.weight", f"{4 * width} {width}")
        s.parameter(f"blocks.{i}.down.weight", f"{width} {4 * width}")
    s.parameter("head.weight", f"{CLASSES} {width}")
    h = s.input("x", f"B {rows} {width}", "float32")
    s.input("labels", f"B {rows}")
    narrow, wide, flops = f"B {rows} {width}", f"B {rows} {4 * width}", 8.0 * rows * width * width
    for i in range(depth):
        up, down = (f"blocks_{i}_{name}_weight" for name in ("up", "down"))
        module = f"blocks.{i}"
        s.call(f"u{i}", "linear.default", h, up, shape=wide, module=f"{module}.up", flops=flops)
        s.call(f"g{i}", "gelu.default", f"u{i}", shape=wide, module=module)
        s.call(
            f"d{i}", "linear.default", f"g{i}", down, shape=narrow, module=f"{module}.down",
            flops=flops,
        )  # fmt: skip
        h = s.call(f"r{i}", "add.Tensor", h, f"d{i}", shape=narrow, module=module)
    s.call(
        "logits", "linear.default", h, "head_weight", shape=f"B {rows} {CLASSES}", module="head",
        flops=2.0 * rows * width * CLASSES,
    )  # fmt: skip
    s.call("flat", "view.default", "logits", (-1, CLASSES), shape=f"{rows}B {CLASSES}")
    s.call("t", "view.default", "labels", (-1,), shape=f"{rows}B", dtype="int64")
    s.call("loss", "cross_entropy_loss.default", "flat", "t", shape="")
    return s.profile("blocks", "loss")


def node(device: str, link: str, count: int) -> Cluster:
    return Cluster("mine", (Node((DEVICES[device],) * count, LINKS[link]),), LINKS["ethernet_50g"])


def of(batch: int) -> Training:
    return Training(batch, "fp32", 0.0, "adamw", {"lr": 0.1})


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelProfile, Cluster, Training, Candidate]:
    """A node, repeated blocks, and a split of them over some of its devices, perhaps in stages and
    micro-batches."""
    shards = draw(st.integers(1, 8))
    stages = draw(st.integers(1, 8 // shards))
    copies = draw(st.integers(1, 8 // (shards * stages)))
    count = shards * stages * copies
    device = draw(st.sampled_from(["p100_pcie_16gb", "v100_sxm2_32gb", "h100_sxm_80gb"]))
    devices = node(device, draw(st.sampled_from(["pcie3_x16", "nvlink2"])), count)
    profile = blocks(
        draw(st.integers(max(2, stages), max(4, stages))),
        draw(st.sampled_from([8, 64, 128])),
        draw(st.sampled_from([512, 2048])),
    )
    pieces = draw(st.sampled_from([1, 2, 3, 4]))
    batch = copies * pieces * draw(st.integers(1, 24))
    arrangement = Arrangement(count, copies, (Part("", stages, 1, shards),))
    in_pipeline = stages > 1 or pieces > 1
    candidate = Candidate(arrangement, pieces if in_pipeline else 0)
    return profile, devices, of(batch), candidate


# A first block, whose input has no gradient, has one collective fewer than the others.
FIRST = (
    blocks(3, 64, 2048),
    node("h100_sxm_80gb", "pcie3_x16", 4),
    of(96),
    Candidate(Arrangement(4, 1, (Part("", 2, 1, 2),)), 4),
)


@settings(max_examples=60, deadline=None)
@example(FIRST)
@given(splits())
def test_no_split_is_faster_than_its_estimate(
    drawn: tuple[ModelProfile, Cluster, Training, Candidate],
) -> None:
    profile, devices, training, candidate = drawn
    findings = Findings(profile, "fp32")
    try:
        step = consider(strategy_of({"graph": candidate.graph()}), devices, findings, training).step
    except PlanError:
        return
    bounds = UsedBounds(findings, devices, training)
    assert bounds.least(candidate) <= step.spans.seconds * (1 + 1e-9)


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("link", ["pcie3_x16", "nvlink2"])
@pytest.mark.parametrize(("rows", "width"), [(64, 1024), (32, 2048)])
def test_an_estimate_of_a_whole_batch_is_close(
    count: int, link: str, rows: int, width: int
) -> None:
    devices, training = node("h100_sxm_80gb", link, count), of(64)
    findings = Findings(blocks(12, rows, width), "fp32")
    candidate = Candidate(Arrangement(count, 1, (Part("", 1, 1, count),)))
    step = consider(strategy_of({"graph": candidate.graph()}), devices, findings, training).step
    least = UsedBounds(findings, devices, training).least(candidate)
    assert 0.85 * step.spans.seconds < least <= step.spans.seconds * (1 + 1e-9)


@pytest.mark.parametrize("limit", [0.0, None])
def test_a_split_that_is_faster_than_copies_is_found(limit: float | None) -> None:
    """Where an all-reduce of the whole batch is a ring."""
    profile, devices, training = blocks(3, 16, 3072), node("h100_sxm_80gb", "pcie3_x16", 4), of(24)
    asked = strategy_of({"graph": "auto", "time_limit_s": limit}, "auto")
    found = search(asked, devices, Findings(profile, "fp32"), training)
    split = resolve(shipped("split"), devices, profile, training)
    assert found.considered.step.spans.seconds <= split.predicted.step_time_s * (1 + 1e-9)
