"""Run one job, from its request to its end: profile, Plan, run directory, ranks.

`carry_out` is the road of a job, whoever asks for it. `run_job` is the command's use of it, which
prints what is said of the end.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from whale_train.callbacks.make import refuse_callbacks
from whale_train.checkpoints.checkpoint_files import MODEL, STOP
from whale_train.checkpoints.url_path import UrlPath
from whale_train.config import AUTO, EVALUATING, Request, in_steps, read_request
from whale_train.data.evaluation_sets import open_data
from whale_train.data.sources.image_folder import ImageFolderOptions, with_classes
from whale_train.data.sources.text_files import TextFilesOptions
from whale_train.data.stream import ENDLESS
from whale_train.disk import is_full
from whale_train.errors import ConfigError, Fault, RequestError
from whale_train.hub import fetch
from whale_train.launcher.attempts import (
    Attempt,
    attempts_view,
    is_its_own,
    steps_done,
    write_attempts,
)
from whale_train.launcher.compose.command_line import compared_strategies, explained_strategy
from whale_train.launcher.followed import Follower
from whale_train.launcher.job_end import (
    JobEnd,
    finish,
    interrupted,
    never_met,
    pruned,
    report_run,
    started_elsewhere,
    summary_of,
)
from whale_train.launcher.modes.audit import audit_job
from whale_train.launcher.modes.calibrate import calibrate
from whale_train.launcher.modes.evaluate import (
    evaluate_weights,
    weights_of,
    with_saved,
)
from whale_train.launcher.modes.explain import explain_job
from whale_train.launcher.modes.export import export_checkpoint, export_into
from whale_train.launcher.modes.rehearse import refuse_other_ranks, rehearse_job
from whale_train.launcher.modes.schedule import schedule_jobs
from whale_train.launcher.modes.verify import verify_job
from whale_train.launcher.modes.view import view_job
from whale_train.launcher.planning.check_trackers import refuse_trackers
from whale_train.launcher.planning.plan_request import (
    Resolved,
    resolve_each,
    resolve_request,
)
from whale_train.launcher.ranks.early_host import EarlyHost
from whale_train.launcher.ranks.external_ranks import JobProcess, RendezvousTimeout
from whale_train.launcher.ranks.host_process import HostOutcome
from whale_train.launcher.ranks.interfaces import refuse_missing_interfaces
from whale_train.launcher.ranks.on_ray.run_on_ray import run_on_ray
from whale_train.launcher.ranks.over_ssh import run_over_ssh
from whale_train.launcher.ranks.rank_env import LaunchPlace
from whale_train.launcher.ranks.run_dir import (
    RunDirInUse,
    in_use,
    keep_steps,
    remove_unused,
)
from whale_train.launcher.ranks.run_files import (
    make_run_dir,
    start_ranks,
    write_plan,
    write_plans,
)
from whale_train.launcher.ranks.stop_signals import StopSignals, stop_signals
from whale_train.launcher.report.report_files import PLAN_PAGE, write_comparison, write_view
from whale_train.launcher.resume import (
    Resumed,
    delinks,
    find_checkpoint,
    go_on,
    is_at_end,
    phase_of,
    refuse_unlike,
    saved_state,
    say_resumed,
)
from whale_train.launcher.slurm.submit import Submission, planned_file, write_planned
from whale_train.launcher.store.copies import StoreCopies
from whale_train.launcher.store.refuse_url import refuse_store, refuse_urls
from whale_train.launcher.ui.progress import Progress
from whale_train.launcher.ui.show_comparison import comparison_view, refuse_all
from whale_train.launcher.ui.show_error import error_text, terminal_width
from whale_train.launcher.ui.show_resolved import show_resolved
from whale_train.launcher.ui.terminal import Portable, open_console
from whale_train.launcher.ui.tokenising import tokenising_shown
from whale_train.machine.hosts import REFUSED
from whale_train.models.weights.saved_configs import KEY as PRETRAINED
from whale_train.strategies.plan.plan import Decision

ELSEWHERE = ("ssh", "slurm", "ray")  # kinds of launchers that start ranks by processes of their own


@dataclass(frozen=True)
class JobPlace:
    """The place of a job: where it prints, and how its ranks are started.

    console: where the plan and the progress are printed.
    arguments: command-line arguments that make the same request.
    place: the place of this process, rank 0, where others have started the ranks.
    early: a host that imports already; None: there is none.
    follower: hears the metrics of a training that runs here, and may end it; None: nobody does.
    """

    console: Console
    arguments: Sequence[str] = ()
    place: LaunchPlace | None = None
    early: EarlyHost | None = None
    follower: Follower | None = None


def run_job(
    config: DictConfig,
    names: dict[str, str],
    run_dir: Path,
    arguments: Sequence[str] = (),
    place: LaunchPlace | None = None,
    files: tuple[Decision, ...] = (),
    early: EarlyHost | None = None,
    follower: Follower | None = None,
) -> JobEnd:
    """Serve one request. Print what happens, and raise nothing that a user can cause.

    config: the composed config of the job.
    names: the option chosen in each config group.
    run_dir: the directory that Hydra made for the job.
    arguments: command-line arguments that make the same request.
    place: the place of this process, rank 0, where others have started the ranks.
    files: notes for the plan, about the user's own config files.
    early: a host that imports already; None: there is none.
    follower: hears the metrics of a training that runs here, and may end it; None: nobody does.
    """
    at = JobPlace(open_console(sys.stdout), arguments, place, early, follower)
    try:
        end = carry_out(read_request(config, names, files), run_dir, at)
    except RequestError as error:
        is_told = (run_dir / REFUSED).exists()
        discard(run_dir, error)
        sys.stdout.flush()
        sys.stderr.write(error_text(error, terminal_width(sys.stderr)) + "\n")
        return JobEnd("refused", run_dir, is_told=is_told, reason=str(error))
    except KeyboardInterrupt:
        end = interrupted(run_dir)
    sys.stdout.flush()
    if end.refusal is not None:
        sys.stderr.write(error_text(end.refusal, terminal_width(sys.stderr)) + "\n")
    if end.said:
        sys.stderr.write(("error: " if end.status == "failed" else "") + end.said + "\n")
    return end


def discard(run_dir: Path, error: RequestError) -> None:
    """Remove the files that a job which was refused has left in its directory."""
    if not isinstance(error, RunDirInUse):  # whose files belong to another run
        remove_unused(run_dir)


def carry_out(request: Request, run_dir: Path, at: JobPlace) -> JobEnd:
    """Run the job of one request to its end. Raises ConfigError or PlanError where it is refused.

    run_dir: the directory of the job, which exists.
    """
    console, place, early = at.console, at.place, at.early
    try:
        _refuse_mode(request, place)
        if early is not None and (request.mode != "train" or request.launcher.kind in ELSEWHERE):
            early.stop()
        is_elsewhere = place is None and request.launcher.kind in ELSEWHERE
        refuse_urls(request, is_elsewhere=is_elsewhere)
        _fetch_model(request)
        weights = None
        if request.mode in EVALUATING:
            weights = weights_of(request)
            request = with_saved(request, weights, at.arguments)
        request = _with_data(request, place, console)
        if request.mode in ("plan", "rehearse"):
            return _plan(request, run_dir, at)
        if request.mode == "audit":
            return audit_job(request, run_dir, console)
        if request.mode == "view":
            return view_job(request, run_dir, console)
        with stop_signals() as signals:
            if request.mode == "schedule":
                return schedule_jobs(request, run_dir, console, at.arguments, signals)
            if request.mode == "export":
                return export_checkpoint(request, run_dir, console, signals)
            if request.launcher.kind == "ssh" and place is None:
                status = run_over_ssh(request, at.arguments, console, signals)
                return started_elsewhere(status, run_dir)
            if request.launcher.kind == "ray" and place is None:
                status = run_on_ray(request, at.arguments, console, signals)
                return started_elsewhere(status, run_dir)
            if request.launcher.kind == "slurm" and place is None:
                submission = Submission.of(request, at.arguments, run_dir)
                if "kind" not in request.hardware:  # what can be known of the plan here
                    resolve_request(request.model_copy(update={"mode": "plan"}))
                return JobEnd("done", run_dir, submission=submission)
            refuse_missing_interfaces(os.environ)
            if request.mode == "calibrate":
                return calibrate(request, run_dir, console, place, signals)
            if request.mode == "verify":
                return verify_job(request, run_dir, console, place, signals)
            if weights is not None:
                made = (request, weights, run_dir, console, place, signals)
                return evaluate_weights(*made)
            with in_use(run_dir):
                end = _train(request, run_dir, at, signals)
                if request.train.report:
                    report_run(end, console)
                return end
    except OSError as error:
        if not is_full(error):
            raise
        said = f"{error.strerror}; make room, or use another hydra.run.dir"
        return JobEnd("failed", run_dir, reason=str(error.strerror), said=said)
    except KeyboardInterrupt:
        return interrupted(run_dir)


def with_inputs(request: Request, console: Console) -> Request:
    """Return the request of a plan with what it needs of this machine: the folder of a pretrained
    model, and its data, as `_with_data` does. Raises ConfigError.

    console: where it is shown how far long preparations are.
    """
    _fetch_model(request)
    return _with_data(request, None, console)


def _fetch_model(request: Request) -> None:
    """Have the folder of a pretrained model on this machine. Raises ConfigError."""
    if request.model.pretrained is not None:
        weights = request.mode not in ("plan", "rehearse")
        fetch(PRETRAINED, request.model.pretrained, weights=weights)


def _with_data(request: Request, place: LaunchPlace | None, console: Console) -> Request:
    """Return the request with the steps of `train.epochs`, its texts tokenised, its images' classes
    named.

    Nothing happens for ranks on other hosts, which have data of their own, and for modes that read
    none. Raises ConfigError.
    """
    elsewhere = place is None and request.launcher.kind in ("ssh", "ray")
    if elsewhere or request.mode in ("calibrate", "export", "audit", "view", "schedule"):
        return request
    if isinstance(request.data, ImageFolderOptions):
        request = request.model_copy(update={"data": with_classes(request.data)})
    if not isinstance(request.data, TextFilesOptions) and request.train.epochs is None:
        return request
    with tokenising_shown(console) as watch:
        data = open_data(request.data, watch, request.blank_labels)
    if request.train.epochs is not None and data.training.num_samples == ENDLESS:
        rule = "counts samples, and the data is a stream that does not say how many it has"
        remedy = "use train.steps, or give its class a __len__"
        given = f"{request.train.epochs:g}"
        raise ConfigError([Fault("train.epochs", given, rule, remedy)])
    return in_steps(request, data.training.num_samples)


def _refuse_mode(request: Request, place: LaunchPlace | None) -> None:
    """Raise ConfigError for a mode that does not fit how the ranks are started.

    Refused are a mode that needs no ranks where others have started some, and a run in two parts
    (`train.delink_at`) where this process does not start the ranks.
    """
    elsewhere = place is not None or request.launcher.kind in ELSEWHERE
    if request.is_pseudo and elsewhere and request.mode == "train":
        rule = "starts ranks anew where layers part, and they are started elsewhere"
        remedy = "use null, and for the second part train.resume=RUN model.share_layers=false"
        at = str(request.train.delink_at)
        raise ConfigError([Fault("train.delink_at", at, rule, remedy)])
    alone = ("plan", "rehearse", "export", "audit", "view", "schedule")
    if request.mode in alone and place is not None:
        rule = "needs no ranks, and some were started from outside"
        raise ConfigError([Fault("mode", request.mode, rule, "run it without torchrun or srun")])


def _plan(request: Request, run_dir: Path, at: JobPlace) -> JobEnd:
    """Resolve, write and show the plan, or one plan for each strategy to compare.

    No rank starts. Only a rehearsal of the plan runs, where one is asked for.
    """
    console = at.console
    run_dir = make_run_dir(request, run_dir)
    asked, request = request, request.model_copy(update={"mode": "plan"})
    if request.explain is not None:
        content = explained_strategy(request.explain)
        return explain_job(request, content, run_dir, console, at.arguments)
    if request.compare:
        plans = resolve_each(request, compared_strategies(request.compare))
        refuse_all(plans)
        files = [("the plan", path) for path in write_plans(run_dir, plans)]
        console.print(comparison_view(plans))
        title = _title(request, ("model", "hardware"))
        files.insert(0, ("the page", write_comparison(run_dir, plans, title)))
    else:
        job = None
        if request.launcher.kind == "slurm" and asked.mode == "plan":
            job = planned_file(request, at.arguments, run_dir)
        resolved = resolve_request(request)
        refuse_other_ranks(asked, resolved.plan)
        write_plan(run_dir, resolved, request)
        show_resolved(resolved, request, console)
        write_view(run_dir, None, run_dir / PLAN_PAGE)
        files = [("the page", run_dir / PLAN_PAGE), ("the plan", run_dir / "plan.json")]
        if job is not None:
            console.print(Text("\n" + job.text()), soft_wrap=True)
            files.append(("the job, for sbatch", write_planned(job, run_dir)))
        if request.train.trace:
            files.append(("the predicted step's timeline", run_dir / "predicted_trace.json"))
        if resolved.found is not None:
            files.append(("the strategy, as a file", run_dir / "strategy.yaml"))
    for label, path in files:
        console.print(f"{label}: {path}", soft_wrap=True, markup=False, highlight=False)
    if asked.mode == "rehearse" or (asked.rehearse and not asked.compare):
        with stop_signals() as signals:
            return rehearse_job(asked, run_dir, console, signals)
    return JobEnd("done", run_dir)


def _train(request: Request, run_dir: Path, at: JobPlace, signals: StopSignals) -> JobEnd:
    """Train, and copy what the run saves to `checkpoint.to`."""
    refuse_trackers(request.trackers)
    refuse_callbacks(request.callbacks)
    if request.checkpoint.to is None:
        return _train_attempts(request, run_dir, at, signals, None)
    to = UrlPath.of(request.checkpoint.to)
    refuse_store(to, run_dir, request.train.resume)
    copies = StoreCopies(to, request.checkpoint.keep, at.console)
    end = _train_attempts(request, run_dir, at, signals, copies)
    return copies.finished(end, signals.poll)


def _train_attempts(
    request: Request,
    run_dir: Path,
    at: JobPlace,
    signals: StopSignals,
    copies: StoreCopies | None,
) -> JobEnd:
    """Train, in as many attempts as `launcher.max_restarts` allows.

    After a failed attempt, the next goes on from the newest checkpoint, on the devices that are
    there then. Attempts end early where the last two failed in the same way at the same step.
    """
    attempts: list[Attempt] = []
    wanted, refusal, console = request, None, at.console
    # torchrun and srun start their ranks again themselves.
    allowed = request.launcher.max_restarts if at.place is None else 0
    while True:
        try:
            resumed = _resumed(wanted, run_dir, console)
            if resumed is None and wanted is not request:  # the attempts have saved nothing
                resumed = _resumed(request, run_dir, console)
            if resumed is not None and is_at_end(resumed, request):
                has_model = not request.checkpoint.final or (run_dir / MODEL).exists()
                if not has_model:
                    run_dir = make_run_dir(wanted, run_dir)
                if copies is not None:
                    copies.begin(run_dir, resumed.step)
                if not has_model:
                    return export_into(run_dir, resumed, console, signals)
                return JobEnd("done", run_dir)
            began, started = 0 if resumed is None else resumed.step, time.monotonic()
            phase = phase_of(wanted, resumed)
            run_dir = make_run_dir(phase, run_dir)
            if copies is not None:
                copies.begin(run_dir, began)
            outcome, resolved = _attempt(phase, run_dir, at, signals, resumed, copies)
        except RequestError as error:
            if not attempts:
                raise
            refusal = error
            break  # ends with the failure of the attempt before
        except RendezvousTimeout as error:
            return never_met(error.outcome, run_dir)
        if outcome.status == "done" and phase.is_pseudo and summary_of(run_dir).get("delinks"):
            wanted = next_attempt(request)
            continue
        reached, spent = steps_done(run_dir, began), time.monotonic() - started
        ranks = resolved.plan.world_size
        attempts.append(Attempt(began, reached, spent, ranks, outcome.status, outcome.failure))
        left = allowed - len(attempts) + 1
        if allowed:
            write_attempts(run_dir, attempts)
        if outcome.status != "failed" or left <= 0 or is_its_own(attempts):
            break
        said = f"attempt {len(attempts)} ended: {attempts[-1].why}; {left} more may follow"
        console.print(Text(f"warning: {said}", style="yellow"), soft_wrap=True)
        wanted = next_attempt(request)
    if len(attempts) > 1:
        console.print(Portable(attempts_view(attempts)))
        if is_its_own(attempts):
            console.print("the last two attempts failed of the same at the same step")
    if at.follower is not None and at.follower.ends and signals.count == 1:
        end = pruned(outcome, run_dir, console)
        if end is not None:
            return end
    return replace(finish(outcome, resolved, run_dir, console, _title(request)), refusal=refusal)


def _title(request: Request, groups: Sequence[str] = ("model", "strategy", "hardware")) -> str:
    """Return the options chosen in the config groups `groups`, as text."""
    names = request.names
    return " ".join(f"{group}={names[group]}" for group in groups if group in names)


def next_attempt(request: Request) -> Request:
    """Return the request of a job's next attempt: the same request, resumed from the job's own
    newest checkpoint."""
    train = request.train.model_copy(update={"resume": AUTO})
    return request.model_copy(update={"train": train})


def _resumed(request: Request, run_dir: Path, console: Console) -> Resumed | None:
    """Find, check and announce the checkpoint that the request goes on from.

    Returns None where the request names none, or where `auto` finds none.
    """
    if request.train.resume is None:
        return None
    to = None if request.checkpoint.to is None else UrlPath.of(request.checkpoint.to)
    resumed = find_checkpoint(request.train.resume, run_dir, to)
    if resumed is not None:
        refuse_unlike(resumed, phase_of(request, resumed))
    say_resumed(resumed, request, console)
    return resumed


def _attempt(
    request: Request,
    run_dir: Path,
    at: JobPlace,
    signals: StopSignals,
    resumed: Resumed | None,
    copies: StoreCopies | None,
) -> tuple[HostOutcome, Resolved]:
    """Resolve the request and run its ranks to their end. Returns the outcome and the resolved
    plan."""
    console, follower = at.console, at.follower
    parts = delinks(resumed, request)
    if parts:
        parted = "layers that shared their weights go on by themselves, each with what all had"
        console.print(parted, soft_wrap=True)
    begun = keep_steps(run_dir, 0 if resumed is None else resumed.step)
    process = JobProcess(run_dir, at.place, at.early)
    try:
        with process.planned(request, signals.poll, console) as resolved:
            going_on = None
            if resumed is not None:
                made = (resolved.plan, resolved.num_samples, resolved.data)
                lost = resolved.lost_place
                going_on = go_on(resumed, request, *made, parts=parts, lost_place=lost)
        if going_on is not None:
            said = (*resolved.plan.decisions, *going_on.decisions)
            resolved = replace(resolved, plan=replace(resolved.plan, decisions=said))
        checkpoint = None if resumed is None else resumed.path
        data_anew = going_on is not None and going_on.data_anew
        samples = 0 if resumed is None or data_anew else saved_state(resumed).samples
        begun_with = (run_dir, resolved, request, checkpoint)
        start_ranks(*begun_with, delinks=parts, data_anew=data_anew, samples=samples)
        show_resolved(resolved, request, console)
        hears = None
        if follower is not None:
            follower.begin(request.train.steps)
            hears = follower.hear
        progress = Progress(run_dir, request.train.steps, console, read_from=begun, hears=hears)

        def ask() -> None:
            (run_dir / STOP).touch()

        def poll() -> None:
            signals.poll()
            progress.poll()
            if copies is not None:
                copies.poll(at_once=False)
            if follower is not None and follower.ends and not signals.count:
                signals.end()

        if request.checkpoint.saves:
            signals.asks(ask, request.checkpoint.grace_s)
        try:
            outcome = process.wait(poll)
        finally:
            progress.close()
    finally:
        process.stop()  # does nothing after a wait that ended by itself
    return outcome, resolved
