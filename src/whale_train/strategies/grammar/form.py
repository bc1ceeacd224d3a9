"""Define the normal form of every strategy: replicas of a pipeline of stages, each of shard groups.

Every nesting reduces to this form. A replicate around a pipeline gives the pipeline's replicas, a
replicate inside a stage the stage's copies, and a split the shard group of one copy. A strategy
without a pipeline has one stage. `normal_form.py` reduces a strategy to this form.
"""

from dataclasses import dataclass

from whale_train.strategies.grammar.nodes import Pipeline, Replicate, Split, Strategy, every_node
from whale_train.strategies.grammar.recompute import NOTHING, Recompute


@dataclass(frozen=True)
class StageForm:
    """One stage of a pipeline.

    path: path of the stage's key in the strategy.
    copies: copies of the stage in one replica of the pipeline.
    shards: devices of a copy, its shard group.
    split: the split of the stage, if it has one.
    body: the replicate beside `split`. Each member of the shard group then holds all parameters
        outside the splits, and runs them on its part of the samples.
    modules: modules that the stage must hold (None: a balanced cut decides).
    recompute: what it computes again in the backward.
    device: kind of the devices (None: the next ones, of any kind).
    more: further splits beside `body`, of the head, experts or other modules.
    offload: whether what its blocks save is on the host: `none`, `cpu` or `auto`.
    offload_path: path of the key that says `offload`.
    """

    path: str
    copies: int
    shards: int
    split: Split | None = None
    body: Replicate | None = None
    modules: tuple[str, ...] | None = None
    recompute: Recompute = NOTHING
    device: str | None = None
    more: tuple[Split, ...] = ()
    offload: str = "none"
    offload_path: str = ""

    @property
    def splits(self) -> tuple[Split, ...]:
        """Return the splits of the stage: none, one, or all beside its body."""
        return (self.split, *self.more) if self.split else ()

    @property
    def shares_sequence(self) -> bool:
        """Return True if the members of the shard group divide the positions of every sample, and
        each holds all parameters (context parallelism)."""
        return self.split is not None and self.split.shares_sequence

    @property
    def copies_weights(self) -> bool:
        """Return True if every member of the shard group holds all parameters outside the splits of
        modules."""
        return self.body is not None or self.shares_sequence

    @property
    def width(self) -> int:
        """Return the number of devices that hold this stage in one replica of the pipeline."""
        return self.copies * self.shards


@dataclass(frozen=True)
class Form:
    """The normal form of a strategy: replicas of a pipeline.

    copies: replicas of the pipeline.
    stages: stages of the pipeline; a strategy without a pipeline has one.
    pipeline: the strategy's pipeline, if it has one.
    keeper: the replicate with the ZeRO and offload settings of the replicas.
    added: factor of `copies` that the request does not ask for.
    filled: path of the node whose `auto` degree took all devices of a strategy without a pipeline.
    """

    copies: int
    stages: tuple[StageForm, ...]
    pipeline: Pipeline | None
    keeper: Replicate | None
    added: int = 1
    filled: str | None = None

    @property
    def width(self) -> int:
        """Return the number of devices of one replica."""
        return sum(stage.width for stage in self.stages)

    @property
    def members(self) -> int:
        """Return the number of devices that divide the samples of a micro-batch: the members of a
        shard group with a replicate beside its splits, else 1."""
        return max((stage.shards for stage in self.stages if stage.body), default=1)


def partitions(strategy: Strategy) -> bool:
    """Return True if replicas partition their common state, by ZeRO 1, 2 or 3."""
    return any(isinstance(x, Replicate) and x.zero for x in every_node(strategy.graph))


def needs_graph(strategy: Strategy) -> bool:
    """Return True if ranks run the model's exported graph.

    All strategies do, except replicas of the whole model, which run the original module.
    """
    return not all(isinstance(node, Replicate) for node in every_node(strategy.graph))
