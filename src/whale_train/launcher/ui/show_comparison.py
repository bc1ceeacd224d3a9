"""Show strategies side by side: the cost of each, or why it has no plan."""

from collections.abc import Mapping
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whale_train.errors import PlanError, RequestError
from whale_train.launcher.planning.plan_request import Resolved
from whale_train.launcher.ui.terminal import Portable
from whale_train.quantities import in_bytes, in_rate, in_seconds
from whale_train.strategies.plan.plan import Plan


def comparison_view(compared: Mapping[str, Resolved | RequestError]) -> RenderableType:
    """Return a table of strategies, and the faults of those without a plan below it.

    The table has one line for each strategy, in the given order, with the fastest marked. Memory is
    that of the heaviest rank, with its part of the device's memory. The table fits 60 columns and
    more.

    compared: the resolved request or the error of each strategy, by name.
    """
    plans = {name: x.plan for name, x in compared.items() if isinstance(x, Resolved)}
    best = min((p.predicted.step_time_s for p in plans.values()), default=0.0)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("strategy", overflow="fold")
    for name in ("ranks", "step", "samples/s", "memory", "of its device"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, resolved in compared.items():
        if not isinstance(resolved, Resolved):
            continue
        plan = resolved.plan
        fastest = plan.predicted.step_time_s == best and len(plans) > 1
        needed, held = _heaviest(plan, resolved)
        cells = (
            f"{name}, fastest" if fastest else name,
            f"{plan.world_size:,}",
            in_seconds(plan.predicted.step_time_s),
            in_rate(plan.predicted.samples_per_s),
            in_bytes(needed),
            f"{needed / held:.0%}",
        )
        table.add_row(*(Text(cell, style="bold green" if fastest else "") for cell in cells))
    parts: list[RenderableType] = [table] if plans else []
    for name, error in compared.items():
        if isinstance(error, RequestError):
            parts.append(Text(f"{name} cannot be:", style="red"))
            parts += [Padding(Text(str(fault)), (0, 0, 0, 2)) for fault in error.faults]
    return Portable(Group(*parts))


def refuse_all(compared: Mapping[str, Resolved | RequestError]) -> None:
    """Raise PlanError, with the faults of each strategy, where none of them has a plan."""
    refused = {name: x.faults for name, x in compared.items() if isinstance(x, RequestError)}
    if len(refused) == len(compared):
        raise PlanError(
            replace(fault, key=f"strategy={name}: {fault.key}")
            for name, faults in refused.items()
            for fault in faults
        )


def _heaviest(plan: Plan, resolved: Resolved) -> tuple[float, float]:
    """Return the bytes that the fullest rank needs, and the bytes that its device has."""
    devices = resolved.cluster.devices
    pairs = ((r.memory_bytes.total, devices[r.rank].memory_bytes) for r in plan.ranks)
    return max(pairs, key=lambda pair: pair[0] / pair[1])
