"""Keep a run's curves with MLflow: on a tracking server, or in a store in the run directory.

MLflow keeps every value that was logged for a step, and has no call to remove one. A run without
rows to replace continues under its id. A run with such rows is replaced: a new run begins with the
rows that stay, and the old one is deleted, in MLflow's way: it can be restored.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from whale_train.errors import shortened
from whale_train.trackers.options import MlflowOptions, has_password
from whale_train.trackers.tracker import RunDescription, Status

STORE, ARTIFACTS = "mlflow.db", "mlartifacts"  # in the run directory
_EVERY_STEP = "samples"  # a number that every row has
_CONTINUES, _CONTINUED = "whale_train.continues", "whale_train.continued_by"
_STATUS: Mapping[Status, str] = {
    "finished": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
}
# Limits of a request to a tracking server.
_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _PARAM_CHARACTERS = 1000, 100, 6000
_PAUSE_S = 1.0  # between requests with rows


class MlflowTracker:
    """Tracker that writes a run's rows to MLflow, as `options` say."""

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options
        self._waiting: list[Metric] = []
        self._sent_s = time.monotonic()

    def open(self, run: RunDescription, state: dict[str, Any] | None) -> None:
        """Begin a run, or continue the run of `state`."""
        asked = self._options.uri or os.environ.get("MLFLOW_TRACKING_URI")
        saved_uri = None if state is None else state["uri"]
        self._uri = asked or (saved_uri if _is_there(saved_uri) else None) or _own_store(run.folder)
        self._client = MlflowClient(self._uri)
        before = None if state is None else self._found(state["run_id"])
        if state is not None and before is None:
            where = f"run {state['run_id']} is not in {_shown(self._uri)}"
            run.note(f"mlflow: {where}; a new curve is begun")
        if before is None:
            self._id = self._created(run)
        elif self._last_step(before) <= run.step:
            self._id = before.info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._succeeded(before, run)
        self._describe(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step. Requests are sent at most once a second."""
        now_ms = int(time.time() * 1000)
        self._waiting += [Metric(name, value, now_ms, step) for name, value in values.items()]
        if time.monotonic() - self._sent_s >= _PAUSE_S or len(self._waiting) >= _METRICS_AT_ONCE:
            self._send()

    def close(self, status: Status, summary: Mapping[str, Any]) -> None:
        """Send the queued rows, log the summary as an artifact, and end the run."""
        self._send()
        if summary:
            self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_terminated(self._id, _STATUS[status])

    def state(self) -> dict[str, Any]:
        """Return the id of the run, and the URI of its store unless the URI has a password."""
        self._send()
        return {"run_id": self._id, "uri": None if has_password(self._uri) else self._uri}

    def _send(self) -> None:
        rows, self._waiting = self._waiting, []
        self._sent_s = time.monotonic()
        self._send_all(self._id, rows)

    def _send_all(self, run_id: str, rows: Sequence[Metric]) -> None:
        for some in _parts(rows, _METRICS_AT_ONCE):
            self._client.log_batch(run_id, metrics=some)

    def _found(self, run_id: str) -> Run | None:
        """Return the run with an id, or the run that continues it; None where neither exists."""
        try:
            run = self._client.get_run(run_id)
        except MlflowException:
            return None
        if run.info.lifecycle_stage == "active":
            return run
        successor = run.data.tags.get(_CONTINUED)
        return None if successor is None else self._found(successor)

    def _last_step(self, run: Run) -> int:
        history = self._client.get_metric_history(run.info.run_id, _EVERY_STEP)
        return max((row.step for row in history), default=0)

    def _experiment(self, run: RunDescription) -> str:
        name = self._options.experiment
        existing = self._client.get_experiment_by_name(name)
        if existing is not None:
            return str(existing.experiment_id)
        is_own = self._uri == _own_store(run.folder)
        place = (run.folder / ARTIFACTS).as_uri() if is_own else None
        return str(self._client.create_experiment(name, artifact_location=place))

    def _created(self, run: RunDescription) -> str:
        name = self._options.run_name or run.name
        begun = self._client.create_run(self._experiment(run), run_name=name)
        return str(begun.info.run_id)

    def _succeeded(self, before: Run, run: RunDescription) -> str:
        """Return the id of a new run with the rows of `before` up to `run.step`, after deleting
        `before`."""
        begun = self._client.create_run(
            before.info.experiment_id,
            start_time=before.info.start_time,
            tags={_CONTINUES: before.info.run_id},
            run_name=before.info.run_name,
        )
        run_id = str(begun.info.run_id)
        for name in before.data.metrics:
            history = self._client.get_metric_history(before.info.run_id, name)
            self._send_all(run_id, [row for row in history if row.step <= run.step])
        self._send_params(run_id, before.data.params)
        self._client.set_tag(before.info.run_id, _CONTINUED, run_id)
        self._client.delete_run(before.info.run_id)
        return run_id

    def _describe(self, run: RunDescription) -> None:
        """Send the parameters and files of the part of the run that begins.

        MLflow's parameters cannot change. A parameter that differs from the run's beginning becomes
        a tag, which names the step.
        """
        known = self._client.get_run(self._id).data.params
        parameters = {
            key: shortened(text, _PARAM_CHARACTERS - 100) for key, text in run.parameters.items()
        }
        self._send_params(self._id, {key: x for key, x in parameters.items() if key not in known})
        for key, text in parameters.items():
            if known.get(key, text) != text:
                self._client.set_tag(self._id, f"{key} after step {run.step}", text)
        for path in run.files:
            folder = path.relative_to(run.folder).parent
            self._client.log_artifact(self._id, str(path), str(folder) if folder.name else None)

    def _send_params(self, run_id: str, values: Mapping[str, str]) -> None:
        params = [Param(key, text) for key, text in values.items()]
        for some in _parts(params, _PARAMS_AT_ONCE):
            self._client.log_batch(run_id, params=some)


def _parts(rows: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Yield the rows in order, `most` at a time."""
    return (rows[start : start + most] for start in range(0, len(rows), most))


def _own_store(folder: Path) -> str:
    return f"sqlite:///{folder / STORE}"


def _is_there(uri: str | None) -> bool:
    """Return whether the store that a checkpoint names exists. A server is taken to exist, and is
    asked later."""
    if uri is not None and uri.startswith("sqlite:///"):
        return Path(uri.removeprefix("sqlite:///")).is_file()
    return uri is not None


def _shown(uri: str) -> str:
    """Return a URI without user name and password."""
    scheme, _, rest = uri.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
