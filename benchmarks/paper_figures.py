"""The figures of the Whale paper (USENIX ATC 2022) as pairs of plans, with what was reported.

Owns the rows of every figure, their settings, and the causes of differences; `paper.py` simulates
and prints them. FastNN is the authors' repository of examples (github.com/alibaba/FastNN).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

NOT_KNOWN = "not known"  # a figure of the paper whose number is in none of our sources
NO_MEMORY = "no memory"  # a side that did not fit


def v100(count: int, devices: int = 8, device: str = "v100_sxm2_32gb") -> list[Any]:
    return [{"count": count, "devices": devices, "device": device, "link": "nvlink2"}]


def mixed(devices: int) -> list[Any]:
    p100 = {"devices": devices, "device": "p100_pcie_16gb", "link": "pcie3_x16"}
    return [*v100(1, devices), p100]


SMALLER = v100(8, device="v100_sxm2_16gb")
COPIES: Any = {"replicate": {}}
SPLIT_HEAD: Any = [{"replicate": {"modules": "*"}}, {"split": {"modules": "head"}}]
# The head's weight along the dimension that its product sums over.
SUMMED_HEAD: Any = [
    {"replicate": {"modules": "*"}},
    {"split": {"modules": "head", "patterns": {"*": "row"}}},
]
RECOMPUTED: Any = {"stage": {"recompute": "full"}}
PAIR: Any = {"replicate": {"degree": 2}}
# FastNN's HybridParallelTutorials/README.md has figures for V100 16 GB and this network: on 64
# devices, Whale's data parallelism has 1.736 times the speed of Horovod's, and its pipeline 1.337
# times that speed. The product of both is the figure of arXiv v1.
VPC = {"name": "vpc_35g", "bandwidth_bytes_s": 35e9 / 8, "latency_s": 14e-6}


def pipeline(stages: Any, **options: Any) -> Any:
    return {"pipeline": {"stages": stages, **options}}


@dataclass(frozen=True)
class Side:
    """The plan of one side of a row.

    model: name of the model, in MODELS of `paper.py`.
    graph: graph of the strategy.
    nodes: nodes of the inventory.
    batch: number of samples in a step.
    optimizer: name of the optimizer.
    balance: how work is shared among unequal devices: `hardware` or `even`.
    network: network between the nodes.
    """

    model: str
    graph: Any
    nodes: list[Any]
    batch: int
    optimizer: str = "adam"
    balance: str = "hardware"
    network: Any = "ethernet_50g"


@dataclass(frozen=True)
class Row:
    """A figure of one side, alone or compared with another.

    what: name in the table.
    reported: the paper's figure; NO_MEMORY where `ours` did not fit, NOT_KNOWN for an unknown one.
    ours: the first side.
    against: the second side; None for a row of one side.
    times: the number of devices of `ours` divided by that of `against`, where the figure is by
        device.
    measure: `speed`: the samples/s of `ours`, divided by those of `against` if there is one.
        `bridges`: the part of a step of `ours` that its bridges take.
    """

    what: str
    reported: float | str
    ours: Side
    against: Side | None = None
    times: int = 1
    measure: Literal["speed", "bridges"] = "speed"


@dataclass(frozen=True)
class Figure:
    """A figure of the paper.

    title: title of the table.
    setting: our assumptions.
    rows: function that returns the rows for a number of samples a device; figures that do not turn
        on it ignore the number.
    why: the cause of a difference between our figures and the paper's.
    batches: samples a device, the first of `rows`, the others of further tables. Empty for a figure
        whose batches are known, or decide nothing.
    also: rows that do not turn on the number of samples.
    """

    title: str
    setting: str
    rows: Callable[[int], Sequence[Row]]
    why: str
    batches: tuple[int, ...] = ()
    also: Sequence[Row] = ()


# --- The rows of each figure ---


def copies(model: str, nodes: list[Any], batch: int, network: Any = "ethernet_50g") -> Side:
    """Return data parallelism with `batch` samples on each device of `nodes`."""
    devices = sum(node.get("count", 1) * node["devices"] for node in nodes)
    return Side(model, COPIES, nodes, batch * devices, network=network)


def over_one(model: str, ours: Side, reported: float | str, what: str, batch: int) -> Row:
    """Return how many times as fast as one V100 with `batch` samples a side is."""
    return Row(what, reported, ours, copies(model, v100(1, 1), batch))


def resnet_copies(batch: int) -> Sequence[Row]:
    return [
        over_one("resnet50", copies("resnet50", v100(n), batch), NOT_KNOWN, f"{8 * n} V100", batch)
        for n in (1, 2, 4, 8)
    ]


def bert_copies(batch: int) -> Sequence[Row]:
    rows = []
    for what, network in (("50 Gbit/s", "ethernet_50g"), ("35 Gbit/s", VPC)):
        ours = copies("bert_large", v100(8), batch, network)
        rows.append(over_one("bert_large", ours, 14.0, f"64 V100, {what}", batch))
    return rows


def against_gpipe(stages: int, reported: float) -> Row:
    ours = Side("bert_large", pipeline(stages), v100(1, stages), 2 * 4 * stages)
    gpipe = replace(ours, graph=pipeline([RECOMPUTED] * stages, schedule="gpipe"))
    return Row(f"{stages} stages", reported, ours, gpipe)


def piped(stages: int, nodes: list[Any], network: Any = "ethernet_50g") -> Side:
    """Return copies of a pipeline on 64 V100, with ten micro-batches of two samples."""
    graph = {"replicate": {"of": pipeline(stages, micro_batches=10)}}
    batch = 64 // stages * 10 * 2
    return Side("bert_large", graph, nodes, batch, network=network)


def hybrids(batch: int) -> Sequence[Row]:
    """Return the rows of Figure 12: copies of 2, 4 and 8 TaskGraphs, and two of them against data
    parallelism with `batch` samples a device."""
    rows = []
    for what, reported, nodes, network in (
        ("2, 50 Gbit/s, to Horovod (Expo 2020)", 1.57, v100(8), "ethernet_50g"),
        ("2, 35 Gbit/s, to Horovod (arXiv v1)", 2.32, SMALLER, VPC),
        ("2, 35 Gbit/s, to Whale's own (FastNN)", 1.34, SMALLER, VPC),
    ):
        against = copies("bert_large", nodes, batch, network)
        rows.append(Row(what, reported, piped(2, nodes, network), against))
    for stages in (4, 8):
        against = copies("bert_large", v100(8), batch)
        rows.append(Row(f"{stages}, 50 Gbit/s", NOT_KNOWN, piped(stages, v100(8)), against))
    return rows


def piped_over_one() -> Sequence[Row]:
    """Return the rows of Figure 12 over one V100."""
    reported: Mapping[int, float | str] = {2: 23.0, 4: NOT_KNOWN, 8: NOT_KNOWN}
    return [
        over_one("bert_large", piped(n, v100(8)), reported[n], f"{n}, over one V100 with 16", 16)
        for n in reported
    ]


def split_head(nodes: int, reported: float) -> Row:
    ours = Side("resnet50_100k", SPLIT_HEAD, v100(nodes), 32 * 8 * nodes)
    return Row(f"{8 * nodes} V100", reported, ours, replace(ours, graph=COPIES))


def million(nodes: int, graph: Any = SPLIT_HEAD) -> Side:
    return Side("resnet50_1m", graph, v100(nodes), 32 * 8 * nodes)


def patterns(batch: int) -> Sequence[Row]:
    """Return the rows of Figure 15: a head split by classes against one split by features."""
    reported: Mapping[int, float | str] = {1: 1.6, 2: NOT_KNOWN, 4: 3.75}
    rows = []
    for nodes in reported:
        ours = Side("resnet50_100k", SPLIT_HEAD, v100(nodes), batch * 8 * nodes)
        summed = replace(ours, graph=SUMMED_HEAD)
        rows.append(Row(f"{8 * nodes} V100", reported[nodes], ours, summed))
    return rows


def bridges(batch: int) -> Sequence[Row]:
    """Return the rows of Figure 16: what the bridges of a split head take of a step."""
    reported: Mapping[int, float | str] = {1: 0.06, 2: NOT_KNOWN, 4: 0.10}
    return [
        Row(
            f"{8 * nodes} V100, part of a step",
            reported[nodes],
            Side("resnet50_100k", SPLIT_HEAD, v100(nodes), batch * 8 * nodes),
            measure="bridges",
        )
        for nodes in reported
    ]


def balanced(what: str, reported: float, ours: Side) -> Row:
    return Row(what, reported, ours, replace(ours, balance="even"))


def m6(nodes: int) -> Side:
    graph = {"replicate": {"of": pipeline([RECOMPUTED] * 8, micro_batches=35)}}
    return Side("m6_10b", graph, v100(nodes), 35 * nodes, "sgd")


# --- The figures ---

FIGURES: Mapping[int, Figure] = {
    9: Figure(
        "Data parallelism on 8 to 64 V100, ResNet50: times as fast as one V100",
        "32 images a device (FastNN's). Adam.",
        resnet_copies,
        "The paper's text has no number of this figure that our sources quote. Ours is near the "
        "number of devices, as the sums of 102 MB go beside a backward that takes longer.",
        batches=(32, 64),
    ),
    10: Figure(
        "Data parallelism on 64 V100, BERT-Large: times as fast as one V100",
        "A micro-batch of FastNN a device: 2 samples of 384 tokens. Adam.",
        bert_copies,
        "The paper does not say the batch, which decides: sums of 1.3 GB take about 0.4 s at 50 "
        "Gbit/s whatever the batch, and one V100 takes 0.1 s for each sample. With one sample a "
        "device ours are on both sides of the paper's figure.",
        batches=(2, 1, 6),
    ),
    11: Figure(
        "Whale's pipeline (1F1B) against GPipe, BERT-Large",
        "One node; four micro-batches a stage, of 2 samples of 384 tokens. GPipe computes its "
        "activations again, as published (Huang et al. 2019, section 2.3); 1F1B does not. Adam.",
        lambda _: [against_gpipe(4, 1.45), against_gpipe(8, 1.14)],
        "GPipe's second forward is a third more work, whatever the number of stages, and nearly "
        "all of both rows. Why Whale gained less of it with 8 stages is not said.",
    ),
    12: Figure(
        "Copies of 2, 4 and 8 TaskGraphs against data parallelism, BERT-Large, 64 V100",
        "Ten micro-batches of 2 samples (FastNN, train_bert_large_pipe.sh), against data "
        "parallelism with a micro-batch, 2 samples, a device: FastNN has no script of that "
        "baseline. Adam.",
        hybrids,
        "The rows of 35 Gbit/s differ in whose data parallelism they are compared with: FastNN has "
        "Whale's at 1.736 times Horovod's. Ours is one, whose sums are at the network's bandwidth. "
        "What decides is the baseline's batch: with more samples a device it hides its sums behind "
        "more work, and a pipeline of ten micro-batches loses to it, as below. Of eight TaskGraphs "
        "ten micro-batches leave seven of 17 moments idle, which a copy's 20 samples do not pay "
        "for. The batch of one V100 is not said either; 16 is nearly all that fits, "
        "and nearly its fastest.",
        batches=(2, 6, 10),
        also=piped_over_one(),
    ),
    13: Figure(
        "Split head against data parallelism, ResNet50 with 100,000 classes",
        "32 images a device, Adam (FastNN, resnet_split.py).",
        lambda _: [split_head(1, 1.13), split_head(2, 1.66), split_head(4, 2.43)],
        "It is the baseline's sum over the network that counts: nodes sum their 913 MB inside and "
        "exchange the sums, at the bandwidth the network has by name.",
    ),
    14: Figure(
        "The same with 1,000,000 classes: scaling from 8 to 32 V100",
        "32 images a device, Adam.",
        lambda _: [
            Row("split head, samples a second a device", 0.95, million(4), million(1), 4),
            Row("data parallelism", NO_MEMORY, million(1, COPIES)),
        ],
        "The more devices share the head, the less of it each updates, which is as much as the "
        "network adds to the exchange of features.",
    ),
    15: Figure(
        "Sharding patterns of the head, ResNet50 with 100,000 classes: SP1 against SP2",
        "SP1 has the head's weight split by classes, SP2 by features, whose products are partial "
        "sums. 32 images a device, Adam. The paper reports 1.6 to 3.75; that these are 8 and 32 "
        "V100 is assumed.",
        patterns,
        "Whale's SP2 all-reduces the logits of all images; ours reduce-scatters them, which sends "
        "half as much, as each device wants its own rows alone. With twice the bytes, the rows of "
        "16 and 32 V100 would be 2.1 and 3.1. Logits of 256 images are 102 MB, which NVLink "
        "carries within 1 ms, and a step is 0.11 s: on one node no pattern is far from the other.",
        batches=(32, 64),
    ),
    16: Figure(
        "Bridge overhead of the split head, ResNet50 with 100,000 classes",
        "The seconds of the casts at the head's ends, forward and backward, of the seconds of a "
        "step. 32 images a device, Adam.",
        bridges,
        "Ours are transfers alone, at the links' bandwidth: the features of 256 images are 2 MB, "
        "which NVLink carries in 0.05 ms. 6% of a step on one node would be 7 ms, so that the "
        "paper must count more than transfers: TensorFlow's copies at the ends of a bridge, or "
        "waiting for the slowest device.",
        batches=(32, 64),
    ),
    17: Figure(
        "Hardware-aware against even data parallelism, 8 V100 and 8 P100",
        "Even shares of 32 images (Adam), of 128 pairs of 50 tokens (tensorflow/nmt's batch; SGD), "
        "and of 6 samples of 384 tokens (Adam), which is all that a P100 holds.",
        lambda _: [
            balanced("ResNet50", 1.30, Side("resnet50", COPIES, mixed(8), 16 * 32)),
            balanced("GNMT", 1.27, Side("gnmt", COPIES, mixed(8), 16 * 128, "sgd")),
            balanced("BERT-Large", 1.45, Side("bert_large", COPIES, mixed(8), 16 * 6)),
        ],
        "A P100 is taken for 0.56 of a V100 in products and 0.65 in memory traffic (what such "
        "devices reach of their peaks), with which no shares gain more than 1.39 and 1.27; 1.45 "
        "takes one with 0.53. BERT's samples are so few that shares are coarse: 8 and 4 for 6 "
        "and 6.",
    ),
    18: Figure(
        "Hardware-aware against even cut, 4 stages of 2 devices, 4 V100 and 4 P100",
        "The first two stages on the V100s of one node, the others on the P100s of another; 16 "
        "micro-batches of 2 samples of 384 tokens. Adam.",
        lambda _: [
            balanced("BERT-Large", 1.2, Side("bert_large", pipeline([PAIR] * 4), mixed(4), 32)),
            balanced("T5-Large", 1.2, Side("t5_large", pipeline([PAIR] * 4), mixed(4), 32)),
        ],
        "not looked into.",
    ),
    19: Figure(
        "M6-10B: scaling from 8 to 32 nodes of 8 V100",
        "A copy a node, of 8 stages; 35 micro-batches of one sample of 512 tokens; recomputation. "
        "SGD stands for Adafactor, whose state is next to nothing.",
        lambda _: [Row("samples a second a device", 0.91, m6(32), m6(8), 4)],
        "not looked into.",
    ),
}
