"""Run `mode=export`: write the weights of a checkpoint as a folder that other programs can open.

A run that died after its last step is completed by the same export.
"""

from pathlib import Path

from rich.console import Console
from rich.text import Text

from whale_train.checkpoints.checkpoint_files import MODEL, stored_tensors
from whale_train.checkpoints.safetensors_files import BrokenCheckpoint
from whale_train.config import Request
from whale_train.errors import ConfigError
from whale_train.launcher.going_on import broken
from whale_train.launcher.job_end import JobEnd, model_line, run_alone
from whale_train.launcher.ranks.host_process import EXPORT_PROGRAM
from whale_train.launcher.ranks.run_files import make_run_dir
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.resume import (
    Resumed,
    checkpoint_at,
    saved_request,
    say_passed_over,
)
from whale_train.launcher.ui.terminal import Portable


def export_checkpoint(
    request: Request, run_dir: Path, console: Console, signals: StopSignals
) -> JobEnd:
    """Export the checkpoint that the request names into the request's run directory.

    Raises ConfigError for a checkpoint that is not whole, and for a model that cannot be built
    here.
    """
    assert request.checkpoint.path is not None
    checkpoint = checkpoint_at(request.checkpoint.path, "checkpoint")
    say_passed_over(checkpoint.broken, console)
    run_dir = make_run_dir(request, run_dir)
    return export_into(run_dir, checkpoint, console, signals)


def export_into(
    run_dir: Path, checkpoint: Resumed, console: Console, signals: StopSignals
) -> JobEnd:
    """Write a checkpoint's weights into the `model/` folder of a run directory, and return the end
    of the job.

    Raises ConfigError for weights that are not whole, and for a model that cannot be built here.
    """
    from whale_train.models.build import load_class  # which imports torch

    load_class(saved_request(checkpoint).model)
    try:
        stored_tensors(checkpoint.path / MODEL)
    except BrokenCheckpoint as error:
        raise ConfigError([broken(checkpoint.path, error)]) from None
    console.print(Text(f"exporting step {checkpoint.step}, from {checkpoint.path}"), soft_wrap=True)
    program = (*EXPORT_PROGRAM, "--checkpoint", str(checkpoint.path.absolute()))
    ended = run_alone(run_dir, program, signals)
    if ended is not None:
        return ended
    size = sum(path.stat().st_size for path in (run_dir / MODEL).iterdir())
    console.print(Portable(model_line(run_dir, size)), soft_wrap=True)
    return JobEnd("done", run_dir)
