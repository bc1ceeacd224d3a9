"""Define the one form of every strategy: copies of a pipeline of stages, each of shard groups.

Every nesting comes down to this form. A replicate around a pipeline is the pipeline's copies, a
replicate inside a stage is the stage's copies, and a split is the shard group of one copy. A
strategy without a pipeline has one stage. `normal_form.py` reads the form out of a strategy.
"""

from dataclasses import dataclass

from whale_train.strategies.grammar.nodes import Pipeline, Replicate, Split, Strategy, every_node


@dataclass(frozen=True)
class StageForm:
    """One stage of a pipeline.

    path: path of the stage's key in the strategy.
    copies: copies of the stage in one copy of the pipeline.
    shards: devices of a copy, its shard group.
    split: the split of the stage, if it has one.
    body: the replicate beside `split`. Each member of the shard group then holds what the splits
        leave, for its part of the samples.
    modules: modules that the stage must hold (None: a balanced cut decides).
    recompute: `none`, `full` or `auto`.
    device: kind of the devices (None: whichever come next).
    more: other splits beside `body`, of the head, experts or other modules.
    """

    path: str
    copies: int
    shards: int
    split: Split | None = None
    body: Replicate | None = None
    modules: tuple[str, ...] | None = None
    recompute: str = "none"
    device: str | None = None
    more: tuple[Split, ...] = ()

    @property
    def splits(self) -> tuple[Split, ...]:
        """Return the splits of the stage: none, one, or all beside its body."""
        return (self.split, *self.more) if self.split else ()

    @property
    def width(self) -> int:
        """Return the number of devices that hold this stage in one copy of the pipeline."""
        return self.copies * self.shards


@dataclass(frozen=True)
class Form:
    """The form of a strategy: copies of a pipeline.

    copies: copies of the pipeline.
    stages: stages of the pipeline; a strategy without a pipeline has one.
    pipeline: the strategy's pipeline, if it has one.
    keeper: the replicate that says how copies keep what they have in common (ZeRO, offload).
    added: part of `copies` that nobody asked for.
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
        """Return the number of devices of one copy."""
        return sum(stage.width for stage in self.stages)

    @property
    def members(self) -> int:
        """Return the number of devices that share the samples of a micro-batch.

        They are the members of a shard group that are beside a split, or one.
        """
        return max((stage.shards for stage in self.stages if stage.body), default=1)


def partitions(strategy: Strategy) -> bool:
    """Return whether copies partition what they have in common, by ZeRO 1, 2 or 3."""
    return any(isinstance(x, Replicate) and x.zero for x in every_node(strategy.graph))


def needs_graph(strategy: Strategy) -> bool:
    """Return whether ranks run the model's exported graph.

    Every strategy needs it but copies of the whole model, which run the model as it is.
    """
    return not all(isinstance(node, Replicate) for node in every_node(strategy.graph))
