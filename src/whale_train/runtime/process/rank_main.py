"""Prepare the objects that a host's ranks inherit, and run a rank from start to end."""

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import fx
from torch.distributed.distributed_c10d import Store

from whale_train.checkpoints.checkpoint_files import MANIFEST, MODEL, folder_of
from whale_train.checkpoints.url_path import Place, place_of
from whale_train.config import EVALUATING, Request
from whale_train.data.evaluation_sets import OpenedData, open_data
from whale_train.data.open import tokenizer_of
from whale_train.disk import failing_when_full, writing
from whale_train.machine.hosts import read_hosts
from whale_train.machine.limits import memory_bytes
from whale_train.models.export.export import export_model
from whale_train.models.export.lifted_constants import with_constants
from whale_train.models.fp32_precision import compute_fp32
from whale_train.models.loss_module import LossModule
from whale_train.models.weights.kept_tensors import other_names, saved_names
from whale_train.models.weights.shared_layers import shared_places
from whale_train.runtime.assembly.build_program import assemble
from whale_train.runtime.assembly.shared_init import build_shared, let_go
from whale_train.runtime.base.determinism import compute_alike
from whale_train.runtime.base.seeds import seed_python
from whale_train.runtime.base.trace import Trace
from whale_train.runtime.calibrate.calibrate import Ranks, measure_devices
from whale_train.runtime.comms.process_groups import (
    file_rendezvous,
    join,
    leave,
    limit_waits,
    make_channels,
    make_groups,
    sharing_hosts,
)
from whale_train.runtime.compile.compiler import Compiler, import_compiler
from whale_train.runtime.cpu.malloc_trim import trim_heap
from whale_train.runtime.cpu.threads import num_threads
from whale_train.runtime.emulate.emulated_links import EmulatedLinks
from whale_train.runtime.emulate.throttle import Pace
from whale_train.runtime.engines.rank_context import RankContext
from whale_train.runtime.failures.timeout_frames import named_waits
from whale_train.runtime.optim.optimizers import make_optimizer
from whale_train.runtime.process.checkpoint_results import checkpoint_results
from whale_train.runtime.process.compile_offload_kernels import load_async_io, load_cpu_adam
from whale_train.runtime.process.preload import preload_deepspeed
from whale_train.runtime.record.callbacks import Callbacks, told_when_failing
from whale_train.runtime.record.metrics import Metrics, peak_memory_bytes
from whale_train.runtime.record.profile import StepProfiler
from whale_train.runtime.record.timeline import is_timeline, merge, write_events
from whale_train.runtime.record.trackers import open_trackers
from whale_train.runtime.record.trackers_of_failed_runs import (
    close_when_ended,
    closed_when_failing,
)
from whale_train.runtime.state.carrier import Carrier
from whale_train.runtime.state.final_model import write_final
from whale_train.runtime.state.held import RankState
from whale_train.runtime.state.parts import SavedPart
from whale_train.runtime.state.random_states import RandomStates, RankRandom
from whale_train.runtime.state.restore import restore, restore_weights
from whale_train.runtime.state.saver import Saver
from whale_train.runtime.state.votes import RequestConsensus
from whale_train.runtime.train.batches import RankBatches
from whale_train.runtime.train.loop import train_steps
from whale_train.runtime.train.recorder import record_verification
from whale_train.runtime.train.step_programs import Program
from whale_train.runtime.train.worker_program import WorkerProgram
from whale_train.strategies.grammar.form import needs_graph, partitions
from whale_train.strategies.memory.malloc_headroom import has_room
from whale_train.strategies.plan.plan import Plan
from whale_train.trackers.tracker import Status


@dataclass(frozen=True)
class Prepared:
    """Objects that are made once per host and inherited by its ranks.

    request: the request.
    module: the model, with its weights in shared memory.
    graph: the exported graph, or None where ranks do not need it.
    data: the data.
    """

    request: Request
    module: LossModule
    graph: fx.GraphModule | None
    data: OpenedData


def prepare(request: Request) -> Prepared:
    """Build the objects that ranks inherit, apart from those that depend on the plan.

    The host calls it while the plan is resolved.
    """
    compute_fp32(in_tf32=request.train.tf32)
    strategy = request.strategy_graph()
    if strategy.is_auto or request.mode == "calibrate" or partitions(strategy):
        preload_deepspeed()
    if request.train.compile:
        import_compiler()
    data = open_data(request.data, blank_labels=request.blank_labels)
    module = build_shared(request.model, request.seed)
    prepared = Prepared(request, module, None, data)
    # Ranks run the graph or count targets by it. With a strategy yet to be found, they may need it.
    counts = request.train.accumulate > 1 or strategy.logical_workers is not None
    if strategy.is_auto or needs_graph(strategy) or counts:
        return replace(prepared, graph=_exported(prepared))
    return prepared


def _exported(prepared: Prepared) -> fx.GraphModule | None:
    """Return the exported graph of the model, or None where it cannot be exported."""
    fields = prepared.data.training.fields
    graph, _ = export_model(prepared.request.model, fields)
    return None if graph is None else with_constants(graph, prepared.module, fields)


def complete(run_dir: Path, prepared: Prepared) -> Prepared:
    """Add the objects that the plan requires to `prepared`, once for all ranks, and return the
    result.

    These are the exported graph, if ranks run it; DeepSpeed, if they partition; and the CPU
    optimizer and the library for NVMe that DeepSpeed would compile at their first use.
    """
    plan = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
    if plan.rewrite is not None and prepared.graph is None:
        prepared = replace(prepared, graph=_exported(prepared))
    if any(task_graph.zero and not task_graph.state_parts for task_graph in plan.task_graphs):
        preload_deepspeed()
    if prepared.request.optimizer.name != "sgd" and any(
        task_graph.offload["optimizer"] != "none" for task_graph in plan.task_graphs
    ):
        load_cpu_adam()
    if any("nvme" in task_graph.offload.values() for task_graph in plan.task_graphs):
        load_async_io()
    return prepared


def forget(prepared: Prepared) -> None:
    """Free the initial weights, in a process that does not use them any more."""
    let_go(prepared.module)


def run_rank(run_dir: Path, rank: int, world_size: int, prepared: Prepared) -> None:
    """Run rank `rank` of the host that forked this process, from joining the other ranks to
    leaving."""
    run(run_dir, rank, world_size, file_rendezvous(run_dir), prepared)


def run(
    run_dir: Path,
    rank: int,
    world_size: int,
    rendezvous: str | Store,
    prepared: Prepared,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Join the other ranks, train as planned (or calibrate), and leave.

    `rendezvous` is the URL of a file store, or a store. `is_asked_to_stop` returns True once this
    process was told to end, in a rank whose signals no launcher handles.
    """
    with failing_when_full(), named_waits(run_dir, rank):
        # The program is freed before `leave`: a reducer that is freed after its group joins gloo's
        # threads while holding the GIL that they wait for.
        if prepared.request.mode == "calibrate":
            measure(run_dir, rank, world_size, rendezvous, prepared.request)
        else:
            train_as_planned(*(run_dir, rank, world_size, rendezvous, prepared), is_asked_to_stop)
        leave()


def measure(
    run_dir: Path, rank: int, world_size: int, rendezvous: str | Store, request: Request
) -> None:
    """Measure this machine together with the other ranks, and stay joined."""
    device, _ = _joined(run_dir, rank, world_size, rendezvous, request)
    optimizer = make_optimizer(request.optimizer.name, request.optimizer.arguments())
    precision = request.train.precision or "fp32"
    alone = request.launcher.threads or num_threads(1)
    has_others = device.type == "cpu" and alone != torch.get_num_threads()
    planned = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8")).ranks
    ranks = Ranks(
        tuple(planned_rank.device for planned_rank in planned),
        tuple(planned_rank.node for planned_rank in planned),
    )
    has_others = has_others and len(set(ranks.nodes)) == 1  # only plans for one host use it
    measure_devices(run_dir, ranks, device, precision, optimizer, alone if has_others else None)


def _joined(
    run_dir: Path, rank: int, world_size: int, rendezvous: str | Store, request: Request
) -> tuple[torch.device, EmulatedLinks | None]:
    """Join the other ranks; return this rank's device and the links that it emulates (or None)."""
    if request.launcher.threads is not None:
        torch.set_num_threads(request.launcher.threads)
    device = _device(run_dir, rank)
    compute_fp32(in_tf32=request.train.tf32)
    timeout = timedelta(seconds=request.launcher.timeout_s)
    links = _links(run_dir)
    join(rendezvous, rank, world_size, device, timeout, _pace(run_dir, rank), links)
    return device, links


def train_as_planned(
    run_dir: Path,
    rank: int,
    world_size: int,
    rendezvous: str | Store,
    prepared: Prepared,
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> Program:
    """Train, verify, evaluate or predict as planned, and stay joined.

    Return the program, whose engines hold the trained weights. Rank 0 writes the metrics and the
    summary.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|deepspeed")
    request = prepared.request
    plan = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
    assert world_size == plan.world_size, (world_size, plan.world_size)
    timeout = timedelta(seconds=request.launcher.timeout_s)
    device, links = _joined(run_dir, rank, world_size, rendezvous, request)
    if plan.logical_workers is not None:
        compute_alike(request.launcher.threads)
    if device.type == "cpu" and not has_room(plan, _here(rank), memory_bytes()):
        trim_heap()
    groups, channels = make_groups(plan, rank, timeout), make_channels(plan, rank, device, timeout)
    compiler = Compiler() if request.train.compile else None
    seat = RankContext(rank, device, groups, channels, compiler=compiler)
    # Dropout differs from rank to rank and is the same in every run.
    torch.manual_seed(request.seed + 1_000_003 * (rank + 1))
    seed_python(request.seed)  # a forward that draws in Python draws the same on every rank
    names = saved_names(prepared.module, request.model)
    # Places of layers that share weights in the checkpoint, taken while the whole model exists.
    places = shared_places(prepared.module.model) if _delinks(run_dir) else {}
    final_names = other_names(prepared.module.model)
    program = assemble(request, plan, prepared.module, prepared.graph, seat)
    state = RankState(program.engines, plan, rank, names, prepared.module)
    forget(prepared)
    limit_waits(timeout)
    batches = RankBatches(request, plan, prepared.data, rank, device)
    metrics, trackers, callbacks = None, None, None
    flops = (plan.model_flops, plan.peak_flops_s)
    carrier = Carrier(run_dir, read_hosts(run_dir), rank, world_size, request.launcher.timeout_s)
    if request.mode == "verify":
        metrics = Metrics(run_dir, device, *flops) if rank == 0 else None
        arguments = (run_dir, request, plan, program, batches, metrics, state, rank)
        summary, files = record_verification(*arguments, rounding=_rounding(run_dir))
        carrier.gather(run_dir, SavedPart(rank, files))
    elif request.mode in EVALUATING:
        metrics = Metrics(run_dir, device, *flops) if rank == 0 else None
        if (weights := _launched(run_dir)["weights"]) is not None:
            restore_weights(place_of(weights), state, final_names)
        else:
            checkpoint = _checkpoint(run_dir)
            assert checkpoint is not None
            restore_weights(carrier.fetched(checkpoint) / MODEL, state, {})
            carrier.forget()
        summary = checkpoint_results(run_dir, request, program, batches, carrier, rank)
    else:
        random: RankRandom = RandomStates(program.shared_random, rank)
        if isinstance(program, WorkerProgram):
            random = program.states
        resumed, started = None, time.monotonic()
        if (checkpoint := _checkpoint(run_dir)) is not None:
            resumed = restore(carrier.fetched(checkpoint), state, random, plan, places)
            if _launched(run_dir)["data_anew"]:
                resumed = resumed.model_copy(update={"samples": 0, "stream": None})
            carrier.forget()
        resumed_s = time.monotonic() - started
        if rank == 0:
            step, saved = (0, {}) if resumed is None else (resumed.step, resumed.trackers)
            trackers = open_trackers(request, plan, run_dir, step, saved)
            metrics = Metrics(run_dir, device, *flops, trackers)
            close_when_ended(trackers, run_dir)
            if request.callbacks.listed:
                callbacks = Callbacks(request.callbacks)
                callbacks.start(trackers.run)
        trace = Trace(rank, plan.ranks[rank].device) if request.train.trace else None
        saver = None
        if request.may_save:
            saver = Saver(
                *(run_dir, request.checkpoint, state, random, rank, carrier),
                *(RequestConsensus(), is_asked_to_stop, _launched(run_dir)["data"]),
            )
            if callbacks is not None:
                saver.on_saved = callbacks.saved
        profiler = None
        if request.train.profile is not None:
            profiler = StepProfiler(request.train.profile, run_dir, rank, device)
        with closed_when_failing(trackers), told_when_failing(callbacks):
            summary = train_steps(
                *(request, plan, program, batches, metrics, trace, saver, resumed, profiler),
                callbacks=callbacks,
            )
            summary["resumed_s"] = None if resumed is None else resumed_s
            if profiler is not None or trace is not None:
                # One part a rank: a second one would take the place of a first that is not read.
                own = [] if profiler is None else list(profiler.files)
                own += [] if trace is None else [write_events(trace, run_dir)]
                recorded = carrier.gather(run_dir, SavedPart(rank, tuple(own)))
                if trace is not None and rank == 0:
                    merge(run_dir, (file for file in recorded if is_timeline(file)))
            if request.checkpoint.final and summary["stopped_after"] is None:
                last: Place | None = None if saver is None else saver.last
                if request.checkpoint.final == "best":
                    last = _best(run_dir, summary) or last
                sources = (prepared.module.model, request.model, tokenizer_of(request.data))
                folder = write_final(run_dir, state, *sources, last, rank, carrier)
                if folder is not None:
                    summary["model_bytes"] = sum(x.stat().st_size for x in folder.iterdir())
    peaks: list[int] = [0] * world_size
    dist.all_gather_object(peaks, peak_memory_bytes(device))
    if metrics is not None:
        metrics.close()
        summary["peak_memory_bytes"] = peaks
        if compiler is not None:
            summary["compiled_s"] = compiler.seconds
        if links is not None:
            summary["full_bandwidth_bytes_s"] = links.full_bytes_s
        if callbacks is not None:
            callbacks.end(_status(summary), summary)
            summary["warnings"] = [*summary.get("warnings", ()), *callbacks.warnings]
        if trackers:
            trackers.close(_status(summary), summary)
            summary["warnings"] = [*summary.get("warnings", ()), *trackers.warnings]
        path, text = run_dir / "summary.json", json.dumps(summary, indent=1) + "\n"
        with writing(path, len(text)):
            path.with_suffix(".partial").write_text(text, encoding="utf-8")
            path.with_suffix(".partial").replace(path)
    return program


def _best(run_dir: Path, summary: dict[str, Any]) -> Place | None:
    """Return the best checkpoint of a run, or None with a warning in `summary` if it does not
    exist.

    It is in the run directory, or beside the checkpoint that the run resumed from. A collective, as
    only rank 0 has complete checkpoints.
    """
    best = summary.get("best")
    place: list[Place | None] = [None]
    if best is not None:
        resumed = _checkpoint(run_dir)
        folders: list[Place] = [folder_of(run_dir, best["step"])]
        folders += [] if resumed is None else [resumed.parent / folders[0].name]
        place = [next((x for x in folders if (x / MANIFEST).exists()), None)]
    dist.broadcast_object_list(place, src=0)
    if place[0] is None:
        warning = "checkpoint.final: no best checkpoint is there; model/ has the last weights"
        summary.setdefault("warnings", []).append(warning)
    return place[0]


def _status(summary: Mapping[str, Any]) -> Status:
    """Return the status of a run that has a summary: finished, or interrupted at a checkpoint."""
    return "finished" if summary["stopped_after"] is None else "interrupted"


def _here(rank: int) -> range:
    """Return the ranks on this rank's machine."""
    first = rank - int(os.environ["LOCAL_RANK"])
    return range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))


def _launched(run_dir: Path) -> dict[str, Any]:
    """Return the launcher's choices for the ranks, from `launch.json`."""
    content: dict[str, Any] = json.loads((run_dir / "launch.json").read_text(encoding="utf-8"))
    return content


def _pace(run_dir: Path, rank: int) -> Pace | None:
    """Return the slowdown that this rank emulates, or None at full speed."""
    paces = _launched(run_dir)["paces"]
    return None if paces is None else Pace(paces[rank])


def _delinks(run_dir: Path) -> bool:
    """Return True if the checkpoint's layers share weights, and the run's layers do not."""
    return bool(_launched(run_dir)["delinks"])


def _rounding(run_dir: Path) -> int | None:
    """Return the seed of the noise on a verification's weights, or None for no noise."""
    seed: int | None = _launched(run_dir)["rounding"]
    return seed


def _checkpoint(run_dir: Path) -> Place | None:
    """Return the checkpoint that the run resumes from, or None for a new run."""
    path = _launched(run_dir)["checkpoint"]
    return None if path is None else place_of(path)


def _links(run_dir: Path) -> EmulatedLinks | None:
    """Return the links that this rank emulates, or None if no links are slowed."""
    relative = _launched(run_dir)["links"]
    if relative is None:
        return None
    plan = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8"))
    return EmulatedLinks(relative, sharing=sharing_hosts(plan))


def _device(run_dir: Path, rank: int) -> torch.device:
    """Return the device that the plan assigns to `rank`. Raises RuntimeError if it is not on this
    host."""
    if _launched(run_dir)["device"] == "cpu":
        return torch.device("cpu")
    planned = Plan.from_json((run_dir / "plan.json").read_text(encoding="utf-8")).ranks[rank]
    assert planned.uuid is not None
    # CUDA is not initialised yet, so it will number only the GPU that is visible from here on.
    os.environ["CUDA_VISIBLE_DEVICES"] = planned.uuid
    # DeepSpeed opens the GPU of this number, whatever device is set (0.19.8).
    os.environ["LOCAL_RANK"] = "0"
    if torch.cuda.device_count() != 1:
        missing = f"{planned.uuid} ({planned.device}), which is not on this host"
        raise RuntimeError(f"the plan puts rank {rank} on {missing}")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device
