"""Keep a run's curves in TensorBoard's event files, under `tensorboard/` of the run directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from whale_train.trackers.tracker import RunDescription, Status

FOLDER = "tensorboard"


class TensorBoardTracker:
    """Tracker that writes event files.

    A resumed run writes another file beside the earlier ones. The new file begins with a purge of
    the steps that are replaced, which readers then leave out.
    """

    def open(self, run: RunDescription, state: dict[str, Any] | None) -> None:
        """Begin an event file, in the folder of `state` where that exists."""
        self._folder = run.folder / FOLDER
        if state is not None:
            if Path(state["folder"]).is_dir():
                self._folder = Path(state["folder"])
            else:
                run.note(f"tensorboard: {state['folder']} is not there; a new curve is begun")
        purged = run.step + 1 if self._folder.exists() else None
        self._writer = SummaryWriter(str(self._folder), purge_step=purged)
        self._step = run.step
        text = json.dumps(run.config, indent=1, default=str)
        self._writer.add_text("config", _block(text), run.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step as scalars `train/NAME`."""
        self._step = step
        for name, value in values.items():
            self._writer.add_scalar(f"train/{name}", value, step)

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Write the status and the summary as texts, and close the file."""
        self._writer.add_text("status", status, self._step)
        if summary:
            self._writer.add_text("summary", _block(json.dumps(summary, indent=1)), self._step)
        self._writer.close()

    def state(self) -> dict[str, Any]:
        """Return the folder of the event files, after flushing all events to disk."""
        self._writer.flush()
        return {"folder": str(self._folder)}


def _block(text: str) -> str:
    """Return text as a Markdown code block, which TensorBoard shows unchanged."""
    return "\n".join(f"    {line}" for line in text.splitlines())
