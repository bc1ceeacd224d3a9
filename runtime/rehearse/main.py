"""Rehearses the ranks of a run directory's plan, in a process of its own.

    python -m whale_train.runtime.rehearse.main --ranks kinds --run-dir DIR --parent PID

`--ranks` is `kinds` (one rank for all that do the same), `all`, or numbers as `0,3`. Writes
`rehearsal.json`. Exit status: 0 done, whatever was found; 1 failed (`failure.json` of the run
directory says what of).
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
from whale_train.rehearsal import FILE, KindOfRank, Rehearsal, Traffic
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
    """Rehearse the first rank of each of `kinds`, in so many processes, and compare what they ask
    of each other."""
    started = time.perf_counter()
    firsts = [ranks[0] for ranks in kinds]
    if processes > 1 and len(firsts) > 1:
        _inherited.update(request=request, plan=plan, model=model)
        with multiprocessing.get_context("fork").Pool(min(processes, len(firsts))) as pool:
            found = pool.map(_of_inherited, firsts, chunksize=1)
    else:
        found = [rehearse_rank(request, plan, model, rank) for rank in firsts]
    asked = {
        rank: as_rank(plan, each, rank)
        for each, ranks in zip(found, kinds, strict=True)
        if not each.error  # what it asked ends where it failed
        for rank in ranks
    }
    faults = [*disagreements(groups_of(plan), asked), *unmatched(asked)]
    faults += () if faults else waiting(asked)
    described = tuple(
        _described(plan, each, ranks) for each, ranks in zip(found, kinds, strict=True)
    )
    return Rehearsal(described, tuple(faults), time.perf_counter() - started)


_inherited: dict[str, object] = {}  # by processes that are forked


def _of_inherited(rank: int) -> Rehearsed:
    request, plan, model = (_inherited[name] for name in ("request", "plan", "model"))
    assert isinstance(request, Request)
    assert isinstance(plan, Plan)
    assert isinstance(model, Model)
    return rehearse_rank(request, plan, model, rank)


def as_rank(plan: Plan, found: Rehearsed, rank: int) -> Record:
    """Return what `rank` asks of others, which is of the same kind as the rank that was
    rehearsed."""
    if rank == found.rank:
        return found.record
    others = peers(plan, found.rank, rank, list(found.record.messages))
    return Record(
        found.record.collectives,
        {others[peer]: listed for peer, listed in found.record.messages.items()},
        [(kind, others[peer], number) for kind, peer, number in found.record.events],
    )


def groups_of(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """Return the groups that ranks make of a plan, each once, with the names they know them by."""
    world = tuple(range(plan.world_size))
    lists = dict.fromkeys(ranks for listed in plan.groups.values() for ranks in listed)
    return [(group_name(plan, ranks) if ranks != world else "world", ranks) for ranks in lists]


def _described(plan: Plan, found: Rehearsed, ranks: tuple[int, ...]) -> KindOfRank:
    planned = [plan.ranks[rank] for rank in ranks]
    largest = max(planned, key=lambda rank: rank.memory_bytes.total)
    return KindOfRank(
        rank=found.rank,
        ranks=ranks,
        task_graphs=tuple(plan.task_graphs[number].name for number in planned[0].task_graphs),
        error=found.error,
        place=found.place,
        peak_bytes=found.peak_bytes,
        planned_bytes=asdict(largest.memory_bytes),
        traffic=tuple(_traffic(found.record)),
        kernels=found.kernels,
        reads=found.reads,
        operations=found.num_operations,
        seconds=found.seconds,
    )


def _traffic(record: Record) -> Iterable[Traffic]:
    """Yield the collectives of a record by group and kind, and its messages."""
    found: dict[tuple[str, str], list[int]] = {}
    for group, listed in record.collectives.items():
        for asked in listed:
            found.setdefault((group, asked.kind), []).append(asked.num_bytes)
    for listed in record.messages.values():
        for asked in listed:
            found.setdefault(("messages", asked.kind), []).append(asked.num_bytes)
    for (group, kind), sizes in found.items():
        yield Traffic(group, kind, len(sizes), sum(sizes))


def model_of(request: Request, plan: Plan) -> Model:
    """Return what every rank of `plan` is rehearsed with. Raises ConfigError for a model or data
    that cannot be made."""
    dataset = open_dataset(request.data)
    graph = None
    if plan.rewrite is not None or any(rank.micro_batches > 1 for rank in plan.ranks):
        graph, _ = export_by_folding(request.model, dataset.fields)
    module, fields = on_meta(request.model, dataset.fields)
    return Model(module, graph, fields)


def chosen(plan: Plan, ranks: str) -> list[tuple[int, ...]]:
    """Return the kinds of rank to rehearse, as `--ranks` says it."""
    if ranks == "kinds":
        return kinds_of(plan)
    numbers: Iterable[int] = range(plan.world_size)
    if ranks != "all":
        numbers = map(int, ranks.split(","))
    return [(number,) for number in numbers]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of this module; return its exit status."""
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
        found = rehearse(request, plan, model, chosen(plan, options.ranks), processes)
        write(run_dir, found.to_mapping())
    except Exception as error:
        record_host_failure(run_dir, error)
        return 1
    return 0


def write(run_dir: Path, found: Mapping[str, object]) -> None:
    """Write `rehearsal.json`, whole or not at all."""
    partial = run_dir / f"{FILE}.partial"
    partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    partial.replace(run_dir / FILE)


if __name__ == "__main__":
    sys.exit(main())
