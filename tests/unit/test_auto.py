"""The search for a strategy: what it finds is near the best of all there is."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.pairs import covering, examples, once
from tests.unit.operation_graphs import classifier, gpt
from tests.unit.plan_requests import CONF, shipped, strategy_of, training
from tests.unit.test_staged import check
from tests.unit.test_stages import model

from whale_train.errors import PlanError
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.estimate.candidates import Candidate
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.calibration import Calibration, on_cores
from whale_train.strategies.hardware.cluster import (
    Cluster,
    Device,
    HostFigures,
    HostShare,
    Kernel,
    Link,
    Node,
    Roofline,
)
from whale_train.strategies.memory.host_memory import host_bytes
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import consider, resolve
from whale_train.strategies.search.search import SearchResult, search
from whale_train.strategies.search.space import space_of
from whale_train.strategies.stages.analysis import ModelAnalysis

AUTO = strategy_of({"graph": "auto", "time_limit_s": 0}, "auto")
FAST = Device("fast", {"fp32": 2e9}, 1e9, 4e9)
SLOW = Device("slow", {"fp32": 1e9}, 1e9, 3e9)
INSIDE, NETWORK = Link("inside", 1e9, 1e-6), Link("network", 1e8, 1e-5)


def cluster(*nodes: Sequence[Device]) -> Cluster:
    return Cluster("mine", tuple(Node(tuple(devices), INSIDE) for devices in nodes), NETWORK)


def used_by(found: SearchResult, there: int) -> int:
    """How many of the devices that are there the strategy uses."""
    devices = found.written.get("devices")
    return there if devices is None else sum(devices.values())


def found_for(
    profile: ModelProfile, devices: Cluster, train: Training, asked: Any = AUTO, **keys: Any
) -> SearchResult:
    return search(asked, devices, ModelAnalysis(profile, train.precision), train, **keys)


def everything(
    profile: ModelProfile, devices: Cluster, train: Training
) -> Iterator[tuple[Candidate, float]]:
    """Every candidate that can be, with the seconds of its step: balanced, or with its boundaries
    moved where that is shorter."""
    findings = ModelAnalysis(profile, train.precision)
    kinds = tuple(sorted(devices.kinds.items()))
    space = space_of(devices, kinds, findings, train)
    for used in space.sets():
        cluster = devices.of_kinds(dict(used))
        for mesh, pieces in (
            (ordered, pieces)
            for unordered in space.meshes(used, cluster)
            for ordered in space.orders(unordered)
            for pieces in space.numbers_of_micro_batches(ordered)
        ):
            for dim in space.dims(mesh):
                for candidate in space.variants(mesh, pieces, dim):
                    strategy = strategy_of({"devices": dict(used), "graph": candidate.graph()})
                    try:
                        step = consider(strategy, devices, findings, train, moving=True).step
                    except PlanError:
                        continue
                    yield candidate, step.spans.seconds


@st.composite
def requests(draw: st.DrawFn) -> tuple[ModelProfile, Cluster, Training]:
    """Up to 4 devices of 2 kinds in up to 2 nodes, and up to 6 blocks."""
    memory = draw(st.sampled_from([1e9, 4e6, 1e6]))
    kinds = [replace(each, memory_bytes=memory) for each in (FAST, SLOW)]
    nodes = [[kinds[number]] * draw(st.integers(1, 2)) for number in range(draw(st.integers(1, 2)))]
    blocks = draw(st.lists(st.sampled_from([1.0, 1e5, 3e5]), min_size=1, max_size=6))
    network = Link("network", draw(st.sampled_from([1e7, 1e8, 1e10])), 1e-5)
    devices = replace(cluster(*nodes), network=network)
    batch = draw(st.integers(2, 24))
    profile = draw(st.sampled_from([model(blocks), gpt(), classifier(batch_norm=False)]))
    options = draw(st.sampled_from([{}, {"momentum": 0.9}]))
    return profile, devices, training(batch, **options)


SLOWLY = Link("slowly", 1e7, 1e-5)


# The same requests every time: estimates choose what is simulated, and may err by more elsewhere.
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@example((model([1.0, 3e5]), replace(cluster([FAST], [SLOW]), network=SLOWLY), training(2)))
@given(requests())
def test_the_search_finds_about_what_trying_all_does(
    request: tuple[ModelProfile, Cluster, Training],
) -> None:
    profile, devices, train = request
    tried = [seconds for _, seconds in everything(profile, devices, train)]
    if not tried:
        with pytest.raises(PlanError):
            found_for(profile, devices, train)
        return
    found = found_for(profile, devices, train)
    step = found.considered.step.spans.seconds
    assert step <= 1.02 * min(tried)
    assert found.floor_s <= step
    again = found_for(profile, devices, train)
    assert (again.written, again.decisions) == (found.written, found.decisions)
    plan = resolve(found.strategy, devices, profile, train)
    assert plan == found.considered.plan() == found.considered.plan()
    assert plan.predicted.step_time_s == found.considered.step.spans.seconds
    used = devices.chosen(found.strategy.devices)
    for rank in plan.ranks:  # each on its own, and not their sum
        assert rank.memory_bytes.total <= used.devices[rank.rank].memory_bytes
    held = {path for task_graph in plan.task_graphs for path in task_graph.parameters}
    assert held == {parameter.path for parameter in profile.parameters}
    beside = any(task_graph.primitive == "replicate" for task_graph in plan.task_graphs)
    if plan.pipeline is not None and not beside:  # a split head shares its devices with the rest
        check(plan, profile)


def test_what_is_found_is_a_file_of_the_grammar() -> None:
    found = found_for(gpt(), cluster([FAST] * 2, [SLOW] * 2), training(16))
    assert strategy_of(found.written, "auto") == found.strategy


NAMES = sorted(path.stem for path in (CONF / "strategy").glob("*.yaml") if path.stem != "auto")


@pytest.mark.parametrize("nodes", [([FAST] * 4,), ([FAST] * 2, [SLOW] * 2)], ids=["alike", "mixed"])
def test_no_shipped_strategy_is_faster(nodes: Sequence[Sequence[Device]]) -> None:
    profile, devices, train = gpt(), cluster(*nodes), training(16)
    found = found_for(profile, devices, train)
    seen = 0
    for name in NAMES:
        try:
            plan = resolve(shipped(name), devices, profile, train)
        except PlanError:
            continue
        seen += 1
        assert found.considered.step.spans.seconds <= plan.predicted.step_time_s * (1 + 1e-9), name
    assert seen > 5


def test_stages_are_put_on_kinds_of_devices() -> None:
    """Where gradients are slow to sum, a pipeline whose kinds of devices have unlike stages is
    faster than copies of anything: it is found."""
    slow = Link("slow", 1e5, 1e-5)
    devices = replace(cluster([FAST], [SLOW]), network=slow)
    found = found_for(model([1e6] * 6), devices, training(4))
    stages = found.written["graph"]["replicate"]["of"]["pipeline"]["stages"]
    assert {stage["stage"]["device"] for stage in stages} == {"fast", "slow"}


def test_copies_that_take_their_samples_at_once_run_the_model_as_it_is() -> None:
    devices, train = cluster([FAST] * 2), training(4)
    found = [candidate for candidate, _ in everything(gpt(), devices, train)]
    whole = [c for c in found if c.mesh.stages == c.mesh.shards == 1]
    assert {c.micro_batches for c in whole if c.mesh.widest == 1} == {0, 2, 4}


def test_every_family_has_its_reason() -> None:
    found = found_for(gpt(), cluster([FAST] * 2, [SLOW] * 2), training(16))
    first, *others = found.decisions
    assert re.search(r"the fastest of \d+ strategies simulated, of \d+ estimated", first.reason)
    assert {d.rejected for d in others} >= {"copies, ZeRO 1", "pipeline", "split"} - {first.chosen}
    known = ("the fastest simulated", "estimated at", "more than there is memory for", " is ")
    for decision in others:
        assert any(words in decision.reason for words in known)


def test_out_of_time_it_says_what_it_simulated() -> None:
    asked, ticks = replace(AUTO, time_limit_s=3.0), count()
    mixed = cluster([FAST] * 2, [SLOW] * 2)
    found = found_for(gpt(), mixed, training(16), asked, clock=lambda: next(ticks))
    longer = found_for(gpt(), mixed, training(16), replace(AUTO, time_limit_s=None))
    assert found.resolved < longer.resolved
    assert re.search(
        r"the fastest of \d+ strateg(y|ies) simulated in 3 s, of \d+ estimated; "
        r"at their full speed the devices would compute for ",
        found.decisions[0].reason,
    )


def test_without_a_time_limit_the_answer_is_always_the_same() -> None:
    """However many devices there are; what is counted is work."""
    devices, train = cluster(*[[FAST] * 4] * 4, *[[SLOW] * 4] * 4), training(128)
    found, again = (found_for(gpt(), devices, train) for _ in range(2))
    assert (again.written, again.decisions) == (found.written, found.decisions)
    seconds = found.considered.step.spans.seconds
    assert found.floor_s < seconds
    assert "strategy.time_limit_s=60 simulates more" in found.decisions[0].reason
    longer = found_for(gpt(), devices, train, replace(AUTO, time_limit_s=None))
    assert longer.resolved > found.resolved
    assert longer.considered.step.spans.seconds <= seconds


@pytest.mark.parametrize("known", [1.0, 0.2, pytest.param(0.0, marks=pytest.mark.full)])
def test_hosts_hold_what_the_search_offloads(known: float) -> None:
    """Each of two, whose memory is faster here than the devices', has room for so much of all."""
    devices, train = cluster([FAST] * 2, [SLOW] * 2), training(16)
    elements = sum(parameter.elements for parameter in gpt().parameters)
    host = HostFigures(
        "host", known * host_bytes(3, ("optimizer",), train) * elements, 2e11, INSIDE
    )
    share = HostShare(1e11, 1e11)
    nodes = tuple(
        Node(tuple(replace(each, host=share) for each in node.devices), node.link, host)
        for node in devices.nodes
    )
    hosted = replace(devices, nodes=nodes)
    found = found_for(gpt(), hosted, train)
    assert ("offload" in str(found.written)) == (known == 1.0)
    fastest = min(seconds for _, seconds in everything(gpt(), hosted, train))
    assert found.considered.step.spans.seconds == pytest.approx(fastest, rel=2e-9)


@pytest.mark.parametrize("another", [False, True], ids=["else nothing", "else more slowly"])
def test_stages_are_as_large_as_their_devices_have_room_for(another: bool) -> None:
    """Of six blocks, on two devices as fast as each other with room for four and for two; and on a
    slow one with room for all."""
    profile, train = model([1e9] * 6), training(1, momentum=0.9)
    block = 3 * 4 * 64  # weights, gradients, momentum
    names = (("roomy", 4.7), ("tight", 2.7))
    rooms = [replace(FAST, name=name, memory_bytes=room * block) for name, room in names]
    slow = replace(SLOW, flops={"fp32": 1e8})
    devices = cluster([*rooms, *[slow] * another])
    found = found_for(profile, devices, train)
    plan = resolve(found.strategy, devices, profile, train)
    assert sorted(len(each.parameters) for each in plan.task_graphs) == [2, 4]
    used = devices.chosen(found.strategy.devices)
    for rank in plan.ranks:
        assert rank.memory_bytes.total <= used.devices[rank.rank].memory_bytes


def test_nothing_fits() -> None:
    tiny = replace(FAST, memory_bytes=10.0)
    with pytest.raises(PlanError) as error:
        found_for(gpt(), cluster([tiny] * 4), training(16))
    (fault,) = error.value.faults
    assert "strategy=auto finds no strategy whose weights, gradients and optimizer fit" in str(
        fault
    )
    assert "B more than hardware=mine has memory for" in str(fault)


def test_devices_that_do_not_compute_the_precision_stay_idle() -> None:
    able = replace(FAST, flops={"fp32": 2e9, "bf16": 8e9})
    train = training(16, precision="bf16")
    found = found_for(gpt(), cluster([able] * 2, [SLOW] * 2), train)
    assert used_by(found, 4) <= 2
    said = {decision.reason for decision in found.decisions}
    assert "train.precision=bf16 is not computed by slow of hardware=mine" in said
    behind = found_for(gpt(), cluster([SLOW], [able]), train)  # wherever they are listed
    assert behind.written["devices"] == {"fast": 1}
    for wrong, keys in (
        (cluster([SLOW], [SLOW]), {}),
        (cluster([able], [SLOW]), {"use_all": True}),
    ):
        with pytest.raises(PlanError, match=r"train\.precision=bf16 is not computed by slow"):
            found_for(gpt(), wrong, train, **keys)


def test_devices_that_are_equal_are_alike() -> None:
    """Whether an inventory lists them together or one by one."""
    together = cluster([FAST] * 2, [SLOW] * 2)
    apart = cluster([replace(FAST), replace(FAST)], [replace(SLOW), replace(SLOW)])
    one, other = (found_for(gpt(), devices, training(16)) for devices in (together, apart))
    assert one.written == other.written
    assert one.resolved == other.resolved


def processes(
    cores: int,
    of_threads: Mapping[int, float],
    count: int = 4,
    bandwidth_bytes_s: float = 1e9,
    busy: float = 0.5,
    shares_memory: bool = False,
) -> Cluster:
    """So many CPU processes on so many cores, measured with some numbers of threads: the rate of
    each such process. Memory that they share is faster than their link."""
    process = Device("cpu_process", {"fp32": 1e9}, 1e9, 4e9)
    link = Link("measured", bandwidth_bytes_s, 1e-5, busy)
    memory = Link("measured", 20 * bandwidth_bytes_s, 1e-6, 1.0) if shares_memory else None
    known = [
        Calibration("cpu_process", threads, 1, {"fp32": kernels(rate)}, link, memory)
        for threads, rate in of_threads.items()
    ]
    node = Node((process,) * count, INSIDE)
    mine = Cluster("cpu", (node,), INSIDE)
    return on_cores(mine, known, cores, lambda ranks: max(1, cores // ranks))


def kernels(rate: float) -> dict[str, Kernel]:
    """What is measured of each kind of operation."""
    roofline = Roofline(1e-6, rate, rate)
    return dict.fromkeys(map(str, KernelKind), Kernel(roofline, roofline))


# By processes' numbers of threads; a link's bytes a second and what is busy while it carries them.
RATES: tuple[Mapping[int, float], ...] = ({1: 1e9, 2: 1.9e9}, {1: 1e9, 2: 0.9e9}, {1: 1e9}, {})
LINKS = ((1e6, 0.3), (1e7, 0.5), (1e10, 0.9))
ON_PROCESSES = covering(
    list(product((False, True), LINKS, range(len(RATES)))), lambda row: once(*row)
)


@pytest.mark.parametrize(
    ("rates", "bandwidth_bytes_s", "busy", "shares_memory"),
    [
        pytest.param(RATES[number], *link, shares, id=f"{shares}-{link[0]}-{link[1]}-rates{number}")
        for shares, link, number in ON_PROCESSES
    ],
)
def test_the_search_finds_what_trying_all_does_on_processes(
    rates: Mapping[int, float], bandwidth_bytes_s: float, busy: float, shares_memory: bool
) -> None:
    devices = processes(2, rates, 4, bandwidth_bytes_s, busy, shares_memory)
    tried = [seconds for _, seconds in everything(gpt(), devices, training(16))]
    found = found_for(gpt(), devices, training(16))
    assert found.considered.step.spans.seconds <= 1.02 * min(tried)
    assert resolve(found.strategy, devices, gpt(), training(16)) == found.considered.plan()


def test_one_process_with_all_threads_waits_for_nobody() -> None:
    devices = processes(2, {1: 1e9, 2: 1.9e9}, bandwidth_bytes_s=1e6)
    found = found_for(gpt(), devices, training(16))
    assert found.written["devices"] == {"cpu_process": 1}
    assert "3 of 4 devices stay idle" in found.decisions[0].reason
    # Where more threads are no faster, two processes are that exchange fast enough.
    slower = processes(2, {1: 1e6, 2: 1e6}, bandwidth_bytes_s=1e12)
    assert used_by(found_for(gpt(), slower, training(16)), 4) > 1


@pytest.mark.parametrize("rates", [{1: 1e9, 2: 1.9e9}, {1: 1e9}])
def test_all_devices_are_used_where_they_must_be(rates: Mapping[int, float]) -> None:
    devices = processes(2, rates, bandwidth_bytes_s=1e6)
    assert used_by(found_for(gpt(), devices, training(16)), 4) < 4
    found = found_for(gpt(), devices, training(16), use_all=True)
    assert "devices" not in found.written
    assert {decision.key for decision in found.decisions} == {"strategy.graph"}


@pytest.mark.parametrize(("rates", "to_measure"), [({1: 1e9}, 1), ({2: 1e9}, 4)])
def test_what_is_measured_is_not_compared_with_what_is_not(
    rates: Mapping[int, float], to_measure: int
) -> None:
    """Fewer processes have other threads, and those may not be measured."""
    found = found_for(gpt(), processes(2, rates, bandwidth_bytes_s=1e3), training(16))
    assert used_by(found, 4) != 1
    _, left_out, *_ = found.decisions
    assert (left_out.key, left_out.rejected) == ("strategy.devices", "1")
    assert f"mode=calibrate hardware=cpu hardware.devices={to_measure}" in left_out.reason
    (_, other, *_) = found_for(gpt(), processes(2, {1: 1e9, 2: 2e9}), training(16)).decisions
    assert other.key == "strategy.graph"


def test_it_keeps_to_the_devices_it_is_given() -> None:
    for devices in (2, {"fast": 2}):
        asked = replace(AUTO, devices=devices)
        found = found_for(gpt(), cluster([FAST] * 4), training(16), asked)
        assert used_by(found, 4) <= 2


def test_samples_of_batch_norm_stay_together() -> None:
    found = found_for(classifier(), cluster([FAST] * 4), training(16))
    assert "micro_batches" not in str(found.written) or "'micro_batches': 1," in str(found.written)
