"""Name the groups of ranks in a plan, and the strategy keys that they belong to."""

from collections.abc import Sequence

from whale_train.strategies.plan.plan import Plan

WORLD = "world"  # the group of all ranks


def context_of(name: str) -> str:
    """Return the name of the groups in which the TaskGraph `name` divides the positions of every
    sample."""
    return f"{name}.context_parallel"


def inside_of(name: str) -> str:
    """Return the name of the groups in which replicas of the TaskGraph `name` that share a host sum
    gradients, where these are summed inside hosts first."""
    return f"{name}.data_parallel.inside"


def across_of(name: str) -> str:
    """Return the name of the groups in which replicas of the TaskGraph `name` on different hosts
    then sum their parts."""
    return f"{name}.data_parallel.across"


def group_name(plan: Plan, ranks: Sequence[int]) -> str:
    """Return the name of the group of `ranks`: of several names, the first other than `world`."""
    names = [name for name, lists in plan.groups.items() if tuple(ranks) in lists]
    return next((name for name in names if name != WORLD), WORLD)


def plan_path(plan: Plan, name: str) -> str:
    """Return the strategy key that the group `name` belongs to, or a description of a group without
    a key."""
    kind, _, rest = name.partition(".")
    if kind == "shared":
        return f"the holders of {rest}"
    paths = {f"{task_graph.name}.": task_graph.path for task_graph in plan.task_graphs}
    return next((paths[start] for start in paths if name.startswith(start)), "the whole job")
