"""What `strategy=auto` finds is no slower than the best of all strategies of small cases."""

import json
from dataclasses import dataclass, replace

import pytest
from tests.pairs import some
from tests.unit.brute_force_plans import Bounds, Tried, cheapest
from tests.unit.operation_graphs import Sketch
from tests.unit.plan_requests import mixed, strategy_of, training

from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.cluster import Cluster, Link, Node
from whale_train.strategies.search.search import SearchResult, search
from whale_train.strategies.stages.analysis import ModelAnalysis

AUTO = strategy_of({"graph": "auto", "time_limit_s": 0}, "auto")
WIDTH, TOKENS = 512, 64


def stack(blocks: int, rows: int, classes: int) -> ModelProfile:
    """An embedding of so many `rows`, residual blocks of two products, a head of `classes`."""
    s, inner = Sketch(), 4 * WIDTH
    hidden = f"B {TOKENS} {WIDTH}"
    s.parameter("table.weight", f"{rows} {WIDTH}")
    for block in range(blocks):
        s.parameter(f"blocks.{block}.up.weight", f"{inner} {WIDTH}")
        s.parameter(f"blocks.{block}.down.weight", f"{WIDTH} {inner}")
    s.parameter("lm_head.weight", f"{classes} {WIDTH}")
    s.input("input_ids", f"B {TOKENS}")
    s.input("labels", f"B {TOKENS}")
    value = s.call("rows", "embedding.default", "table_weight", "input_ids", shape=hidden,
                   module="table")  # fmt: skip
    flops = 2.0 * TOKENS * WIDTH * inner
    for block in range(blocks):
        module = f"blocks.{block}"
        up = s.call(f"up{block}", "linear.default", value, f"blocks_{block}_up_weight",
                    shape=f"B {TOKENS} {inner}", module=f"{module}.up", flops=flops)  # fmt: skip
        act = s.call(f"act{block}", "gelu.default", up, shape=f"B {TOKENS} {inner}", module=module)
        down = s.call(f"down{block}", "linear.default", act, f"blocks_{block}_down_weight",
                      shape=hidden, module=f"{module}.down", flops=flops)  # fmt: skip
        value = s.call(f"sum{block}", "add.Tensor", value, down, shape=hidden, module=module)
    logits = s.call("logits", "linear.default", value, "lm_head_weight", module="lm_head",
                    shape=f"B {TOKENS} {classes}",
                    flops=2.0 * TOKENS * WIDTH * classes)  # fmt: skip
    s.call("flat", "flatten.using_ints", logits, 0, 1, shape=f"{TOKENS}B {classes}")
    s.call("targets", "flatten.using_ints", "labels", shape=f"{TOKENS}B", dtype="int64")
    s.call("loss", "cross_entropy_loss.default", "flat", "targets", shape="")
    return s.profile("stack", "loss")


@dataclass(frozen=True)
class Case:
    """A model on devices.

    nodes: devices of each node, `v` for a V100 and `p` for a P100.
    model: number of blocks, rows of the table, classes of the head.
    batch: samples of a step.
    gbit_s: speed of the network.
    room: memory of a device, as a fraction of what a replica of the model needs (0: all of it).
    """

    nodes: tuple[str, ...]
    model: tuple[int, int, int] = (2, 1_000, 1_000)
    batch: int = 4
    gbit_s: float = 50.0
    room: tuple[float, float] = (0.0, 0.0)

    def cluster(self, profile: ModelProfile) -> Cluster:
        """Return the devices of the shipped mixed cluster, with this memory and network."""
        nodes = {"v": mixed().nodes[0], "p": mixed().nodes[1]}
        needed = 12.0 * profile.parameter_elements
        kinds = {}
        for (letter, node), room in zip(nodes.items(), self.room, strict=True):
            device = node.devices[0]
            memory = device.reserved_bytes + room * needed if room else device.memory_bytes
            kinds[letter] = replace(device, memory_bytes=memory)
        network = Link("network", self.gbit_s * 1e9 / 8, 1e-5)
        return Cluster(
            "small",
            tuple(Node(tuple(kinds[x] for x in node), nodes[node[0]].link) for node in self.nodes),
            network,
        )


CASES = {
    "two alike": Case(("vv",)),
    "two unlike": Case(("v", "p")),
    "two unlike, slow network": Case(("v", "p"), gbit_s=1.0),
    "large head": Case(("vv",), (2, 1_000, 50_000)),
    "large head, unlike": Case(("v", "p"), (2, 1_000, 50_000)),
    "large table": Case(("vv",), (2, 50_000, 1_000)),
    "both large": Case(("vv",), (2, 50_000, 50_000)),
    "three": Case(("vvv",), (3, 1_000, 1_000), 3),
    "three unlike": Case(("vv", "p"), (3, 1_000, 1_000), 3),
    "three in two nodes": Case(("vv", "v"), (4, 1_000, 1_000), 5, 10.0),
    "little memory": Case(("vv",), (3, 1_000, 1_000), 4, room=(0.6, 0.0)),
    "uneven memory": Case(("v", "p"), (4, 1_000, 1_000), 4, room=(0.5, 0.8)),
    "three, little memory": Case(("v", "pp"), (4, 1_000, 1_000), 3, room=(0.5, 0.4)),
    "four": Case(("vvvv",), (2, 1_000, 1_000), 2),
    "four in two nodes": Case(("vv", "vv"), (4, 1_000, 1_000), 3, 10.0),
    "four unlike": Case(("vv", "pp"), (4, 1_000, 1_000), 2),
    "four, large head": Case(("vv", "vv"), (2, 1_000, 50_000), 2),
    "three, head beside": Case(("vv", "p"), (4, 1_000, 60_000), 2, 1.0, (0.4, 0.7)),
    "one fits": Case(("vv",), (2, 1_000, 1_000), 3, 10.0, (0.4, 0.7)),
    "six blocks": Case(("vv", "p"), (6, 1_000, 1_000), 3, 1.0),
}

TIGHT = (
    "little memory",
    "uneven memory",
    "three, head beside",
    "one fits",
)  # optimizers are offloaded too
QUICK = ("two alike", "large head, unlike", "little memory", "four, large head")


def described(found: SearchResult, best: Tried) -> str:
    """Return both strategies, for the message of a failure."""
    return f"found {json.dumps(found.written)}, faster {json.dumps(best.written)} cut {best.cut}"


@pytest.mark.parametrize("name", some(CASES, QUICK))
def test_no_strategy_of_a_small_case_is_faster(name: str) -> None:
    case = CASES[name]
    profile, train = stack(*case.model), training(case.batch, momentum=0.9)
    devices = case.cluster(profile)
    best, simulated = cheapest(profile, devices, train, Bounds(4, tight=name in TIGHT))
    assert best is not None
    assert simulated > 0
    found = search(AUTO, devices, ModelAnalysis(profile, train.precision), train)
    seconds = found.considered.step.spans.seconds
    assert seconds <= best.seconds * (1 + 1e-9), described(found, best)
