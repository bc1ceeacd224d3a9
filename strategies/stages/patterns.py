"""The patterns of a stage's weights that a split names."""

from collections.abc import Collection

from whale_train.strategies.grammar.nodes import Split
from whale_train.strategies.layouts.propagation import R
from whale_train.strategies.partition.pipeline_partition import Slice
from whale_train.strategies.stages.placement import Staging
from whale_train.strategies.tensor_parallel.choose import Sharded, choose_patterns


def sharded(
    job: Staging,
    part: Slice,
    named: Collection[str],
    split: Split,
    members: int,
) -> Sharded:
    """Return the layouts of a stage's slice over so many `members`, which takes and gives whole
    values: of its weights, those that are `named`, by path, may be cut as `split` says."""
    whole = [(path, "replicate") for path in part.weights if path not in named]
    return choose_patterns(
        job.graph,
        part.operations,
        parameters=job.profile.weights_read(part.operations),
        held=job.profile.weight_elements,
        group_size=members,
        given=dict.fromkeys(part.takes, R),
        wanted=dict.fromkeys(part.gives, R),
        by_hand=(*whole, *split.patterns),
        aliases={path: job.profile.weight_by_path[path].aliases for path in part.weights},
        dim=split.dim,
        key=split.path,
    )
