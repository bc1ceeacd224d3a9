"""The plan of a flat strategy, written: copies of the whole model, perhaps beside a split head."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from whale_train.strategies.cluster import Cluster
from whale_train.strategies.cut import CLASSES
from whale_train.strategies.deepspeed_config import deepspeed_config, deepspeed_optimizer
from whale_train.strategies.grammar import Replicate
from whale_train.strategies.graph import BoundTaskGraph, StrategyGraph
from whale_train.strategies.layouts import BATCH
from whale_train.strategies.memory import added
from whale_train.strategies.offloading import offload_decisions
from whale_train.strategies.operations import ModelProfile
from whale_train.strategies.plan import Decision, Plan, Prediction, RankPlan, TaskGraph
from whale_train.strategies.rewrite_plan import rewrite_plan, shard_plan
from whale_train.strategies.shares import even_shares, tile
from whale_train.strategies.sharing import BackboneMemory, Sharing, Training, split_head_memory


@dataclass(frozen=True)
class FlatPlan:
    """What is decided of it: `graph` on the devices of `cluster`, what each of these takes, and the
    bytes `kept` on hosts."""

    graph: StrategyGraph
    cluster: Cluster
    profile: ModelProfile
    training: Training
    sharing: Sharing
    kept: Sequence[float]

    def written(self, predicted: Prediction) -> Plan:
        """Return the plan."""
        count = len(self.cluster.devices)
        planned = tuple(self._task_graph(i) for i in range(len(self.graph.task_graphs)))
        groups: dict[str, tuple[tuple[int, ...], ...]] = {"world": (tuple(range(count)),)}
        for task_graph in planned:
            kind = "model" if task_graph.shards else "data"
            groups[f"{task_graph.name}.{kind}_parallel"] = (tuple(range(count)),)
        rewrite = None
        if self.graph.cut is not None:
            batch = tile(self.training.global_batch, self.sharing.samples)
            classes = tile(sum(self.sharing.classes), self.sharing.classes)
            rewrite = rewrite_plan(self.graph.cut, {BATCH: batch, CLASSES: classes})
        backbone = BackboneMemory(self.graph, self.profile, self.training, self.cluster)
        return Plan(
            cluster=self.cluster.name,
            world_size=count,
            global_batch=self.training.global_batch,
            precision=self.training.precision,
            task_graphs=planned,
            groups=groups,
            schedule="none",
            ranks=tuple(self._rank(rank, backbone) for rank in range(count)),
            predicted=predicted,
            decisions=tuple(self._decisions()),
            exported=self.profile.graph is not None,
            rewrite=rewrite,
        )

    def _task_graph(self, number: int) -> TaskGraph:
        bound, cut, sharing = self.graph.task_graphs[number], self.graph.cut, self.sharing
        node, ranks = bound.node, tuple(range(len(sharing.samples)))
        copied = isinstance(node, Replicate)
        unused = self.profile.unused_parameters
        sharded = cut.shards if cut and not copied else {}
        narrow: frozenset[str] = frozenset()
        if isinstance(node, Replicate) and node.zero and self.training.precision != "fp32":
            narrow = self.profile.narrow.difference(unused)
        return TaskGraph(
            id=number,
            name=bound.name,
            primitive="replicate" if copied else "split",
            path=node.path,
            modules=bound.modules,
            parameters=bound.parameters,
            flops=bound.flops,
            zero=node.zero if isinstance(node, Replicate) else 0,
            offload={
                "optimizer": node.offload_optimizer if isinstance(node, Replicate) else "none",
                "parameters": node.offload_parameters if isinstance(node, Replicate) else "none",
            },
            replicas=tuple((rank,) for rank in ranks) if copied else (ranks,),
            shares=sharing.samples if copied else (sum(sharing.samples),),
            trained=tuple(path for path in bound.parameters if path not in unused),
            narrow=tuple(path for path in bound.parameters if path in narrow),
            shards=dict.fromkeys(sharded, tile(sum(sharing.classes), sharing.classes)),
            shard_dims={path: shard.dim for path, shard in sharded.items()},
            shard_layouts={path: shard_plan(shard) for path, shard in sharded.items()},
        )

    def _rank(self, rank: int, backbone: BackboneMemory) -> RankPlan:
        training, sharing = self.training, self.sharing
        samples, pieces = sharing.samples[rank], training.accumulate
        sizes = even_shares(samples, pieces, [samples] * pieces)
        assert sizes is not None
        start = sum(sharing.samples[:rank])
        micro_batches = tuple((start + a, start + b) for a, b in tile(samples, sizes))
        memory = backbone.of(sizes[0])
        if sharing.classes:
            classes = sharing.classes[rank]
            head = split_head_memory(self.graph, self.profile, training, classes)
            memory = added(memory, head)
        return RankPlan(
            rank=rank,
            node=self.cluster.node_of[rank],
            device=self.cluster.devices[rank].name,
            task_graphs=tuple(range(len(self.graph.task_graphs))),
            micro_batch_size=sizes[0],
            micro_batches=pieces,
            memory_bytes=memory,
            deepspeed={
                str(number): self._engine(bound, sizes[0])
                for number, bound in enumerate(self.graph.task_graphs)
            },
            samples=micro_batches if pieces > 1 else (),
        )

    def _engine(self, bound: BoundTaskGraph, samples: int) -> dict[str, Any] | None:
        """DeepSpeed's config for micro-batches of `samples`; None where another engine serves."""
        node, training = bound.node, self.training
        if not isinstance(node, Replicate) or not node.zero:
            return None
        offloaded = node.offload_optimizer == "cpu"
        return deepspeed_config(
            node,
            samples,
            training.grad_clip,
            deepspeed_optimizer(training.optimizer, training.optimizer_options, offloaded),
            self.cluster.on_cpu,
        )

    def _decisions(self) -> Iterator[Decision]:
        """What nobody asked for."""
        graph, samples = self.graph, self.sharing.samples
        count, body = len(samples), graph.task_graphs[0]
        if graph.degree < count:
            reason = f"an outer replicate of {count // graph.degree} uses all {count} devices"
            yield Decision(f"{body.node.path}.degree", str(count), str(graph.degree), reason)
        elif body.node.degree is None:
            reason = f"all devices of hardware={self.cluster.name}"
            yield Decision(f"{body.node.path}.degree", str(count), "", reason)
        even = even_shares(sum(samples), count, [sum(samples)] * count)
        if even != samples:
            reason = "in proportion to each device's speed, within its memory"
            rejected = f"even {_folded(even or ())}"
            yield Decision("strategy.balance", _folded(samples), rejected, reason)
        if graph.head and graph.cut:
            reason = f"the output projection of {self.profile.name}: {graph.head.weight} with "
            reason += f"{graph.head.classes} classes"
            modules = graph.head.module or "(the model)"
            yield Decision(f"{graph.task_graphs[1].node.path}.modules", modules, "", reason)
            for segment in graph.cut.segments:
                for name in segment.assignment.gathered if segment.assignment else ():
                    reason = "no rule for it: it is given whole tensors, which is slower"
                    yield Decision(f"operation {name}", "whole", "sharded", reason)
        if isinstance(body.node, Replicate):
            yield from offload_decisions(body.node, self.kept, self.cluster)
        for path in self.profile.unused_parameters:
            reason = "the loss does not depend on it"
            yield Decision(path, "not trained", "", reason)


def _folded(shares: Sequence[int]) -> str:
    """`8 x 43, 8 x 25` for equal neighbours."""
    runs: list[list[int]] = []
    for each in shares:
        if runs and runs[-1][1] == each:
            runs[-1][0] += 1
        else:
            runs.append([1, each])
    return ", ".join(f"{times} x {share}" for times, share in runs)
