"""A Plan as a person reads it: what runs where, how full, how fast, and what was decided.

Owns the view of `mode=plan` and of the start of a run, which fits the width it is given. Nothing
is computed but sums and folds.
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

from whale_train.launcher.ui.terminal import Portable
from whale_train.quantities import (
    fold_modules,
    fold_numbers,
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
# Beyond this many rows of consecutive ranks, equal rows are joined wherever their ranks are.
_FEW_ROWS = 24
# Beyond this many kinds of rank a table is no longer read; plan.json has them all.
_MOST_ROWS = 64
# A key with the number of a block or of a stage: `split h.3.attn`, `stages[3].stage.recompute`.
_NUMBERED = re.compile(r"(.*[.\[])(\d+)((?:[.\]].*)?)")


def plan_view(plan: Plan, cluster: Cluster, profile: ModelProfile, title: str) -> RenderableType:
    """Return the whole plan, for `mode=plan` and the start of a run.

    `title` names model, strategy and hardware; `profile` gives the sizes of the parameters, which
    the plan names but does not measure. Fits 50 columns and more.
    """
    return Portable(_PlanView(plan, cluster, profile, title))


def banner_emulated(
    count: int,
    inventory: str = "",
    hosts: int = 1,
    paces: Sequence[float] | None = None,
    slow_links: bool = False,
) -> RenderableType:
    """Return what must be known about speeds before a run on CPU processes: a panel on a terminal,
    else a single line.

    They stand for the `count` devices of `inventory`, on so many `hosts`, and take `paces` seconds
    for a second of computing; with `slow_links`, what joins them keeps the proportions of the
    inventory's links.
    """
    where = "this machine" if hosts == 1 else f"{hosts:,} hosts"
    processes = f"{count:,} CPU {'process' if count == 1 else 'processes'} over gloo on {where}"
    devices = f"{count:,} {'device' if count == 1 else 'devices'} of {inventory or 'the inventory'}"
    kept = []
    if paces is not None:
        fastest = f"1/{min(paces):.1f} of a processor" if min(paces) > 1 else "a processor"
        kept.append(f"but keep their proportions (the fastest has {fastest})")
    if slow_links:
        kept.append("and so do links" if kept else "but links keep their proportions")
        kept[-1] += " (the fastest has all that gloo moves here)"
    ratios = "".join(f", {each}" for each in kept)
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
        plan, predicted = self.plan, self.plan.predicted
        measured = is_measured(self.cluster, plan.precision)
        nodes = len({rank.node for rank in plan.ranks})
        batch = f"{plan.global_batch:,} samples a step, {plan.precision}"
        if plan.reduce_dtype != "fp32":
            batch += f", gradients sent in {plan.reduce_dtype}"
        frozen = in_count(sum(each.elements for each in self.profile.frozen))
        narrow = {path for task_graph in plan.task_graphs for path in task_graph.narrow}
        size = sum(
            each.elements * (2 if each.path in narrow else each.bytes_per_element)
            for each in self.profile.frozen
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
    head = Text(task_graph.primitive, style="cyan")
    head.append(f" {task_graph.name}", style="bold")
    head.append(f"  {task_graph.path}", style="dim")
    # A tied parameter is held once, whatever name it is listed under.
    known = profile.parameter_by_path
    held = {known[path].path: known[path] for path in task_graph.parameters}
    size = sum(each.elements * each.bytes_per_element for each in held.values())
    elements = in_count(sum(each.elements for each in held.values()))
    keeps = [f"ZeRO {task_graph.zero}"]
    keeps += [f"{what} on {where}" for what, where in task_graph.offload.items() if where != "none"]
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
    """`8 x 24 + 8 x 8 samples`, and over how many ranks each copy is sharded."""
    shares_of: dict[int, list[int]] = {}
    for replica, share in zip(task_graph.replicas, task_graph.shares, strict=True):
        shares_of.setdefault(len(replica), []).append(share)
    return ", ".join(
        f"{_spread(shares)} samples" + (f", each over {width:,} ranks" if width > 1 else "")
        for width, shares in shares_of.items()
    )


def _spread(sizes: Iterable[int], most: int = 4) -> str:
    """`8 x 24 + 8 x 8`; of many sizes, how many and between which: `60 x 3-9`."""
    counts = Counter(sizes)
    if len(counts) > most:
        return f"{counts.total():,} x {min(counts):,}-{max(counts):,}"
    return " + ".join(f"{count:,} x {size:,}" for size, count in counts.items())


def _shards(task_graph: TaskGraph, most: int = 4) -> list[str]:
    """Return one line for the parameters cut alike: how much of which dimension each rank has."""
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
    """What is shown of one kind of rank, the ranks themselves aside."""

    device: str
    samples: str
    micro_batch: str
    memory: str
    percent: int
    largest: str


def _device_table(plan: Plan, cluster: Cluster, wide: bool) -> RenderableType:
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
        # As Text: square brackets in a name are no markup.
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
    """Consecutive ranks of a node that read the same are one row. A table still too long joins
    equal rows wherever they are."""
    samples = _samples(plan)
    capacity = [device.room_bytes for device in cluster.devices]
    shown = [
        (_row(rank, samples.get(rank.rank, 0), capacity[rank.rank]), rank) for rank in plan.ranks
    ]
    runs = groupby(shown, key=lambda pair: (pair[0], pair[1].node))
    rows = [(key[0], [rank for _, rank in run]) for key, run in runs]
    if len(rows) <= _FEW_ROWS:
        return rows
    joined: dict[_Row, list[RankPlan]] = {}
    for row, ranks in rows:
        joined.setdefault(row, []).extend(ranks)
    return list(joined.items())


def _row(rank: RankPlan, samples: int, capacity: float) -> _Row:
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


def _samples(plan: Plan) -> dict[int, int]:
    """Return the samples of a step of each rank: those of the smallest share it takes. (With a
    head split over every rank, all of them see the head's whole batch, but each brings its own
    samples.)"""
    found: dict[int, int] = {}
    for task_graph in plan.task_graphs:
        for replica, share in zip(task_graph.replicas, task_graph.shares, strict=True):
            for rank in replica:
                found[rank] = min(share, found.get(rank, share))
    return found


def _bar(percent: int, cells: int) -> Text:
    filled = min(cells, max(1, round(cells * percent / 100))) if percent else 0
    style = "red" if percent > 100 else "yellow" if percent > 90 else "green"
    bar = Text("█" * filled, style=style)
    bar.append("░" * (cells - filled), style="dim")
    return bar.append(f" {percent:>3}%", style=style if percent > 90 else "")


def _folded(decisions: Iterable[Decision]) -> Iterator[Decision]:
    """Yield the decisions, those that say the same of a model's blocks, or of stages, as one, where
    the first was."""
    alike: dict[tuple[str, str, Decision], list[str]] = {}
    for decision in decisions:
        parts = _NUMBERED.fullmatch(decision.key)
        before, number, after = parts.groups() if parts else (decision.key, "", "")
        alike.setdefault((before, after, replace(decision, key="")), []).append(number)
    for (before, after, said), numbers in alike.items():
        folded = fold_numbers({int(number) for number in numbers if number})
        yield replace(said, key=f"{before}{folded}{after}")


def _decision(decision: Decision) -> RenderableType:
    instead = f" (instead of {decision.rejected})" if decision.rejected else ""
    line = Text(f"{decision.key}: ", style="dim")
    line.append(decision.chosen, style="cyan")
    line.append(f"{instead}: {decision.reason}", style="default")
    hanging = Table.grid(padding=(0, 1, 0, 0))
    hanging.add_row("  -", line)
    return hanging


def _facts(facts: Sequence[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts:
        grid.add_row(f"  {name}", Text(value))
    return grid
