"""Note in the plan the number of weights that get a low-rank addition (LoRA).

The note counts experts and routers separately, since peft also adds to these if all linear layers
are asked for.
"""

import re

from whale_train.models.options import ADAPTERS
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.plan.plan import Decision

_ADDITION = re.compile(r"(.+?)((?:\.base_layer)*)\.lora_(?:embedding_)?A\.[^.]+(?:\.weight)?")
_INSIDE = re.compile(r"(.+?)(?:\.base_layer)+\.[^.]+")


def explain_additions(profile: ModelProfile) -> tuple[Decision, ...]:
    """Return a note for the plan on the low-rank additions among the trained parameters; nothing
    without additions. Layers that share a weight count as one addition."""
    matches = (_ADDITION.fullmatch(parameter.path) for parameter in profile.parameters)
    modules = [match[1] for match in matches if match is not None]
    if not modules:
        return ()
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in profile.frozen:
        match = _INSIDE.fullmatch(parameter.path)
        if match is not None:
            shapes[match[1]] = parameter.shape
    stacks = {path: shapes[path][0] for path in modules if len(shapes.get(path, ())) == 3}
    beside = {path.rpartition(".")[0]: experts for path, experts in stacks.items()}
    experts = sum(path in stacks for path in modules)
    routers = sum(
        len(shapes.get(path, ())) == 2 and shapes[path][0] == beside.get(path.rpartition(".")[0])
        for path in modules
    )
    reason = "all else is frozen"
    if experts:
        reason += f"; {_counted(experts, 'is a stack', 'are stacks')} of experts, "
        reason += f"{_counted(routers, 'a router', 'routers')}"
    return (Decision(ADAPTERS, f"added to {_counted(len(modules))}", "", reason),)


def _counted(number: int, one: str = "weight", many: str = "weights") -> str:
    """Return a count with a noun, such as `3 weights`, or `no weights` for 0."""
    return f"{number or 'no'} {one if number == 1 else many}"
