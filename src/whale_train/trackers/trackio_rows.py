"""Keep a run's curves with Trackio: in its local store, unless Trackio's own variables name a
remote one.

Trackio keeps every row that was logged, and has no call that removes rows of a run. In the local
store, one SQLite file a project, replaced rows are deleted with SQL. On a Space or a server they
stay, and the user is told.
"""

import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import uuid4

import trackio
from trackio.sqlite_storage import SQLiteStorage

from whale_train.trackers.options import TrackioOptions
from whale_train.trackers.tracker import RunDescription, Status

_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
_FLUSH_S = 10.0  # Trackio's own thread writes twice a second
_PAUSE_S = 0.05


class TrackioTracker:
    """Tracker that writes a run's rows to Trackio, as `options` say."""

    def __init__(self, options: TrackioOptions) -> None:
        self._options = options
        self._is_local = not any(os.environ.get(name) for name in _REMOTE)
        self._last: int | None = None  # step of the last row

    def open(self, run: RunDescription, state: dict[str, Any] | None) -> None:
        """Begin a run, or continue the run of `state` after deleting its rows after `run.step`."""
        if state is not None and self._is_local and not self._exists(state):
            where = f"run {state['name']} of project {state['project']} is not in the local store"
            run.note(f"trackio: {where}; a new curve is begun")
            state = None
        if state is not None:
            project, name = state["project"], state["name"]
            if self._is_local:
                self._delete_after(state, run.step)
            else:
                said = f"rows after step {run.step} that are there already stay beside the new ones"
                run.note(f"trackio: {said}: Trackio deletes none on a Space or server")
        else:
            project, name = self._options.project, self._options.run_name or run.name
            if name in self._names(project):  # Trackio would continue the run of that name
                name = f"{name}-{uuid4().hex[:6]}"
        self._run = trackio.init(
            project=project,
            name=name,
            config=dict(run.parameters),
            resume="never" if state is None else "must",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._place = {"project": project, "name": name, "id": self._run.id}
        for path in run.files:
            self._run.log_artifact(path, name=str(path.relative_to(run.folder)).replace("/", "-"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step as a row."""
        self._run.log(dict(values), step=step)
        self._last = step

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Write the status and the summary as an alert, which Trackio shows beside the run, and
        finish the run."""
        level = trackio.AlertLevel.ERROR if status == "failed" else trackio.AlertLevel.INFO
        text = ", ".join(f"{key}: {value}" for key, value in summary.items())
        self._run.alert(title=f"run {status}", text=text or None, level=level, step=self._last)
        self._run.finish()

    def state(self) -> dict[str, Any]:
        """Return the project, name and id of the run, once its rows are in the local store.

        Raises TimeoutError where the rows are not stored after 10 s.
        """
        deadline = time.monotonic() + _FLUSH_S
        while self._is_local and self._last is not None and self._written() < self._last:
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {self._last} was not written within {_FLUSH_S:g} s")
            time.sleep(_PAUSE_S)
        return self._place

    def _written(self) -> int:
        """Return the largest step in the local store, or -1 where it has no row of the run."""
        place = self._place
        step = SQLiteStorage.get_max_step_for_run(
            place["project"], place["name"], run_id=place["id"]
        )
        return -1 if step is None else int(step)

    def _names(self, project: str) -> list[str]:
        return list(SQLiteStorage.get_runs(project)) if self._is_local else []

    def _exists(self, state: Mapping[str, Any]) -> bool:
        return _store(state["project"]).is_file() and state["name"] in self._names(state["project"])

    def _delete_after(self, state: Mapping[str, Any], step: int) -> None:
        """Delete the rows of a run after `step` in the local store."""
        with closing(sqlite3.connect(_store(state["project"]), timeout=30.0)) as store, store:
            condition = "run_id = ? AND step > ?"
            store.execute(f"DELETE FROM metrics WHERE {condition}", (state["id"], step))


def _store(project: str) -> Path:
    """Return the file of a project in the local store."""
    return Path(SQLiteStorage.get_project_db_path(project))
