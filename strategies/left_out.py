"""Families of strategies that `graph: auto` does not look at, whatever the devices, and why.

The reasons are those of the resolver, which would refuse each of them.
"""

from collections.abc import Mapping
from dataclasses import replace

from whale_train.strategies.findings import Findings
from whale_train.strategies.space import Space
from whale_train.strategies.training import Training


def left_out_families(space: Space, findings: Findings, training: Training) -> Mapping[str, str]:
    """Return the reason for every family of which `space` has no strategy, though a model that can
    be cut, trained with another optimizer and in whole batches, has some on these devices."""
    profile, found = findings.profile, dict[str, str]()
    if not space.exported:
        wider = replace(space, exported=True, places=max(space.places, 2))
        looked_at = {shape.family for shape in space.arrangements()}
        for shape in wider.arrangements():
            if shape.family not in looked_at:
                found[shape.family] = _not_cut(findings, training)
    if not space.split_head and profile.graph is None and space.available > 1:
        found["copies beside a split head"] = _not_cut(findings, training)
    if not space.zero and space.available > 1:
        reason = (
            "optimizer=lamb needs the norm of each parameter, which ZeRO partitions anywhere"
            if training.optimizer == "lamb"
            else f"whether {profile.perhaps_unused[0]} gets a gradient depends on the values "
            f"{profile.name} looks at, and ZeRO needs to know"
        )
        found |= {f"copies, ZeRO {zero}": reason for zero in (1, 2, 3)}
    return found


def _not_cut(findings: Findings, training: Training) -> str:
    profile = findings.profile
    if profile.graph is None:
        return f"needs the model's graph, and {profile.name} cannot be exported"
    return (
        f"not looked at: train.accumulate={training.accumulate} cuts the batch of copies, and "
        "the micro-batches of these are their own; use train.accumulate=1"
    )
