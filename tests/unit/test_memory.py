"""Bytes a rank needs, against the ZeRO paper's sums done by hand."""

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operation_graphs import classifier

from whale_train.strategies.grammar.nodes import Replicate, Strategy
from whale_train.strategies.graph.operation_graph import (
    ModelProfile,
    Operation,
    OperationGraph,
    Parameter,
    Ref,
)
from whale_train.strategies.hardware.cluster import CPU_PROCESS, Cluster, Device, Link, Node
from whale_train.strategies.memory.engine_memory import (
    ROUNDED_UP,
    added,
    engine_of,
)
from whale_train.strategies.memory.liveness import MemoryPoint
from whale_train.strategies.plan.plan import MemoryEstimate
from whale_train.strategies.plan.training import Training
from whale_train.strategies.schedule.instructions import Instruction, Kind
from whale_train.strategies.stage_memory.rank_memory import RankMemory
from whale_train.strategies.stages.analysis import ModelAnalysis
from whale_train.strategies.stages.chunks import chunked
from whale_train.strategies.stages.placement import PlanningContext, form_of

# 100 million elements over 10 copies, 80 million of them in one parameter; a gradient bucket of
# 25 MiB in fp32 is 6,553,600 elements, 26,214,400 bytes.
BIG = ModelProfile(
    name="big",
    parameters=(
        Parameter("table.weight", (80_000, 1000)),
        Parameter("rest.weight", (20_000, 1000)),
    ),
    inputs=(),
    forward_flops=0.0,
    activation_bytes=1e9 / ROUNDED_UP,
    buffer_bytes=500,
)
BUCKET = 26_214_400.0


def graph_of(*paths: str, product: str = "") -> OperationGraph:
    """A lookup in the first parameter and a product with the second; `product`: one more with a
    view of that one."""
    table, rest = (Operation(path, "parameter", path=f"{path}.weight") for path in paths)
    last = [
        Operation("view", "aten.t.default", (Ref(product),), memory=0),
        Operation("again", "aten.mm.default", (Ref("first"), Ref("view"))),
    ]
    return OperationGraph(
        (
            *(table, rest, Operation("ids", "input")),
            Operation("first", "aten.embedding.default", (Ref("table"), Ref("ids"))),
            Operation("second", "aten.linear.default", (Ref("first"), Ref("rest"))),
            *(last if product else ()),
        )
    )


READ = replace(BIG, graph=graph_of("table", "rest"))


STATES = {0: ("sgd", {}), 1: ("sgd", {"momentum": 0.9}), 2: ("adam", {})}


def estimate(
    precision: str = "fp32",
    states: int = 2,
    copies: int = 10,
    *,
    profile: ModelProfile = BIG,
    on_cpu: bool = False,
    **options: Any,
) -> MemoryEstimate:
    """Return what one of `copies` needs that runs the model as it is, a sample at a time."""
    node = Replicate("strategy.graph.replicate", **options)
    rates = dict.fromkeys(("fp32", "bf16", "fp16"), 1e12)
    device = Device(CPU_PROCESS if on_cpu else "gpu", rates, 1e12, 1e11)
    link = Link("link", 1e10, 1e-6)
    cluster = Cluster("cluster", (Node((device,) * copies, link),), link)
    optimizer, arguments = STATES[states]
    training = Training(copies, precision, 0.0, optimizer, dict(arguments))
    strategy = Strategy("mine", (node,))
    form = form_of(strategy, cluster, training, [])
    assert form is not None
    job = PlanningContext(strategy, cluster, ModelAnalysis(profile, precision), training, form)
    cut = chunked(job)
    order = [Instruction(kind, 0, 0) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    return RankMemory(job, cut.chunks, cut.axes, [[order]] * copies, {}).of(0, 1, 1)


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer", "communication"),
    [
        # Adam's two fp32 states of 100 M elements: 800 MB. The largest gradient is made before it
        # is put into its bucket, which is the gradient from then on.
        (0, 400e6, 400e6, 800e6, 320e6),
        # From here a flat fp32 partition as well: (4 + 8) bytes of 10 M. ZeRO 1 reduces in the
        # update, when there are no activations.
        (1, 400e6, 400e6, 120e6, 0.0),
        # ZeRO 2 fills one bucket while another is reduced.
        (2, 400e6, 40e6, 120e6, 3 * BUCKET),
        # One fp32 partition serves as weights and for the update. The largest parameter is
        # gathered and has its gradient, 2 x 320 MB; the bucket is copied for its reduction, and
        # one of what comes next is gathered and copied.
        (3, 40e6, 40e6, 80e6, 4 * BUCKET + 640e6),
    ],
)
def test_what_each_stage_partitions(
    zero: int, parameters: float, gradients: float, optimizer: float, communication: float
) -> None:
    expected = MemoryEstimate(parameters + 500, gradients, optimizer, 1e9, communication)
    assert estimate(zero=zero) == expected


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer", "communication"),
    [
        # Autocast over fp32 weights: the 16-bit ones it makes of the product's 20 M are kept until
        # backward.
        (0, 440e6, 400e6, 800e6, 320e6),
        # The product's 20 M weights are 16-bit values with an fp32 master partition, of the
        # lookup's 80 M nothing is made; 10 M elements of states, 2 M of masters, 8 M flat.
        (1, 320e6 + 40e6, 400e6, 80e6 + 8e6 + 32e6, 0.0),
        # The table's gradient is made last, and is whole until it is reduced.
        (2, 320e6 + 40e6, 40e6, 80e6 + 8e6 + 32e6, 2 * BUCKET + 320e6),
        # At 3 the fp32 partition of the table is its own master. Of what is gathered ahead, 80% is
        # of 4 bytes.
        (3, 32e6 + 4e6, 40e6, 80e6 + 8e6, 2 * BUCKET + 2 * BUCKET * 0.9 + 640e6),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_products_alone_read_is_of_16_bits_under_zero(
    zero: int,
    parameters: float,
    gradients: float,
    optimizer: float,
    communication: float,
    precision: str,
) -> None:
    expected = MemoryEstimate(parameters + 500, gradients, optimizer, 0.5e9, communication)
    assert estimate(precision, profile=READ, zero=zero) == expected


def test_a_tied_table_is_of_fp32_and_cast_for_its_product() -> None:
    """A lookup and a product read the table: 320 MB of fp32, and 160 MB that autocast makes."""
    tied = replace(READ, graph=graph_of("table", "rest", product="table"))
    found = estimate("bf16", profile=tied, zero=1)
    assert found.parameters == 320e6 + 160e6 + 40e6 + 500


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "optimizer", "communication"),
    [
        (0, 600e6, 400e6, 800e6, 320e6),
        # As fp32, and 200 MB of 16-bit weights, which no stage partitions.
        (1, 600e6, 400e6, 120e6, 0.0),
        (2, 600e6, 40e6, 120e6, 3 * BUCKET),
        (3, 240e6, 40e6, 80e6, 4 * BUCKET + 640e6),
    ],
)
def test_autocast_over_fp32_of_a_model_whose_operations_are_not_known(
    zero: int, parameters: float, gradients: float, optimizer: float, communication: float
) -> None:
    expected = MemoryEstimate(parameters + 500, gradients, optimizer, 0.5e9, communication)
    assert estimate("fp16", zero=zero) == expected


@pytest.mark.parametrize(("states", "optimizer"), [(0, 0.0), (1, 400e6), (2, 800e6)])
def test_optimizer_states(states: int, optimizer: float) -> None:
    assert estimate(states=states).optimizer == optimizer


def test_offload_leaves_the_device() -> None:
    state = estimate(zero=2, offload_optimizer="cpu")
    assert (state.optimizer, state.parameters) == (0.0, 400e6 + 500)
    assert (state.gradients, state.communication) == (0.0, 3 * BUCKET)  # partitions are the host's
    first = estimate(zero=1, offload_optimizer="cpu")
    assert (first.optimizer, first.gradients) == (0.0, 400e6)
    both = estimate(zero=3, offload_optimizer="cpu", offload_parameters="cpu")
    assert (both.optimizer, both.parameters, both.gradients) == (0.0, 500.0, 0.0)  # buffers stay
    # What is fetched has to be somewhere.
    assert both.communication == 4 * BUCKET + 640e6
    parameters = estimate(zero=3, offload_parameters="cpu")
    assert (parameters.optimizer, parameters.parameters) == (120e6, 500.0)  # an fp32 copy here
    assert parameters.gradients == 40e6


def test_a_cpu_process_is_on_the_host() -> None:
    for zero in (1, 2):
        kept = estimate(zero=zero, on_cpu=True)
        assert estimate(zero=zero, offload_optimizer="cpu", on_cpu=True) == kept
    both = {"offload_optimizer": "cpu", "offload_parameters": "cpu"}
    offloaded = estimate(zero=3, on_cpu=True, **both)
    # As anywhere, an fp32 copy for the update; what comes next is not gathered meanwhile.
    assert (offloaded.parameters, offloaded.optimizer) == (40e6 + 500, 120e6)
    assert (offloaded.gradients, offloaded.communication) == (40e6, 2 * BUCKET + 640e6)


def test_a_single_copy_sends_nothing() -> None:
    assert estimate(copies=1).communication == 0.0
    assert estimate(copies=1).total == 400e6 + 400e6 + 800e6 + 1e9 + 500


def test_gradients_come_as_activations_go() -> None:
    """On one device, that neither has buckets nor adds to gradients of another backward."""
    moments = (MemoryPoint(0.0, 900.0), MemoryPoint(300.0, 500.0), MemoryPoint(400.0, 100.0))
    elements = {"table.weight": 80e6, "rest.weight": 20e6}
    engine = engine_of(BIG, elements, "fp32", 0, 1, False, False, by_block=False, frozen={})
    for samples, held in ((1e6, (0.0, 900e6)), (0.1e6, (400e6, 0.0))):
        # With a tenth of the samples, all of 400 MB of gradients in the update are more.
        worst = engine.worst((m.gradients, 0.0, m.values * samples) for m in moments)
        assert (worst.gradients, worst.activations) == (held[0], held[1] * ROUNDED_UP)


def test_a_small_model_fills_no_bucket() -> None:
    small = replace(
        classifier(), parameters=(Parameter("w", (4, 8)), Parameter("b", (4,))), graph=None,
        activation_bytes=7.0,
    )  # fmt: skip
    # 4 x 8 and 4 elements; 40 bytes of buffers.
    expected = MemoryEstimate(4 * 36 + 40, 4 * 36, 8 * 36, 7.0 * ROUNDED_UP, 4 * 32)
    assert estimate(copies=2, profile=small) == expected


def test_a_model_without_parameters() -> None:
    empty = replace(BIG, parameters=(), activation_bytes=0.0)
    assert estimate(copies=2, profile=empty, zero=3) == MemoryEstimate(500.0, 0, 0, 0, 0)


def test_two_task_graphs_on_a_device_add_up() -> None:
    first, second = MemoryEstimate(1, 2, 3, 4, 5), MemoryEstimate(10, 20, 30, 40, 50)
    assert added(first, second) == MemoryEstimate(11, 22, 33, 44, 55)
    assert added(first, second).total == 165
