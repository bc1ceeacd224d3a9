"""Every strategy of the grammar within bounds, each resolved and simulated by the planner.

The bounds, for a model of few blocks on at most four devices of at most two kinds:

* Devices: every set of them by kind, in every order of kinds, and all in the inventory's order.
* Nesting: replicas of a pipeline, with any number of stages, each with any number of copies of
  shard groups of any size. Stages are on the next devices, or every stage names its kind.
* Splits: `auto`, `sequence`, and parts beside copies: the head, the table, both, or one block or
  all where there is one stage. All stages of a pipeline with splits have them by one `dim`; a part
  beside copies of a pipeline is the head of the last stage or the table of the first.
* Patterns: without a pipeline, one weight by hand, every pattern, under both values of `dim`.
* Micro-batches: every number up to `most_pieces`; every schedule; recomputation is `auto`.
* Cuts: every one between blocks.
* ZeRO 0 to 3, ZeRO 0 and 1 in pipelines, each with every offload where memory is `tight`.

Shares of the batch are balanced by the planner. What the planner refuses is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, permutations, product
from math import inf
from typing import Any

from tests.unit.plan_requests import strategy_of

from whale_train.errors import PlanError
from whale_train.strategies.grammar.nodes import PATTERNS, SCHEDULES
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.training import Training
from whale_train.strategies.resolver.resolve import consider
from whale_train.strategies.stages.analysis import ModelAnalysis

Graph = Mapping[str, Any]


@dataclass(frozen=True)
class Bounds:
    """What of the grammar is tried.

    most_pieces: largest number of micro-batches.
    tight: True if optimizers are offloaded too.
    """

    most_pieces: int
    tight: bool = False


@dataclass(frozen=True)
class Tried:
    """A strategy, the places where it is cut (empty: the planner's), and its predicted step."""

    seconds: float
    written: Graph
    cut: tuple[int, ...] = ()


def cheapest(
    profile: ModelProfile, cluster: Cluster, train: Training, bounds: Bounds
) -> tuple[Tried | None, int]:
    """Return the strategy with the shortest predicted step of all that fit the memory (None: none
    does), and how many were simulated."""
    findings = ModelAnalysis(profile, train.precision)
    best, simulated = Tried(inf, {}), 0
    for written in strategies(profile, cluster, train, bounds):
        for cut in _cuts(findings, written):
            try:
                considered = consider(
                    strategy_of(written), cluster, findings, train, cut=cut, moving=not cut
                )
            except PlanError:
                continue
            simulated += 1
            if considered.step.spans.seconds < best.seconds:
                best = Tried(considered.step.spans.seconds, written, cut)
    return (best if best.written else None), simulated


def _cuts(findings: ModelAnalysis, written: Graph) -> Iterator[tuple[int, ...]]:
    """Yield every cut of a pipeline that leaves each stage a weight. Yield (), the planner's, where
    there is none, and for interleaved stages, which name no modules."""
    inside = written["graph"]["replicate"].get("of", {})
    pipeline = inside.get("pipeline", {}) if isinstance(inside, dict) else {}
    stages = len(pipeline.get("stages", ()))
    if stages < 2 or pipeline["schedule"] == "interleaved_1f1b":
        yield ()
        return
    weights, last = findings.order.weights, len(findings.order.places) - 1
    first_of = {weights[place]: place for place in range(last, -1, -1)}  # no two cuts alike
    inner = sorted(place for place in first_of.values() if 0 < place < last)
    yield from ((0, *places, last) for places in combinations(inner, stages - 1))


def strategies(
    profile: ModelProfile, cluster: Cluster, train: Training, bounds: Bounds
) -> Iterator[Graph]:
    """Yield every strategy file within `bounds`."""
    kinds = cluster.kinds
    for counts in product(*(range(count + 1) for count in kinds.values())):
        used = {kind: count for kind, count in zip(kinds, counts, strict=True) if count}
        orders = [dict(order) for order in permutations(used.items())] if used else []
        is_new = used == kinds and all(cluster.of_kinds(order) != cluster for order in orders)
        devices = [{"devices": order} for order in orders] + [{}] * is_new
        for graph in _graphs(profile, used, train, bounds) if used else ():
            yield from ({**chosen, "graph": graph} for chosen in devices)


def _graphs(
    profile: ModelProfile, used: Mapping[str, int], train: Training, bounds: Bounds
) -> Iterator[Any]:
    """Yield the graphs that use all devices of `used`."""
    count = sum(used.values())
    for keeping in _keepings(3, bounds.tight):
        yield {"replicate": keeping}
        for copies, inner in _unstaged(profile, count):
            yield {"replicate": {"degree": copies, **keeping, "of": inner}}
    for copies in (n for n in range(1, count + 1) if count % n == 0):
        for stages in _stage_lists(count // copies):
            for kinds in _kinds_of(stages, used, copies):
                for dim in _dims(stages):
                    nodes = [
                        _stage(stage, dim, kind, number, len(stages))
                        for number, (stage, kind) in enumerate(zip(stages, kinds, strict=True))
                    ]
                    for pieces, schedule, keeping in product(
                        range(1, min(bounds.most_pieces, train.global_batch // copies) + 1),
                        SCHEDULES if len(stages) > 1 else SCHEDULES[:1],
                        _keepings(1, bounds.tight),
                    ):
                        pipeline = {"micro_batches": pieces, "schedule": schedule, "stages": nodes}
                        yield {
                            "replicate": {"degree": copies, **keeping, "of": {"pipeline": pipeline}}
                        }


def _keepings(highest: int, tight: bool) -> Iterator[dict[str, Any]]:
    """Yield the ZeRO stages up to `highest`, with their offloads where memory is tight."""
    for zero in range(highest + 1):
        yield {"zero": zero} if zero else {}
        if zero and tight:
            yield {"zero": zero, "offload": {"optimizer": "cpu"}}
    if highest == 3 and tight:
        yield {"zero": 3, "offload": {"optimizer": "cpu", "parameters": "cpu"}}


def _unstaged(profile: ModelProfile, count: int) -> Iterator[tuple[int, Any]]:
    """Yield the replicas, and the splits in each, that need no pipeline."""
    weights = [parameter.path for parameter in profile.parameters]
    blocks = sorted({path.rpartition(".")[0] for path in weights if path.startswith("blocks.")})
    beside = [["head"], ["table"], ["head", "table"], ["blocks"], *([block] for block in blocks)]
    for shards in (n for n in range(2, count + 1) if count % n == 0):
        for dim in ("auto", "sequence"):
            yield count // shards, {"split": {"degree": shards, "dim": dim}}
            for path, pattern in product(weights, PATTERNS):
                by_hand = {"degree": shards, "dim": dim, "patterns": {path: pattern}}
                yield count // shards, {"split": by_hand}
        for modules in beside:
            splits = [{"split": {"degree": shards, "modules": module}} for module in modules]
            yield count // shards, [{"replicate": {}}, *splits]


@cache
def _stage_lists(width: int) -> Sequence[tuple[tuple[int, int], ...]]:
    """Return the lists of stages on `width` devices, each as (copies, size of a shard group)."""
    lists = [()] if width == 0 else list[tuple[tuple[int, int], ...]]()
    for first in range(1, width + 1):
        for copies in (n for n in range(1, first + 1) if first % n == 0):
            rest = _stage_lists(width - first)
            lists += [((copies, first // copies), *others) for others in rest]
    return lists


def _kinds_of(
    stages: Sequence[tuple[int, int]], used: Mapping[str, int], copies: int
) -> Iterator[Sequence[str]]:
    """Yield the kinds of devices that the stages may name: none, or one each, which use all."""
    yield [""] * len(stages)
    for kinds in product(used, repeat=len(stages)) if len(used) > 1 < len(stages) else ():
        held = dict.fromkeys(used, 0)
        for kind, (of_stage, shards) in zip(kinds, stages, strict=True):
            held[kind] += copies * of_stage * shards
        if held == dict(used):
            yield kinds


def _dims(stages: Sequence[tuple[int, int]]) -> Sequence[str]:
    """Return how the shard groups of a pipeline may be split."""
    if all(shards == 1 for _, shards in stages):
        return [""]
    ends = [*["beside head"] * (stages[-1][1] > 1), *["beside table"] * (stages[0][1] > 1)]
    return ["auto", "sequence", *ends]


def _stage(
    stage: tuple[int, int], dim: str, kind: str, number: int, stages: int
) -> Mapping[str, Any]:
    """Return the node of one stage of a pipeline, the `number`th of `stages`."""
    copies, shards = stage
    inner: Any = {"split": {"degree": shards, "dim": "auto" if " " in dim else dim}}
    if (dim == "beside head" and number == stages - 1) or (dim == "beside table" and number == 0):
        inner = [{"replicate": {}}, {"split": {"degree": shards, "modules": dim.split()[1]}}]
    of = {} if shards == 1 else {"of": inner}
    if copies > 1:
        of = {"of": {"replicate": {"degree": copies, **of}}}
    return {"stage": {"recompute": "auto", **({"device": kind} if kind else {}), **of}}
