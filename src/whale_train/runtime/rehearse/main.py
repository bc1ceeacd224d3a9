"""Rehearse the ranks of a run directory's plan, in a process of its own.

    python -m whale_train.runtime.rehearse.main --ranks kinds --run-dir DIR --parent PID

`--ranks` is `kinds` (one rank of each kind), `all`, or numbers such as `0,3`. Writes
`rehearsal.json`. Exit status: 0 done, whatever the rehearsal shows; 1 failed (`failure.json` of the
run directory gives the reason).
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from whale_train.config import Request
from whale_train.data.open import open_dataset
from whale_train.machine.parents import end_with_parent
from whale_train.models.export.export import on_meta
from whale_train.models.profile.folded_export import export_by_folding
from whale_train.rehearsal import FILE, GroupTraffic, KindOfRank, Rehearsal
from whale_train.runtime.failures.failure import record_host_failure
from whale_train.runtime.rehearse.agreement import disagreements, unmatched, waiting
from whale_train.runtime.rehearse.kinds import kinds_of, peers
from whale_train.runtime.rehearse.rank import Model, Rehearsed, rehearse_rank
from whale_train.runtime.rehearse.recorded_group import Record
from whale_train.strategies.plan.group_names import group_name
from whale_train.strategies.plan.plan import Plan


def rehearse(
    request: Request, plan: Plan, model: Model, kinds: Sequence[tuple[int, ...]], processes: int = 1
) -> Rehearsal:
    """Rehearse the first rank of each of `kinds`, and compare the collectives and messages of all
    ranks.

    At most `processes` processes run at once.
    """
    started = time.perf_counter()
    firsts = [ranks[0] for ranks in kinds]
    if processes > 1 and len(firsts) > 1:
        _inherited.update(request=request, plan=plan, model=model)
        with multiprocessing.get_context("fork").Pool(min(processes, len(firsts))) as pool:
            rehearsals = pool.map(_of_inherited, firsts, chunksize=1)
    else:
        rehearsals = [rehearse_rank(request, plan, model, rank) for rank in firsts]
    records = {
        rank: as_rank(plan, rehearsed, rank)
        for rehearsed, ranks in zip(rehearsals, kinds, strict=True)
        if not rehearsed.error  # the record of a failed rank is cut short
        for rank in ranks
    }
    faults = [*disagreements(groups_of(plan), records), *unmatched(records)]
    faults += () if faults else waiting(records)
    described = tuple(
        _described(plan, rehearsed, ranks)
        for rehearsed, ranks in zip(rehearsals, kinds, strict=True)
    )
    return Rehearsal(described, tuple(faults), time.perf_counter() - started)


_inherited: dict[str, object] = {}  # inherited by forked processes


def _of_inherited(rank: int) -> Rehearsed:
    """Return the rehearsal of `rank`, in a forked process."""
    request, plan, model = (_inherited[name] for name in ("request", "plan", "model"))
    assert isinstance(request, Request)
    assert isinstance(plan, Plan)
    assert isinstance(model, Model)
    return rehearse_rank(request, plan, model, rank)


def as_rank(plan: Plan, rehearsed: Rehearsed, rank: int) -> Record:
    """Return the record of `rank`, which is of the same kind as the rehearsed rank."""
    if rank == rehearsed.rank:
        return rehearsed.record
    counterparts = peers(plan, rehearsed.rank, rank, list(rehearsed.record.messages))
    return Record(
        rehearsed.record.collectives,
        {counterparts[peer]: messages for peer, messages in rehearsed.record.messages.items()},
        [(kind, counterparts[peer], number) for kind, peer, number in rehearsed.record.events],
    )


def groups_of(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """Return the process groups of a plan, each once, as the group's name and ranks."""
    world = tuple(range(plan.world_size))
    lists = dict.fromkeys(ranks for groups in plan.groups.values() for ranks in groups)
    return [(group_name(plan, ranks) if ranks != world else "world", ranks) for ranks in lists]


def _described(plan: Plan, rehearsed: Rehearsed, ranks: tuple[int, ...]) -> KindOfRank:
    """Return the report on `ranks`, a kind of rank of which one was rehearsed."""
    planned = [plan.ranks[rank] for rank in ranks]
    largest = max(planned, key=lambda rank: rank.memory_bytes.total)
    return KindOfRank(
        rank=rehearsed.rank,
        ranks=ranks,
        task_graphs=tuple(plan.task_graphs[number].name for number in planned[0].task_graphs),
        error=rehearsed.error,
        place=rehearsed.place,
        peak_bytes=rehearsed.peak_bytes,
        planned_bytes=asdict(largest.memory_bytes),
        traffic=tuple(_traffic(rehearsed.record)),
        kernels=rehearsed.kernels,
        reads=rehearsed.reads,
        operations=rehearsed.num_operations,
        seconds=rehearsed.seconds,
    )


def _traffic(record: Record) -> Iterable[GroupTraffic]:
    """Yield the traffic of a record: first by group and kind of collective, then of its
    messages."""
    sizes_of: dict[tuple[str, str], list[int]] = {}
    for group, operations in record.collectives.items():
        for operation in operations:
            sizes_of.setdefault((group, operation.kind), []).append(operation.num_bytes)
    for operations in record.messages.values():
        for operation in operations:
            sizes_of.setdefault(("messages", operation.kind), []).append(operation.num_bytes)
    for (group, kind), sizes in sizes_of.items():
        yield GroupTraffic(group, kind, len(sizes), sum(sizes))


def model_of(request: Request, plan: Plan) -> Model:
    """Return the model with which every rank of `plan` is rehearsed.

    Raises ConfigError for a model or data that cannot be made.
    """
    dataset = open_dataset(request.data)
    graph = None
    if plan.rewrite is not None or any(rank.micro_batches > 1 for rank in plan.ranks):
        graph, _ = export_by_folding(request.model, dataset.fields)
    module, fields = on_meta(request.model, dataset.fields)
    return Model(module, graph, fields)


def chosen(plan: Plan, ranks: str) -> list[tuple[int, ...]]:
    """Return the kinds of rank to rehearse; `ranks` is the value of `--ranks`."""
    if ranks == "kinds":
        return kinds_of(plan)
    numbers: Iterable[int] = range(plan.world_size)
    if ranks != "all":
        numbers = map(int, ranks.split(","))
    return [(number,) for number in numbers]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of this module, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m whale_train.runtime.rehearse.main")
    parser.add_argument("--ranks", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True, help="end with this process")
    options = parser.parse_args(arguments)
    end_with_parent(options.parent, signal.SIGTERM)
    warnings.simplefilter("ignore")
    run_dir: Path = options.run_dir
    try:
        request = Request.from_json((run_dir / "request.json").read_text(encoding="utf-8"))
        plan = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
        processes = len(os.sched_getaffinity(0))
        model = model_of(request, plan)
        rehearsal = rehearse(request, plan, model, chosen(plan, options.ranks), processes)
        write(run_dir, rehearsal.to_mapping())
    except Exception as error:
        record_host_failure(run_dir, error)
        return 1
    return 0


def write(run_dir: Path, mapping: Mapping[str, object]) -> None:
    """Write `mapping` to `rehearsal.json` atomically."""
    partial = run_dir / f"{FILE}.partial"
    partial.write_text(json.dumps(mapping, indent=1) + "\n", encoding="utf-8")
    partial.replace(run_dir / FILE)


if __name__ == "__main__":
    sys.exit(main())
