"""Keep a run's curves with Weights & Biases, or in its offline files in the run directory.

Every part of a run is a segment with the run's id. A later one says by `resume_from` after which
step the rows of the earlier ones are replaced; W&B rewinds the run when it gets the segment, at
once or from `wandb sync`. (`resume="must"` would say nothing of that, and offline nothing at all.)
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
    """Writer of a run's segments, as `options` say."""

    def __init__(self, options: WandbOptions) -> None:
        self._options = options

    def open(self, run: RunDescription, state: dict[str, Any] | None) -> None:
        """Begin a segment, of the run whose id is in `state`, or of a new run."""
        options, moment = self._options, None
        if state is not None and run.step == 0:
            run.note(f"wandb: no row of run {state['id']} stays; a new curve is begun")
        elif state is not None:
            moment = f"{state['id']}?_step={run.step}"
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
            resume_from=moment,
        )
        kept = Path(self._run.dir)
        for path in run.files:
            copied = kept / path.relative_to(run.folder)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
            self._run.save(str(copied), base_path=str(kept), policy="now")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step as a row of the history, whose `_step` is the step."""
        self._run.log(dict(values), step=step, commit=True)

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Put the summary into the run's, and finish the segment."""
        self._run.summary.update({f"summary/{key}": value for key, value in summary.items()})
        self._run.summary["status"] = status
        self._run.finish(exit_code=_EXIT_CODE[status])

    def state(self) -> dict[str, Any]:
        """Return the id of the run, once an offline file has had the time to be written."""
        time.sleep(2 * _FLUSH_S)
        return {"id": self._run.id}


def _mode_here() -> Any:
    """Return the mode that the environment asks for: offline unless it has a key."""
    return os.environ.get("WANDB_MODE") or (
        "online" if os.environ.get("WANDB_API_KEY") else "offline"
    )
