"""Run `mode=verify`: compare the first steps under the plan with the same steps on one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from whale_train.config import Request
from whale_train.errors import Fault, PlanError
from whale_train.launcher.job_end import JobEnd, finish, never_met
from whale_train.launcher.modes.compare_runs import compare
from whale_train.launcher.modes.verification import ROUNDED_RUNS
from whale_train.launcher.planning.loss_read import shared_by_both
from whale_train.launcher.planning.own_optimizers import with_optimizers
from whale_train.launcher.planning.plan_request import Resolved, training_of
from whale_train.launcher.ranks.external_ranks import JobProcess, RendezvousTimeout
from whale_train.launcher.ranks.rank_env import LaunchPlace
from whale_train.launcher.ranks.run_dir import write_json
from whale_train.launcher.ranks.run_files import make_run_dir, start_ranks
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.ui.show_resolved import show_resolved
from whale_train.launcher.ui.show_verify import rounded_line, verdict_line, verification_view
from whale_train.launcher.ui.terminal import Portable
from whale_train.machine.limits import memory_bytes
from whale_train.strategies.resolver.resolve import resolve


def verify_job(
    request: Request,
    run_dir: Path,
    console: Console,
    place: LaunchPlace | None,
    signals: StopSignals,
) -> JobEnd:
    """Run the first steps under the plan and again on one process of this host, and compare the
    two runs.

    Where the runs differ and the request gives no tolerance, one process runs the steps
    `ROUNDED_RUNS` more times with other roundings, to measure the effect of rounding.
    """
    request = only_steps(request)
    run_dir = make_run_dir(request, run_dir)
    processes = [JobProcess(run_dir, place)]
    try:
        with processes[0].planned(request, signals.poll, console) as resolved:
            alone, one_process = on_one_process(request, resolved)
        start_ranks(run_dir, resolved, request)
        show_resolved(resolved, request, console)
        alone_dir = make_run_dir(alone, run_dir / "verify" / "one_process")
        # The process imports in the meantime, and then waits for its plan.
        processes.append(JobProcess(alone_dir, None))
        outcome = processes[0].wait(signals.poll)
        if outcome.status != "done":
            return finish(outcome, resolved, run_dir, console)
        start_ranks(alone_dir, one_process, request)
        outcome = processes[1].wait(signals.poll)
        if outcome.status != "done":
            return finish(outcome, one_process, alone_dir, console)
        ranks, precision = resolved.plan.world_size, resolved.plan.precision
        shared = shared_by_both(request, resolved.profile)
        exact = resolved.plan.logical_workers is not None
        sides = (request, run_dir, alone_dir, ranks, precision)
        verification = compare(*sides, shared=shared, exact=exact)
        if verification.may_be_rounding and request.verify.tolerance is None:
            console.print(Portable(rounded_line(verification)))
            rounded = []
            for seed in range(1, ROUNDED_RUNS + 1):
                rounded.append(make_run_dir(alone, run_dir / "verify" / f"rounded_{seed}"))
                processes.append(JobProcess(rounded[-1], None))
                start_ranks(rounded[-1], one_process, request, rounding=seed)
                outcome = processes[-1].wait(signals.poll)
                if outcome.status != "done":
                    return finish(outcome, one_process, rounded[-1], console)
            verification = compare(*sides, rounded, shared)
    except RendezvousTimeout as error:
        return never_met(error.outcome, run_dir)
    finally:
        for process in processes:
            process.stop()
    write_json(run_dir / "verify.json", verification.to_json())
    console.print(verification_view(verification))
    if not verification.equal:
        said = f"{verdict_line(verification)}; see {run_dir / 'verify.json'}"
        return JobEnd("failed", run_dir, said=said, verification=verification)
    return JobEnd("done", run_dir, verification=verification)


def only_steps(request: Request) -> Request:
    """Return `request` with gradient norms recorded and without evaluations, for a
    verification."""
    request = request.without_evaluations()
    train = request.train.model_copy(update={"grad_norm": True})
    return request.model_copy(update={"train": train})


def on_one_process(request: Request, resolved: Resolved) -> tuple[Request, Resolved]:
    """Return the request and the plan of the same steps on the first device alone.

    The batch is not split into micro-batches, but for those of logical workers, and nothing is
    compiled. A CPU process may use all of
    the host's memory, whichever device it emulates. Raises PlanError where one process cannot hold
    the model and the batch.
    """
    names = request.names | {"strategy": "single"}
    strategy: dict[str, Any] = {"devices": 1, "graph": {"replicate": {}}}
    if resolved.plan.logical_workers is not None:
        strategy["logical_workers"] = resolved.plan.logical_workers.count
    train = request.train.model_copy(update={"accumulate": 1, "compile": False})
    alone = request.model_copy(update={"names": names, "strategy": strategy, "train": train})
    cluster = resolved.cluster.first(1)
    if resolved.device == "cpu":
        (node,) = cluster.nodes
        device = replace(node.devices[0], memory_bytes=float(memory_bytes()))
        cluster = replace(cluster, nodes=(replace(node, devices=(device,)),))
    faults: list[Fault] = []
    training = with_optimizers(alone, training_of(alone), resolved.profile.parameters, faults)
    assert not faults, faults  # the plan is there
    try:
        plan = resolve(alone.strategy_graph(), cluster, resolved.profile, training)
    except PlanError as error:
        rule = "compares with one process, which cannot hold this model and batch"
        remedy = "verify a smaller model or train.global_batch"
        fault = Fault("mode", "verify", rule, remedy)
        raise PlanError([fault, *error.faults]) from None
    first = replace(plan.ranks[0], uuid=resolved.plan.ranks[0].uuid)  # the same GPU
    plan = replace(plan, ranks=(first,))
    return alone, replace(resolved, plan=plan, cluster=cluster, paces=None, links=None, found=None)
