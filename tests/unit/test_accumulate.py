"""Plans whose ranks take their share of a step in several micro-batches, and LAMB's."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import Sketch, bert, classifier, gpt
from tests.unit.plan_requests import mixed, shipped, strategy_of
from tests.unit.plan_requests import training as plain_training
from tests.unit.test_sharing import FIXED, MODEL, ROOMY, cluster, refused, shared

from whale_train.errors import PlanError
from whale_train.strategies.cost.roofline import accumulation_time_s, zeros_time_s
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.plan.plan import Plan, RankPlan
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import consider, resolve
from whale_train.strategies.schedule.instructions import Kind
from whale_train.strategies.stages.analysis import ModelAnalysis


def training(global_batch: int, accumulate: int = 1, optimizer: str = "sgd") -> Training:
    return replace(plain_training(global_batch), accumulate=accumulate, optimizer=optimizer)


def planned(strategy: str, profile: ModelProfile, train: Training, devices: int = 16) -> Plan:
    return resolve(shipped(strategy), mixed().first(devices), profile, train)


def faults_of(strategy: Any, profile: ModelProfile, train: Training, devices: int = 4) -> list[str]:
    found = shipped(strategy) if isinstance(strategy, str) else strategy_of(strategy)
    with pytest.raises(PlanError) as error:
        resolve(found, mixed().first(devices), profile, train)
    return [str(fault) for fault in error.value.faults]


@pytest.mark.parametrize("strategy", ["dp", "zero1", "zero3"])
@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_micro_batches_are_the_share_as_evenly_as_it_goes(strategy: str, pieces: int) -> None:
    plan = planned(strategy, gpt(), training(500, pieces), 12)
    start = 0
    for rank, share in zip(plan.ranks, plan.task_graphs[0].shares, strict=True):
        sizes = [b - a for a, b in rank.samples]
        assert (rank.samples[0][0], rank.samples[-1][1]) == (start, start + share)
        assert all(a[1] == b[0] for a, b in zip(rank.samples, rank.samples[1:], strict=False))
        assert sum(sizes) == share
        assert max(sizes) - min(sizes) <= 1
        check_engine(rank, max(sizes), pieces)
        start += share
    assert start == 500


def check_engine(rank: RankPlan, size: int, pieces: int) -> None:
    assert (rank.micro_batch_size, rank.micro_batches) == (size, pieces)
    config = rank.deepspeed["0"]
    if config is not None:
        assert config["train_micro_batch_size_per_gpu"] == size
        assert config["gradient_accumulation_steps"] == 1  # ours are several backwards


@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_beside_a_split_head_all_ranks_share_every_micro_batch(pieces: int) -> None:
    plan = planned("hybrid_split_dp", gpt(), training(500, pieces), 12)
    shares = plan.task_graphs[0].shares
    ends, stop = [], 0
    for micro_batch in range(pieces):
        for rank in plan.ranks:
            start, end = rank.samples[micro_batch]
            assert start == stop < end
            stop = end
        ends.append(stop)
    assert stop == 500
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert max(sizes) - min(sizes) <= 1
    for rank, share in zip(plan.ranks, shares, strict=True):
        own = [end - start for start, end in rank.samples]
        assert sum(own) == share
        check_engine(rank, max(own), pieces)


def test_one_micro_batch_is_the_whole_share() -> None:
    plan = planned("dp", gpt(), training(500))
    assert plan == planned("dp", gpt(), plain_training(500))
    sizes = [stop - start for ((start, stop),) in (rank.samples for rank in plan.ranks)]
    assert tuple(sizes) == plan.task_graphs[0].shares


def test_a_rank_keeps_the_activations_of_a_micro_batch() -> None:
    whole, halves = (planned("dp", classifier(batch_norm=False), training(160, n)) for n in (1, 2))
    for one, other in zip(whole.ranks, halves.ranks, strict=True):
        a, b = one.memory_bytes, other.memory_bytes
        assert b.activations * one.micro_batch_size == a.activations * other.micro_batch_size
        assert (a.parameters, a.gradients, a.optimizer) == (b.parameters, b.gradients, b.optimizer)


@pytest.mark.parametrize(
    ("graph", "accumulate"),
    [
        ({"pipeline": {"stages": 2, "micro_batches": 4}}, 1),
        ({"pipeline": {"stages": 2, "micro_batches": 4, "schedule": "zero_bubble"}}, 1),
        ({"replicate": {}}, 4),
    ],
)
def test_every_backward_but_the_first_adds_to_gradients(graph: object, accumulate: int) -> None:
    devices, profile, train = mixed().first(2), gpt(), training(16, accumulate)
    found = consider(strategy_of({"graph": graph}), devices, ModelAnalysis(profile, "fp32"), train)
    flat = accumulate > 1
    plan, made = found.plan(), (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    for rank in plan.ranks:
        (held,) = (plan.task_graphs[number].parameters for number in rank.task_graphs)
        elements = {path: profile.parameter_by_path[path].elements for path in held}
        seconds = [
            task.seconds
            for task in found.step.spans.tasks
            if rank.rank in task.ranks and task.instruction and task.instruction.kind in made
        ]
        if seconds:  # another rank stands for it
            first, *others = seconds
            device = devices.devices[rank.rank]
            # Copies leave all of it to autograd; the stages of a pipeline, a norm's.
            own = {path: n for path, n in elements.items() if flat or path == "norm.weight"}
            added = accumulation_time_s(sum(own.values()), len(own), device, "fp32")
            table = 0.0 if flat else elements.get("token.weight", 0)
            zeros = zeros_time_s(table, device, "fp32")
            assert others == pytest.approx([first + added - zeros] * 3)


def test_only_the_first_backward_sees_all_rows_of_a_table() -> None:
    devices, graph = mixed().first(2), {"pipeline": {"stages": 2, "micro_batches": 4}}

    def backwards(rows: int) -> list[float]:
        profile = gpt(rows=rows)
        found = consider(
            strategy_of({"graph": graph}), devices, ModelAnalysis(profile, "fp32"), training(16)
        )
        return [
            task.seconds
            for task in found.step.spans.tasks
            if 0 in task.ranks and task.instruction and task.instruction.kind is Kind.BACKWARD
        ]

    (few, *others), (many, *same) = backwards(12), backwards(12_000)
    assert others == same
    zeros = zeros_time_s(4.0 * (12_000 - 12), devices.devices[0], "fp32")
    assert many - few == pytest.approx(zeros, rel=1e-6)


def test_a_split_head_sees_a_micro_batch_of_all_ranks() -> None:
    """Of 80 samples 40 are in a half, of which each of 8 equal ranks gives 5."""
    profile = classifier(batch_norm=False)
    whole, halves = (planned("hybrid_split_dp", profile, training(80, n), 8) for n in (1, 2))
    assert {rank.micro_batch_size for rank in whole.ranks} == {10}
    for one, other in zip(whole.ranks, halves.ranks, strict=True):
        assert other.memory_bytes.activations == one.memory_bytes.activations / 2
        assert other.micro_batch_size == 5


# As large as MODEL, and with a graph by which targets are counted.
COUNTED = replace(
    classifier(batch_norm=False),
    parameters=MODEL.parameters,
    activation_bytes=MODEL.activation_bytes,
    buffer_bytes=0,
)


def test_room_for_a_micro_batch_is_room_for_more_samples() -> None:
    # Four and a half samples at a time; at 8 to 1, the fast device would take 14 of 16.
    on = cluster((8e12, FIXED + 4.5e8), (1e12, ROOMY))
    for pieces, shares in ((1, (4, 12)), (2, (8, 8)), (3, (12, 4))):
        assert shared("replicate", COUNTED, on, training(16, pieces)).samples == shares
    small = cluster((1e12, FIXED + 4.5e8), (1e12, FIXED + 4.5e8))
    assert "use at most 16" in refused("replicate", COUNTED, small, training(20, 2))


def test_every_micro_batch_of_a_slow_device_has_a_sample() -> None:
    on = cluster((1e15, ROOMY), (1e9, ROOMY))
    assert shared("replicate", COUNTED, on, training(20, 4)).samples == (16, 4)
    evenly = shared("replicate", COUNTED, on, training(20, 4), balance="even")
    assert evenly.samples == (10, 10)


TOO_FEW = (
    "train.accumulate=5 cuts a device's share into micro-batches of none (train.global_batch=19 "
    "on 4 devices); use at most 4"
)


def test_what_cannot_be_accumulated() -> None:
    assert faults_of("dp", gpt(), training(19, 5)) == [TOO_FEW]
    (norm,) = faults_of("dp", classifier(), training(64, 2))
    assert norm.startswith("train.accumulate=2 cuts the batch, over all of which ")
    (nested,) = faults_of("pipeline", gpt(), training(64, 2))
    assert nested.startswith("train.accumulate=2 cuts the batch of a strategy whose micro-batches")
    unexported = replace(gpt(), graph=None, export_error="it looks at values")
    (counting,) = faults_of("dp", unexported, training(64, 2))
    assert counting.endswith("cannot be exported (it looks at values); use 1")
    local = replace(training(64, 2), sync_batchnorm=False)
    assert planned("dp", classifier(), local, 4).ranks[0].micro_batches == 2


def self_taught(frozen: bool) -> ModelProfile:
    """Targets that a second layer chooses, of which `frozen` leaves nothing to train."""
    s = Sketch()
    s.parameter("teacher.weight", "10 8")
    s.parameter("head.weight", "10 8")
    s.input("features", "B 8", "float32")
    s.call("chosen", "linear.default", "features", "teacher_weight", shape="B 10")
    s.call("targets", "argmax.default", "chosen", -1, shape="B", dtype="int64")
    s.call("logits", "linear.default", "features", "head_weight", shape="B 10", module="head")
    s.call("loss", "cross_entropy_loss.default", "logits", "targets", shape="")
    profile = s.profile("self_taught", "loss")
    if frozen:
        trained = tuple(p for p in profile.parameters if p.path != "teacher.weight")
        profile = replace(profile, parameters=trained)
    return profile


def test_targets_that_training_changes_cannot_be_counted() -> None:
    (fault,) = faults_of("dp", self_taught(frozen=False), training(64, 2))
    assert fault == (
        "train.accumulate=2 counts targets before it runs, and those of loss are computed from "
        "parameters; use 1"
    )
    assert planned("dp", self_taught(frozen=True), training(64, 2), 4).ranks[0].micro_batches == 2


@pytest.mark.parametrize(
    ("graph", "keys"),
    [
        ({"replicate": {"zero": 1}}, ["strategy.graph.replicate.zero=1"]),
        (
            {"replicate": {"of": {"pipeline": {"stages": [
                {"replicate": {"zero": 1}}, {"stage": {"of": {"replicate": {"zero": 1}}}},
            ]}}}},
            [
                "strategy.graph.replicate.of.pipeline.stages[0].replicate.zero=1",
                "strategy.graph.replicate.of.pipeline.stages[1].stage.of.replicate.zero=1",
            ],
        ),
    ],
)  # fmt: skip
def test_lamb_beside_zero(graph: Any, keys: list[str]) -> None:
    rule = "partitions parameters anywhere, and optimizer=lamb needs the norm of each"
    expected = [f"{key} {rule}; use zero: 0, or optimizer=adamw" for key in keys]
    assert (
        faults_of({"graph": graph}, bert(), training(64, optimizer="lamb"))[: len(keys)] == expected
    )


def test_lamb_keeps_what_adam_keeps() -> None:
    adam, lamb = (planned("dp", gpt(), training(64, optimizer=x), 4) for x in ("adam", "lamb"))
    assert lamb.ranks[0].memory_bytes == adam.ranks[0].memory_bytes
    assert lamb.ranks[0].deepspeed == {"0": None}


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize(
    "strategy", ["dp", "split", "hybrid_split_dp", "split_zero3", "pipeline", "zero_bubble"]
)
def test_what_ranks_do_in_a_step_of_several_backwards(strategy: str, pieces: int) -> None:
    piped = strategy in ("pipeline", "zero_bubble")
    train = replace(training(64, 1 if piped else pieces), precision="fp16")
    plan = planned(strategy, gpt(), train, 4 if piped or strategy == "split_zero3" else 2)
    if plan.pipeline is None:  # the model as it is
        assert not any(rank.accumulates or rank.keeps_casts for rank in plan.ranks)
        return
    several = pieces > 1 or piped
    assert plan.pipeline.one_backward != several
    for rank in plan.ranks:
        assert (rank.micro_batches > 1) == several
        assert rank.accumulates == several
        assert rank.keeps_casts == (several and plan.task_graphs[0].zero < 3)


def test_a_copy_that_is_recomputed_keeps_no_casts() -> None:
    graph = {"pipeline": {"stages": [{"stage": {"recompute": ["*"]}}, {"stage": {}}]}}
    train = replace(training(64), precision="fp16")
    plan = resolve(strategy_of({"graph": graph}), mixed().first(2), bert(), train)
    assert [rank.keeps_casts for rank in plan.ranks] == [False, True]
    assert all(rank.accumulates for rank in plan.ranks)
