"""What is shown of a request before its ranks start: what they stand for, and the plan."""

from rich.console import Console

from whale_train.config import Request
from whale_train.launcher.planning.plan_request import Resolved
from whale_train.launcher.ui.show_plan import banner_emulated, plan_view
from whale_train.launcher.ui.terminal import Portable


def show_resolved(resolved: Resolved, request: Request, console: Console) -> None:
    """Print it."""
    names = request.names
    title = (
        f"model={names.get('model')} strategy={names.get('strategy')} "
        f"hardware={names.get('hardware')}"
    )
    if resolved.emulated and request.mode != "plan":
        console.print(
            banner_emulated(
                resolved.plan.world_size,
                names.get("hardware", ""),
                hosts=len({node.at for node in resolved.cluster.nodes}),
                paces=resolved.paces,
                slow_links=resolved.links is not None,
            )
        )
    view = plan_view(resolved.plan, resolved.cluster, resolved.profile, title)
    console.print(Portable(view))
