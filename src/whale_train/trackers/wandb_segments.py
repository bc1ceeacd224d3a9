"""Keep a run's curves with Weights & Biases, or in its offline files in the run directory.

Every part of a run is a segment with the run's id. A later segment names by `resume_from` the step
after which it replaces rows of the earlier ones. W&B rewinds the run when it gets the segment, at
once or from `wandb sync`. (`resume="must"` cannot name a step, and does nothing offline.)
"""

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from whale_train.trackers.options import WandbOptions
from whale_train.trackers.tracker import RunDescription, Status

_FLUSH_S = 0.2  # of the offline file; W&B's own 15 s are lost where the process is killed
_EXIT_CODE: Mapping[Status, int] = {"finished": 0, "failed": 1, "interrupted": 130}


class WandbTracker:
    """Tracker that writes a run's segments to W&B, as `options` say."""

    def __init__(self, options: WandbOptions) -> None:
        self._options = options

    def open(self, run: RunDescription, state: dict[str, Any] | None) -> None:
        """Begin a segment of the run whose id is in `state`, or of a new run."""
        options, resume_from = self._options, None
        if state is not None and run.step == 0:
            run.note(f"wandb: no row of run {state['id']} stays; a new curve is begun")
        elif state is not None:
            resume_from = f"{state['id']}?_step={run.step}"
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.run_name or run.name,
            mode=options.mode or _mode_here(),
            dir=run.folder,
            config=dict(run.config),
            settings=wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                x_transaction_log_flush_interval=_FLUSH_S,
            ),
            resume_from=resume_from,
        )
        files_folder = Path(self._run.dir)
        for path in run.files:
            copied = files_folder / path.relative_to(run.folder)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
            self._run.save(str(copied), base_path=str(files_folder), policy="now")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step as a row of the history, whose `_step` is the step."""
        self._run.log(dict(values), step=step, commit=True)

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Add the summary to W&B's summary of the run, and finish the segment."""
        self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
        self._run.summary["status"] = status
        self._run.finish(exit_code=_EXIT_CODE[status])

    def state(self) -> dict[str, Any]:
        """Return the id of the run, after waiting for the offline file to be written."""
        time.sleep(2 * _FLUSH_S)
        return {"id": self._run.id}


def _mode_here() -> Any:
    """Return the mode that the environment asks for: WANDB_MODE, or online where WANDB_API_KEY is
    set, else offline."""
    return os.environ.get("WANDB_MODE") or (
        "online" if os.environ.get("WANDB_API_KEY") else "offline"
    )
