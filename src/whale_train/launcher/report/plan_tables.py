"""Describe a plan in tables: the cluster, what each kind of rank does, the model's parts, why."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from whale_train.launcher.report.page_parts import Row, Table
from whale_train.launcher.report.rank_kinds import RankKind, fullness, rank_kinds
from whale_train.launcher.report.shown_run import Rows, ShownRun
from whale_train.quantities import (
    fold_modules,
    fold_numbers,
    fold_parts,
    in_bytes,
    in_rate,
    in_seconds,
)
from whale_train.strategies.plan.plan import Decision, Plan


def plan_facts(shown: ShownRun) -> dict[str, str]:
    """Return the facts of a plan or a run by their names, in a line each."""
    plan = shown.plan
    predicted = plan.predicted
    nodes = len({rank.node for rank in plan.ranks})
    parts = ", ".join(f"{x.primitive} {x.name} (ZeRO {x.zero})" for x in plan.task_graphs[:6])
    if len(plan.task_graphs) > 6:
        parts += f" and {len(plan.task_graphs) - 6:,} more"
    fullest = max(rank_kinds(plan), key=fullness)
    needed = in_bytes(fullest.memory.total)
    if fullest.limit_bytes is not None:
        needed += f" of {in_bytes(fullest.limit_bytes)}"
    facts = {
        "cluster": plan.cluster,
        "ranks": f"{plan.world_size:,} on {nodes:,} {'node' if nodes == 1 else 'nodes'}",
        "samples a step": f"{plan.global_batch:,}",
        "precision": plan.precision,
        "parts": parts,
        "schedule": plan.schedule or "none",
        "step, predicted": in_seconds(predicted.step_time_s),
        "samples a second, predicted": in_rate(predicted.samples_per_s),
        "memory of the fullest rank, predicted": needed,
    }
    if shown.is_run:
        facts["steps taken"] = f"{shown.steps[-1]['step']:,}"
        facts["step, measured (median)"] = in_seconds(step_seconds(shown))
        facts["last loss"] = _number(shown.steps[-1].get("loss"))
        if of_ranks := (shown.summary or {}).get("peak_memory_bytes"):
            facts["memory of the fullest rank, measured"] = in_bytes(max(of_ranks))
        else:
            of_rank_0 = max(row.get("peak_memory_bytes") or 0 for row in shown.steps)
            facts["memory of rank 0, measured"] = in_bytes(of_rank_0)
    if shown.failure is not None:
        facts["failed"] = _failure(shown.failure)
    if shown.attempts:
        facts["attempts"] = f"{len(shown.attempts):,}"
    return facts


def nodes_table(plan: Plan) -> Table:
    """Return the table of a cluster's nodes and links."""
    assert plan.inventory is not None
    rows = []
    first = 0
    for nodes in plan.inventory.nodes:
        counts = {name: nodes.devices.count(name) for name in dict.fromkeys(nodes.devices)}
        devices = " + ".join(f"{count:,} {name}" for name, count in counts.items())
        numbers = fold_numbers(range(first, first + nodes.count))
        link = f"{nodes.link.name}, {in_bytes(nodes.link.bandwidth_bytes_s)}/s"
        rows.append(Row((numbers, devices, link)))
        first += nodes.count
    network = plan.inventory.network
    caption = f"Nodes, joined by {network.name} ({in_bytes(network.bandwidth_bytes_s)}/s)"
    return Table(caption, ("node", "devices", "link between them"), rows)


def kinds_table(plan: Plan) -> Table:
    """Return the table of a cluster's kinds of devices."""
    assert plan.inventory is not None
    rows = [
        Row(
            (
                name,
                in_bytes(device.memory_bytes),
                in_bytes(device.room_bytes),
                f"{device.flops.get(plan.precision, 0) / 1e12:,.4g}",
                f"{in_bytes(device.memory_bandwidth_bytes_s)}/s",
                "measured" if device.calibrated else "by the catalogue",
            )
        )
        for name, device in plan.inventory.devices.items()
    ]
    speeds = (f"TFLOP/s in {plan.precision}", "memory bandwidth")
    columns = ("device", "memory", "for tensors", *speeds, "speed")
    return Table("Kinds of devices", columns, rows, numbers=columns[1:5])


def devices_table(kinds: Sequence[RankKind]) -> Table:
    """Return the table of what each kind of rank does and needs."""
    rows = []
    for kind in kinds:
        parts = asdict(kind.memory)
        share = "" if not kind.limit_bytes else f"{kind.memory.total / kind.limit_bytes:.0%}"
        rows.append(
            Row(
                (
                    fold_numbers(kind.ranks),
                    fold_numbers(kind.nodes),
                    kind.device,
                    f"{kind.samples:,}",
                    f"{kind.micro_batches:,} x {kind.micro_batch_size:,}",
                    in_bytes(kind.memory.total),
                    share,
                    *(in_bytes(size) for size in parts.values()),
                )
            )
        )
    sizes = ("parameters", "gradients", "optimizer", "activations", "communication")
    numbers = ("samples", "micro-batches", "memory", "of its device", *sizes)
    columns = ("ranks", "nodes", "device", *numbers)
    caption = "What each kind of rank takes of a step, and needs of its memory"
    return Table(caption, columns, rows, numbers)


def parts_table(plan: Plan) -> Table:
    """Return the table of a plan's TaskGraphs."""
    rows = []
    for part in plan.task_graphs:
        widths = sorted({len(replica) for replica in part.replicas})
        copies = f"{len(part.replicas):,}"
        if widths[-1] > 1:
            copies += f", each over {' or '.join(f'{x:,}' for x in widths)} ranks"
        on_host = [f"{state} on {at}" for state, at in part.offload.items() if at != "none"]
        ranks = fold_numbers([rank for replica in part.replicas for rank in replica])
        held = f"{len(part.parameters):,}, {len(part.shards):,} of them split"
        cells = (part.name, part.primitive, fold_modules(part.modules), held, copies)
        zero = f"ZeRO {part.zero}"
        if part.state_parts:
            zero += f" in parts of {fold_parts(part.state_parts)}"
        rows.append(Row((*cells, ranks, ", ".join([zero, *on_host]))))
    columns = ("part", "primitive", "modules", "parameters", "copies", "ranks", "state")
    return Table("TaskGraphs, in the order of the forward", columns, rows)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else "not finite"


def decisions_table(plan: Plan) -> Table:
    """Return the table of a plan's decisions, with the step time of what was rejected."""
    rows = [
        Row((x.key, x.chosen, x.rejected, _cost(x, plan.predicted.step_time_s), x.reason))
        for x in plan.decisions
    ]
    columns = ("decision", "chosen", "instead of", "which would take", "because")
    return Table("What was chosen automatically", columns, rows)


def _cost(decision: Decision, chosen_s: float) -> str:
    """Return the step time of what a decision rejected, and how much longer that is than the plan's
    `chosen_s` seconds; '' where it is not known."""
    if decision.rejected_step_s is not None:
        longer = decision.rejected_step_s / chosen_s - 1
        return f"{in_seconds(decision.rejected_step_s)} ({longer:+.0%})"
    if decision.rejected_floor_s is not None:
        return f"{in_seconds(decision.rejected_floor_s)} or more, by estimate"
    return ""


def step_seconds(shown: ShownRun) -> float:
    """Return the median seconds of a run's steps, as `summary.json` has it: without the first one,
    which includes the set-up of libraries."""
    if shown.summary is not None and "step_time_s_median" in shown.summary:
        return float(shown.summary["step_time_s_median"])
    seconds: list[float] = [row["step_time_s"] for row in shown.steps]
    return median(seconds[1:] or seconds)


def _failure(failure: Mapping[str, Any]) -> str:
    """Return the line about a failure: its rank, its step and its message."""
    rank, step = failure.get("rank"), failure.get("step")
    where = [f"rank {rank}"] if rank is not None else []
    where += [f"step {step}"] if step is not None else []
    kind = failure.get("type") or failure.get("signal") or failure.get("kind") or ""
    message = (failure.get("message") or "").split("\n")[0]
    said = ": ".join(x for x in (kind, message) if x)
    return f"{', '.join(where)}: {said}" if where else said


def attempts_table(attempts: Rows) -> Table:
    """Return the table of a job's attempts, as `attempts.json` has them."""
    rows = []
    for number, attempt in enumerate(attempts, 1):
        failure = attempt.get("failure") or {}
        why = failure.get("message") or failure.get("signal") or attempt["status"]
        steps = f"{attempt['began']:,} to {attempt['reached']:,}"
        time = in_seconds(attempt["seconds"])
        rows.append(Row((str(number), f"{attempt['ranks']:,}", steps, time, why.split("\n")[0])))
    return Table("Attempts", ("attempt", "ranks", "steps", "time", "end"), rows)
