"""Run `mode=rehearse`, and the rehearsal of `mode=plan rehearse=true`: go through a step of every
rank without the rank's device."""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from whale_train.config import Request
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.job_end import JobEnd, run_alone
from whale_train.launcher.ranks.host_process import REHEARSE_PROGRAM
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.ui.show_rehearsal import rehearsal_view, verdict
from whale_train.launcher.ui.terminal import Portable
from whale_train.rehearsal import FILE, Rehearsal
from whale_train.strategies.plan.plan import Plan


def refuse_other_ranks(request: Request, plan: Plan) -> None:
    """Raise ConfigError where the request names a rank to rehearse that the plan does not have."""
    asked = request.rehearse if isinstance(request.rehearse, tuple) else ()
    others = [rank for rank in asked if rank >= plan.world_size]
    if others:
        rule = f"has rank {others[0]}, and the plan's are 0 to {plan.world_size - 1}"
        raise ConfigError([Fault("rehearse", str(list(asked)), rule, "leave it out")])


def rehearse_job(request: Request, run_dir: Path, console: Console, signals: StopSignals) -> JobEnd:
    """Rehearse the plan in a run directory and show the outcome.

    `mode=rehearse` shows the whole outcome. Any other mode shows the verdict, and the rest only
    where the rehearsal found a fault.
    """
    console.print(Text("rehearsing its ranks, without their devices"))
    ranks = request.rehearse
    asked = "kinds" if isinstance(ranks, bool) else ranks
    said = asked if isinstance(asked, str) else ",".join(map(str, asked))
    ended = run_alone(run_dir, (*REHEARSE_PROGRAM, "--ranks", said), signals)
    if ended is not None:
        return ended
    rehearsal = Rehearsal.from_json((run_dir / FILE).read_text(encoding="utf-8"))
    if request.mode == "rehearse" or not rehearsal.is_clean:
        console.print(Portable(rehearsal_view(rehearsal)))
    console.print(
        Text(verdict(rehearsal), style="green" if rehearsal.is_clean else "red"), soft_wrap=True
    )
    return JobEnd("done" if rehearsal.is_clean else "failed", run_dir)
