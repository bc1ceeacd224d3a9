"""Show a request before its ranks start: a notice of emulation, the plan, and a notice of
compilation."""

from collections.abc import Mapping

from rich.console import Console, RenderableType

from whale_train.config import Request
from whale_train.kernel_cache import ASYNC_IO, CPU_ADAM, is_compiled
from whale_train.launcher.planning.plan_request import Resolved
from whale_train.launcher.ui.show_plan import banner_emulated, plan_view
from whale_train.launcher.ui.terminal import Portable
from whale_train.strategies.plan.plan import Plan


def show_resolved(resolved: Resolved, request: Request, console: Console) -> None:
    """Print the plan of a request, with a notice on emulated devices and one on kernels to
    compile."""
    names = request.names
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
    console.print(Portable(resolved_view(resolved, names)))
    if request.mode != "plan":
        said = said_of_kernels(request, resolved.plan)
        if said:
            console.print(said, soft_wrap=True)


def resolved_view(resolved: Resolved, names: Mapping[str, str]) -> RenderableType:
    """Return the view of a plan.

    names: the chosen option of each config group, by group.
    """
    title = " ".join(f"{key}={names.get(key)}" for key in ("model", "strategy", "hardware"))
    return plan_view(resolved.plan, resolved.cluster, resolved.profile, title)


def said_of_kernels(request: Request, plan: Plan) -> str:
    """Return the line that announces what is compiled of DeepSpeed's kernels for offload, or ''.

    The first run on a machine that offloads an optimizer compiles them, before the first step.
    """
    places = {place for task_graph in plan.task_graphs for place in task_graph.offload.values()}
    optimizers = {task_graph.offload["optimizer"] for task_graph in plan.task_graphs}
    kernels = []
    if optimizers != {"none"} and request.optimizer.name != "sgd" and not is_compiled(CPU_ADAM):
        kernels.append("CPU optimizer")
    if "nvme" in places and not is_compiled(ASYNC_IO):
        kernels.append("library for files")
    if not kernels:
        return ""
    took = "a minute to several, by its cores"
    names = " and ".join(kernels)
    return f"compiling DeepSpeed's {names} before the first step: {took}, once a machine"
