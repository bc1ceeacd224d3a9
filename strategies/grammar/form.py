"""The one form of every strategy: copies of a pipeline of stages, each copies of shard groups.

Whatever the nesting, it comes down to that: a replicate around a pipeline is its copies, a
replicate inside a stage the stage's, a split the shard group of one copy, and a strategy without a
pipeline has one stage. `normal_form.py` reads it out of a strategy.
"""

from dataclasses import dataclass

from whale_train.strategies.grammar.nodes import Pipeline, Replicate, Split, Strategy, every_node


@dataclass(frozen=True)
class StageForm:
    """One stage: `copies` of a group of `shards` devices, of the kind `device` (None: whichever
    come next). `modules` are those it must hold (None: a balanced cut decides). `body` is the
    replicate beside a `split`, and perhaps `more` of them, of the head, experts or other modules:
    each member of the group then holds what they leave, for its part of the samples."""

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
        """The splits of the stage: one, or those beside its body."""
        return (self.split, *self.more) if self.split else ()

    @property
    def width(self) -> int:
        """Devices of one copy of the pipeline that hold this stage."""
        return self.copies * self.shards


@dataclass(frozen=True)
class Form:
    """`copies` of a pipeline of `stages`; a strategy without a pipeline has one stage.

    `keeper` says how copies keep what they have in common (ZeRO, offload); `added` is the part of
    `copies` nobody asked for, and `filled` the path of the node whose `auto` degree took all
    devices of a strategy without a pipeline.
    """

    copies: int
    stages: tuple[StageForm, ...]
    pipeline: Pipeline | None
    keeper: Replicate | None
    added: int = 1
    filled: str | None = None

    @property
    def width(self) -> int:
        """Devices of one copy."""
        return sum(stage.width for stage in self.stages)

    @property
    def members(self) -> int:
        """How many share the samples of a micro-batch: those beside what is split, or one."""
        return max((stage.shards for stage in self.stages if stage.body), default=1)


def needs_graph(strategy: Strategy) -> bool:
    """Return whether ranks run the model's exported graph: all but copies of the whole model do,
    which run it as it is."""
    return not all(isinstance(node, Replicate) for node in every_node(strategy.graph))
