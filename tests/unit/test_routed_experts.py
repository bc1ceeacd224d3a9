"""Experts beside copies: what is found in a graph, planned of it, found by search, and refused."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import gpt as dense
from tests.unit.plan_requests import strategy_of, training

from whale_train.errors import PlanError
from whale_train.models.options import ModelOptions
from whale_train.models.profile.measure import profile_model
from whale_train.strategies.grammar.nodes import read_strategy
from whale_train.strategies.graph.operation_graph import (
    InputField,
    ModelProfile,
    OperationGraph,
    Ref,
)
from whale_train.strategies.hardware.cluster import Cluster, Device, Link, Node
from whale_train.strategies.layouts.segment import Segment
from whale_train.strategies.memory.host_memory import host_bytes
from whale_train.strategies.plan.plan import Plan
from whale_train.strategies.resolver.resolve import resolve
from whale_train.strategies.search.search import search
from whale_train.strategies.stages.analysis import ModelAnalysis

TOKENS = tuple(InputField(name, (16,), "int64", 31) for name in ("input_ids", "labels"))
EXPERTS = ["replicate", {"split": {"dim": "experts"}}]
FAST = Link("link", 1e11, 1e-6)


@pytest.fixture(scope="module")
def mixture() -> ModelProfile:
    options = {
        "_target_": "whale_train.models.moe_gpt.MoEGPT",
        **{"vocab_size": 31, "sequence_length": 16, "width": 32, "ffn": 2048, "depth": 2},
        **{"experts": 8, "loss": "model", "samples_are_independent": True},
    }
    return profile_model(ModelOptions.from_mapping(options), "mixture", TOKENS)


def cluster(*speeds: float, link: Link = FAST) -> Cluster:
    devices = [
        Device(f"device_{s:g}", {"fp32": s * 1e12, "bf16": s * 1e12}, 1e11, s * 1e11)
        for s in speeds
    ]
    return Cluster("cluster", (Node(tuple(devices), link),), link)


def planned(graph: Any, profile: ModelProfile, on: Cluster, batch: int = 32) -> Plan:
    return resolve(strategy_of({"graph": graph}), on, profile, training(batch))


def test_what_runs_where_experts_are(mixture: ModelProfile) -> None:
    found = ModelAnalysis(mixture, "fp32").experts
    assert found is not None
    assert mixture.graph is not None
    kinds = Counter(mixture.graph[name].target for name in found.operations)
    assert kinds == {"whale_train.grouped_mm.default": 4, "aten.gelu.default": 2}
    assert found.sharded.axes == {"experts.8": 8}
    casts = Counter(cast.kind for cast in found.sharded.assignment.casts)
    # Numbers are asked for once a mixture, by both of its products.
    assert casts == {"dispatch": 2, "exchange": 4, "combine": 2}


@pytest.fixture(scope="module")
def with_shared() -> ModelProfile:
    config = {
        **{"vocab_size": 31, "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16},
        **{"intermediate_size": 64, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
        **{"shared_expert_intermediate_size": 256, "decoder_sparse_step": 1},
    }
    options = {
        "_target_": "whale_train.models.build.hugging_face",
        **{"architecture": "Qwen2MoeForCausalLM", "config": config, "loss": "model"},
    }
    return profile_model(ModelOptions.from_mapping(options), "qwen2_moe", TOKENS)


def test_a_shared_experts_products_run_while_rows_come(with_shared: ModelProfile) -> None:
    findings = ModelAnalysis(with_shared, "fp32")
    assert findings.experts is not None
    casts = findings.experts.sharded.assignment.casts
    back = dict.fromkeys(cast.value for cast in casts if cast.kind == "combine")
    graph = findings.graph
    names = tuple(operation.name for operation in graph)
    segment = Segment(0, names, (), (), findings.experts.sharded.assignment)
    rewrites = {x.operations[0]: x.operations[1:] for x in segment.scope(graph).overlapped_rows()}
    for layer, value in enumerate(back):
        products = [x for x in rewrites[value] if graph[x].flops]
        modules = {graph[x].module.removeprefix(f"model.layers.{layer}.mlp.") for x in products}
        assert modules == {
            *(f"shared_expert.{name}_proj" for name in ("gate", "up", "down")),
            "shared_expert_gate",
        }


def test_rows_that_come_under_products_take_no_time_of_their_own(
    with_shared: ModelProfile,
) -> None:
    """On a link that is nearly as slow as the products are, but not where processes copy."""
    steps = {}
    for memory in (None, SLOW):
        on = replace(cluster(0.01, 0.01, link=SLOW), shared_memory=memory)
        steps[memory] = planned(EXPERTS, with_shared, on).predicted
    apart, copied = steps[None], steps[SLOW]
    assert apart.step_time_s < copied.step_time_s
    assert apart.compute_s == copied.compute_s


SLOW = Link("slow", 1e9, 1e-6)


def test_the_rest_is_copied_and_experts_follow_speed(mixture: ModelProfile) -> None:
    plan = planned(EXPERTS, mixture, cluster(5, 2, 1))
    backbone, experts = plan.task_graphs
    assert (backbone.name, experts.name) == ("backbone", "experts")
    assert {len(set(x)) for x in experts.shards.values()} == {3}
    assert next(iter(experts.shards.values())) == ((0, 5), (5, 7), (7, 8))
    assert set(backbone.parameters).isdisjoint(experts.parameters)
    assert len(backbone.parameters) + len(experts.parameters) == len(mixture.parameters)
    assert sum(backbone.shares) == 32
    assert backbone.shares[0] > backbone.shares[1] > backbone.shares[2]
    assert plan.groups["backbone.data_parallel"] == ((0, 1, 2),)
    assert "experts.data_parallel" not in plan.groups


def test_copies_of_experts_have_groups_of_their_own(mixture: ModelProfile) -> None:
    graph = {"replicate": {"degree": 2, "of": EXPERTS}}
    plan = planned(graph, mixture, cluster(1, 1, 1, 1))
    assert plan.groups["backbone.data_parallel"] == ((0, 1, 2, 3),)
    assert plan.groups["experts.data_parallel"] == ((0, 2), (1, 3))
    assert plan.groups["experts.model_parallel"] == ((0, 1), (2, 3))


def test_a_device_has_its_part_of_the_experts(mixture: ModelProfile) -> None:
    whole, spread = (
        planned(graph, mixture, cluster(*[1] * 8)).ranks[0].memory_bytes
        for graph in ("replicate", EXPERTS)
    )
    experts = ModelAnalysis(mixture, "fp32").expert_elements
    rest = mixture.parameter_elements - experts
    assert whole.parameters == 4 * mixture.parameter_elements + mixture.buffer_bytes
    assert spread.parameters == 4 * (rest + experts / 8) + mixture.buffer_bytes


ON_HOSTS = [
    {"replicate": {"zero": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}},
    {"split": {"dim": "experts"}},
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts_on_hosts_are_on_a_device_a_stack_at_a_time(
    precision: str, mixture: ModelProfile
) -> None:
    asked = replace(training(32), precision=precision)
    kept, streamed = (
        resolve(strategy_of({"graph": graph}), cluster(*[1] * 8), mixture, asked)
        for graph in (EXPERTS, ON_HOSTS)
    )
    _, experts = streamed.task_graphs
    assert experts.streams
    assert streamed.ranks[0].deepspeed[str(experts.id)] is None
    narrow = set(experts.parameters) if precision == "bf16" else set()
    assert set(experts.narrow) == narrow
    stack = 32 * 2048  # elements of one expert
    width = 4 if precision == "fp32" else 2
    need = streamed.ranks[0].memory_bytes
    assert need.gradients == width * stack
    assert need.parameters == 0.0
    assert need.total < kept.ranks[0].memory_bytes.total
    # fp32 values, gradients and moments, and what is sent of 16 bits.
    there = host_bytes(0, ("optimizer", "parameters"), asked)
    assert there == 4 * (2 + asked.optimizer_states) + (width == 2) * 2
    parts = streamed.predicted
    assert parts.step_time_s == pytest.approx(
        parts.compute_s + parts.communication_s + parts.optimizer_s + parts.idle_s
    )


def test_experts_in_several_copies_are_not_streamed(mixture: ModelProfile) -> None:
    graph = {"replicate": {"degree": 2, "of": ON_HOSTS}}
    plan = planned(graph, mixture, cluster(1, 1, 1, 1))
    _, experts = plan.task_graphs
    assert not experts.streams
    assert (experts.zero, experts.offload) == (1, {"optimizer": "cpu", "parameters": "none"})


@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.full), 0.1])
def test_a_bias_that_the_model_moves_is_its_own(rate: float) -> None:
    options = {
        "_target_": "whale_train.models.moe_gpt.MoEGPT",
        **{"vocab_size": 31, "sequence_length": 16, "width": 32, "ffn": 48, "depth": 2},
        **{"experts": 8, "loss": "model", "bias_rate": rate},
    }
    found = ModelAnalysis(profile_model(ModelOptions.from_mapping(options), "m", TOKENS), "fp32")
    assert len(found.mixtures) == 2
    assert found.router_biases == {}


def test_the_search_knows_of_it(mixture: ModelProfile) -> None:
    faults: list[Any] = []
    auto = read_strategy({"graph": "auto"}, "auto", faults)
    assert auto is not None
    slow = Link("network", 1e9, 1e-5)
    found = search(
        auto, cluster(*[1] * 8, link=slow), ModelAnalysis(mixture, "fp32"), training(512)
    )
    assert found.written["graph"] == [{"replicate": {}}, {"split": {"dim": "experts"}}]


def with_memory(*sizes: float) -> Cluster:
    devices = [Device(f"device_{x:g}", {"fp32": 1e12}, x, 1e11) for x in sizes]
    return Cluster("cluster", (Node(tuple(devices), FAST),), FAST)


def test_experts_follow_memory_where_speed_alone_does_not_fit(mixture: ModelProfile) -> None:
    def experts(plan: Plan) -> tuple[int, ...]:
        return tuple(b - a for a, b in next(iter(plan.task_graphs[1].shards.values())))

    assert experts(planned(EXPERTS, mixture, with_memory(1e11, 1e11, 1e11))) == (3, 3, 2)
    tight = planned(EXPERTS, mixture, with_memory(1e11, 1e11, 10e6))
    assert experts(tight) == (4, 3, 1)
    assert tight.ranks[2].memory_bytes.total <= 10e6
    assert tight.task_graphs[0].shares == (11, 11, 10)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            (14e6, 14e6, 8e6),
            "strategy.graph[1].split.modules=* has 8 experts, 3 more than the devices of "
            "hardware=cluster have memory for (20.3 MB short); use more devices, a smaller "
            "train.global_batch, or at most 5 experts",
        ),
        ((14e6, 14e6, 14e6), "has 8 experts, 2 more than the devices of hardware=cluster have mem"),
        ((1e11, 1e11, 4e6), "for one sample and one expert, "),
    ],
)
def test_too_little_memory_for_experts_is_said(
    sizes: tuple[float, ...], said: str, mixture: ModelProfile
) -> None:
    with pytest.raises(PlanError) as refused:
        planned(EXPERTS, mixture, with_memory(*sizes))
    assert said in str(refused.value.faults[0])


def test_there_are_as_many_experts_as_devices(mixture: ModelProfile) -> None:
    assert planned(EXPERTS, mixture, cluster(*[1] * 8)).world_size == 8
    with pytest.raises(PlanError) as refused:
        planned(EXPERTS, mixture, cluster(*[1] * 9))
    says = "finds no stacks of at least 9 experts in token ... lm_head"
    assert says in str(refused.value.faults[0])


def test_a_stack_that_others_read_is_refused(mixture: ModelProfile) -> None:
    """A penalty on all experts, of which a member has some."""
    assert mixture.graph is not None
    *operations, loss = mixture.graph.operations
    stack = next(op for op in operations if op.path.endswith("blocks.0.experts.expand"))
    last = replace(mixture.graph[loss.inputs[0]], name="total", saved=())
    args = (Ref(loss.inputs[0]), Ref("penalty"))
    penalty = replace(last, name="penalty", target="aten.sum.default", args=(Ref(stack.name),))
    added = replace(last, target="aten.add.Tensor", args=args)
    graph = OperationGraph((*operations, penalty, added, replace(loss, args=(Ref("total"),))))
    with pytest.raises(PlanError) as refused:
        planned(EXPERTS, replace(mixture, graph=graph), cluster(1, 1))
    assert "penalty (aten.sum.default) reads all of" in str(refused.value.faults[0])


def test_a_model_without_a_mixture_is_refused() -> None:
    with pytest.raises(PlanError) as refused:
        planned(EXPERTS, dense(), cluster(1, 1), 64)
    assert "finds no experts of a mixture in" in str(refused.value.faults[0])
