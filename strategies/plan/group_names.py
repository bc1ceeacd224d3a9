"""The plan's names of groups of ranks, and the keys of the strategy that they are made for."""

from collections.abc import Sequence

from whale_train.strategies.plan.plan import Plan

WORLD = "world"  # the group of all ranks


def group_name(plan: Plan, ranks: Sequence[int]) -> str:
    """Return the name of the group of these ranks; of several, the first that says more than
    `world`."""
    names = [name for name, lists in plan.groups.items() if tuple(ranks) in lists]
    return next((name for name in names if name != WORLD), WORLD)


def plan_path(plan: Plan, name: str) -> str:
    """Return the key of the strategy that the group `name` is made for."""
    kind, _, rest = name.partition(".")
    if kind == "shared":
        return f"the holders of {rest}"
    paths = {f"{task_graph.name}.": task_graph.path for task_graph in plan.task_graphs}
    return next((paths[start] for start in paths if name.startswith(start)), "the whole job")
