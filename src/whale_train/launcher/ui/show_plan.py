"""Show a Plan: the TaskGraphs, the devices with their load of memory, and the decisions.

This file owns the view of `mode=plan` and of the start of a run, which adapts to the console's
width. Nothing is computed here except sums and folds.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from whale_train.launcher.report.rank_kinds import samples_by_rank
from whale_train.launcher.ui.terminal import Portable
from whale_train.quantities import (
    fold_modules,
    fold_numbers,
    fold_parts,
    in_bytes,
    in_count,
    in_rate,
    in_seconds,
    of_all,
)
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.hardware.calibration import is_measured
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.plan import Decision, Plan, RankPlan, TaskGraph

# Below this many columns a row of the device table takes two lines.
_WIDE = 92
# Beyond this many rows of consecutive ranks, all equal rows are joined, adjacent or not.
_FEW_ROWS = 24
# Beyond this many kinds of rank nobody reads the table; plan.json has them all.
_MOST_ROWS = 64
# A key with the number of a block or of a stage: `split h.3.attn`, `stages[3].stage.recompute`.
_NUMBERED = re.compile(r"(.*[.\[])(\d+)((?:[.\]].*)?)")


def plan_view(plan: Plan, cluster: Cluster, profile: ModelProfile, title: str) -> RenderableType:
    """Return the view of a whole plan, for `mode=plan` and the start of a run. The view needs 50
    columns.

    plan: the plan.
    cluster: the devices of the plan.
    profile: the profile of the model, which has the sizes of the parameters that the plan names.
    title: the names of model, strategy and hardware.
    """
    return Portable(_PlanView(plan, cluster, profile, title))


def banner_emulated(
    count: int,
    inventory: str = "",
    hosts: int = 1,
    paces: Sequence[float] | None = None,
    slow_links: bool = False,
) -> RenderableType:
    """Return the notice about speeds before a run that emulates devices by CPU processes: a panel
    on a terminal, one line elsewhere.

    count: number of emulated devices.
    inventory: the name of the inventory.
    hosts: number of hosts that the processes run on.
    paces: the slowdown of each process, at least 1; None where all run at full speed.
    slow_links: whether links are slowed to the proportions of the inventory's links.
    """
    where = "this machine" if hosts == 1 else f"{hosts:,} hosts"
    processes = f"{count:,} CPU {'process' if count == 1 else 'processes'} over gloo on {where}"
    devices = f"{count:,} {'device' if count == 1 else 'devices'} of {inventory or 'the inventory'}"
    clauses = []
    if paces is not None:
        fastest = f"1/{min(paces):.1f} of a processor" if min(paces) > 1 else "a processor"
        clauses.append(f"but keep their proportions (the fastest has {fastest})")
    if slow_links:
        clauses.append("and so do links" if clauses else "but links keep their proportions")
        clauses[-1] += " (the fastest has all that gloo moves here)"
    ratios = "".join(f", {clause}" for clause in clauses)
    speeds = {
        (False, False): "not their speeds",
        (True, False): "only relative speeds",
        (False, True): "relative link speeds",
        (True, True): "all speeds relative",
    }[paces is not None, slow_links]
    return Portable(
        _Banner(
            name="emulated",
            facts=f"{devices} emulated as {processes}.\n"
            f"Results are real training; speeds are not those devices'{ratios}.",
            line=f"{devices} as CPU processes over gloo on {where}: real training, {speeds}",
        )
    )


@dataclass(frozen=True)
class _PlanView:
    """A view of a plan that adapts to the console's width. The fields are the arguments of
    `plan_view`."""

    plan: Plan
    cluster: Cluster
    profile: ModelProfile
    title: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold")
        yield _facts(self._header())
        tree = Tree(Text("task graphs", style="bold"), guide_style="dim")
        for task_graph in self.plan.task_graphs:
            tree.add(_task_graph(task_graph, self.profile))
        yield Text()
        yield tree
        yield Text()
        yield Text("devices", style="bold")
        yield _device_table(self.plan, self.cluster, wide=options.max_width >= _WIDE)
        if self.plan.decisions:
            yield Text()
            yield Text("decisions", style="bold")
            yield from map(_decision, _folded(self.plan.decisions))

    def _header(self) -> list[tuple[str, str]]:
        """Return the facts above the task graphs, as pairs of a label and a text."""
        plan, predicted = self.plan, self.plan.predicted
        measured = is_measured(self.cluster, plan.precision)
        nodes = len({rank.node for rank in plan.ranks})
        batch = f"{plan.global_batch:,} samples a step, {plan.precision}"
        if plan.reduce_dtype != "fp32":
            batch += f", gradients sent in {plan.reduce_dtype}"
        frozen = in_count(sum(parameter.elements for parameter in self.profile.frozen))
        narrow = {path for task_graph in plan.task_graphs for path in task_graph.narrow}
        size = sum(
            parameter.elements * (2 if parameter.path in narrow else parameter.bytes_per_element)
            for parameter in self.profile.frozen
        )
        held = f"{frozen} parameters ({in_bytes(size)}), which are not trained"
        return [
            *([("frozen", held)] if self.profile.frozen else []),
            ("ranks", f"{plan.world_size:,} on {nodes:,} {'node' if nodes == 1 else 'nodes'}"),
            ("batch", batch + (f", schedule {plan.schedule}" if plan.schedule else "")),
            (
                "predicted",
                f"{in_seconds(predicted.step_time_s)} a step, "
                f"{in_rate(predicted.samples_per_s)} samples/s, "
                f"{'as measured' if measured else 'by the catalogue'}",
            ),
            (
                "",
                f"compute {in_seconds(predicted.compute_s)}, "
                f"communication {in_seconds(predicted.communication_s)}, "
                f"optimizer {in_seconds(predicted.optimizer_s)}, "
                f"idle {in_seconds(predicted.idle_s)}",
            ),
        ]


@dataclass(frozen=True)
class _Banner:
    """A notice: a panel on a terminal, one line elsewhere.

    name: the title of the panel, and the first word of the line.
    facts: the text of the panel.
    line: the text of the line.
    """

    name: str
    facts: str
    line: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if options.is_terminal:
            yield Panel(
                Text(self.facts), title=self.name, title_align="left", border_style="yellow"
            )
        else:
            yield Text(f"{self.name}: {self.line}")


def _task_graph(task_graph: TaskGraph, profile: ModelProfile) -> RenderableType:
    """Return the view of one TaskGraph: modules, parameters, replicas, ranks and shards."""
    head = Text(task_graph.primitive, style="cyan")
    head.append(f" {task_graph.name}", style="bold")
    head.append(f"  {task_graph.path}", style="dim")
    # A tied parameter has several names, and is held once.
    known = profile.parameter_by_path
    held = {known[path].path: known[path] for path in task_graph.parameters}
    size = sum(parameter.elements * parameter.bytes_per_element for parameter in held.values())
    elements = in_count(sum(parameter.elements for parameter in held.values()))
    keeps = [f"ZeRO {task_graph.zero}"]
    if parts := task_graph.state_parts:
        keeps[0] += f" in parts of {fold_parts(parts)}"
    keeps += [
        f"{state} on {where}" for state, where in task_graph.offload.items() if where != "none"
    ]
    ranks = [rank for replica in task_graph.replicas for rank in replica]
    facts = [
        ("modules", fold_modules(task_graph.modules)),
        ("parameters", f"{elements} ({in_bytes(size)}), {', '.join(keeps)}"),
        ("copies", _copies(task_graph)),
        ("ranks", fold_numbers(ranks)),
    ]
    facts += [("shards", line) for line in _shards(task_graph)]
    return Group(head, _facts(facts))


def _copies(task_graph: TaskGraph) -> str:
    """Return the number of samples of each replica as text, such as `8 x 24 + 8 x 8 samples`, with
    the number of ranks that a replica is sharded over."""
    shares_of: dict[int, list[int]] = {}
    for replica, share in zip(task_graph.replicas, task_graph.shares, strict=True):
        shares_of.setdefault(len(replica), []).append(share)
    return ", ".join(
        f"{_spread(shares)} samples" + (f", each over {width:,} ranks" if width > 1 else "")
        for width, shares in shares_of.items()
    )


def _spread(sizes: Iterable[int], most: int = 4) -> str:
    """Return sizes as text, such as `8 x 24 + 8 x 8`. More than `most` different sizes become a
    count and a range, such as `60 x 3-9`."""
    counts = Counter(sizes)
    if len(counts) > most:
        return f"{counts.total():,} x {min(counts):,}-{max(counts):,}"
    return " + ".join(f"{count:,} x {size:,}" for size, count in counts.items())


def _shards(task_graph: TaskGraph, most: int = 4) -> list[str]:
    """Return one line for each way in which parameters are sharded: the size of each rank's shard,
    the dimension, and the parameters.

    Beyond `most` lines, a last line counts the other parameters.
    """
    alike: dict[tuple[int, tuple[tuple[int, int], ...]], list[str]] = {}
    for path, bounds in task_graph.shards.items():
        alike.setdefault((task_graph.shard_dims[path], bounds), []).append(path)
    lines = []
    for (dim, bounds), paths in alike.items():
        cut = _spread(stop - start for start, stop in bounds)
        which = paths[0] if len(paths) == 1 else f"{len(paths):,} parameters such as {paths[0]}"
        lines.append(f"{cut} of {max(stop for _, stop in bounds):,}, dim {dim}: {which}")
    if len(lines) > most:
        rest = sum(len(paths) for paths in list(alike.values())[most:])
        lines = [*lines[:most], f"... and {rest:,} more parameters, cut in other ways"]
    return lines


@dataclass(frozen=True)
class _Row:
    """The cells of one kind of rank in the table of devices, without the ranks themselves.

    device: the name of the device.
    samples: number of samples in a step.
    micro_batch: number and size of the micro-batches.
    memory: needed memory and memory of the device, as text.
    percent: needed memory in percent of the device's memory.
    largest: the largest part of the needed memory, and its percentage.
    """

    device: str
    samples: str
    micro_batch: str
    memory: str
    percent: int
    largest: str


def _device_table(plan: Plan, cluster: Cluster, wide: bool) -> RenderableType:
    """Return the table of devices, with one line for each row if `wide`, else two."""
    rows = _device_rows(plan, cluster)
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    if wide:
        for name in ("ranks", "node", "device"):
            table.add_column(name, overflow="fold")
        for name in ("samples", "micro-batches"):
            table.add_column(name, justify="right")
        table.add_column("memory of device", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("largest part")
    else:
        table.add_column("ranks\nnode", overflow="fold")
        table.add_column("device\nlargest part", overflow="fold")
        table.add_column("samples\nmicro", justify="right")
        table.add_column("memory\nof device", no_wrap=True)
    for row, ranks in rows[:_MOST_ROWS]:
        where = fold_numbers(rank.rank for rank in ranks)
        nodes = fold_numbers({rank.node for rank in ranks})
        bar = _bar(row.percent, cells=16 if wide else 9)
        # Text objects keep rich from reading square brackets in a name as markup.
        if wide:
            words = (where, nodes, row.device, row.samples, row.micro_batch, row.memory)
            table.add_row(*map(Text, words), bar, Text(row.largest))
        else:
            pairs = ((where, nodes), (row.device, row.largest), (row.samples, row.micro_batch))
            memory = Text(f"{row.memory}\n").append_text(bar)
            table.add_row(*(Text(f"{above}\n{below}") for above, below in pairs), memory)
    notes = []
    if any(row.percent > 100 for row, _ in rows):
        notes.append(Text("a device is over its memory", style="red"))
    if len(rows) > _MOST_ROWS:
        notes.append(Text(f"... and {len(rows) - _MOST_ROWS:,} more kinds of rank: see plan.json"))
    return Padding(Group(table, *notes), (0, 0, 0, 2))


def _device_rows(plan: Plan, cluster: Cluster) -> list[tuple[_Row, list[RankPlan]]]:
    """Return the rows of the table of devices, with the ranks of each row.

    Consecutive ranks of a node with equal cells share a row. If more than _FEW_ROWS rows result,
    all equal rows are joined, adjacent or not.
    """
    samples = samples_by_rank(plan)
    capacity = [device.room_bytes for device in cluster.devices]
    shown = [(_row(rank, samples[rank.rank], capacity[rank.rank]), rank) for rank in plan.ranks]
    runs = groupby(shown, key=lambda pair: (pair[0], pair[1].node))
    rows = [(key[0], [rank for _, rank in run]) for key, run in runs]
    if len(rows) <= _FEW_ROWS:
        return rows
    joined: dict[_Row, list[RankPlan]] = {}
    for row, ranks in rows:
        joined.setdefault(row, []).extend(ranks)
    return list(joined.items())


def _row(rank: RankPlan, samples: int, capacity: float) -> _Row:
    """Return the cells of one rank.

    samples: number of the rank's samples in a step.
    capacity: usable memory of the rank's device, in bytes.
    """
    parts = asdict(rank.memory_bytes)
    total = rank.memory_bytes.total
    name = max(parts, key=lambda part: parts[part])
    return _Row(
        device=rank.device,
        samples=f"{samples:,}",
        micro_batch=f"{rank.micro_batches:,} x {rank.micro_batch_size:,}",
        memory=of_all(in_bytes(total), in_bytes(capacity)),
        percent=round(100 * total / capacity),
        largest=f"{name} {100 * parts[name] / total:.0f}%" if total else "",
    )


def _bar(percent: int, cells: int) -> Text:
    """Return a bar of `cells` cells, filled to `percent`, followed by the number."""
    filled = min(cells, max(1, round(cells * percent / 100))) if percent else 0
    style = "red" if percent > 100 else "yellow" if percent > 90 else "green"
    bar = Text("█" * filled, style=style)
    bar.append("░" * (cells - filled), style="dim")
    return bar.append(f" {percent:>3}%", style=style if percent > 90 else "")


def _folded(decisions: Iterable[Decision]) -> Iterator[Decision]:
    """Yield the decisions, with equal decisions on several blocks or stages joined into one.

    A joined decision has the place of the first decision that it joins.
    """
    alike: dict[tuple[str, str, Decision], list[str]] = {}
    for decision in decisions:
        parts = _NUMBERED.fullmatch(decision.key)
        before, number, after = parts.groups() if parts else (decision.key, "", "")
        alike.setdefault((before, after, replace(decision, key="")), []).append(number)
    for (before, after, said), numbers in alike.items():
        folded = fold_numbers({int(number) for number in numbers if number})
        yield replace(said, key=f"{before}{folded}{after}")


def _decision(decision: Decision) -> RenderableType:
    """Return the view of one decision."""
    instead = f" (instead of {decision.rejected})" if decision.rejected else ""
    line = Text(f"{decision.key}: ", style="dim")
    line.append(decision.chosen, style="cyan")
    line.append(f"{instead}: {decision.reason}", style="default")
    hanging = Table.grid(padding=(0, 1, 0, 0))
    hanging.add_row("  -", line)
    return hanging


def _facts(facts: Sequence[tuple[str, str]]) -> Table:
    """Return a grid of labels and texts."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(f"  {name}", Text(value))
    return grid
