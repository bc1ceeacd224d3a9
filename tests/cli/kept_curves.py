"""Reads back what trackers keep of a run: the numbers of every step, by name.

Each store is read by its own library, or, where there is none that reads it, by its file format.
"""

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

Curves = dict[int, dict[str, float]]


def of_metrics(run_dir: Path) -> Curves:
    """The numbers of `metrics.jsonl`, which all others are compared with."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    steps = [row.pop("step") for row in rows]
    assert steps == list(range(1, len(rows) + 1))
    return {step: {k: v for k, v in row.items() if isinstance(v, int | float)}
            for step, row in zip(steps, rows, strict=True)}  # fmt: skip


def of_tensorboard(folder: Path) -> Curves:
    """What TensorBoard shows, in single precision."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    curves: Curves = {}
    for tag in events.Tags()["scalars"]:
        shown = events.Scalars(tag)
        assert len({event.step for event in shown}) == len(shown), "a step is there twice"
        for event in shown:
            curves.setdefault(event.step, {})[tag.removeprefix("train/")] = event.value
    return curves


def of_mlflow(uri: str, experiment: str) -> tuple[Curves, str, dict[str, str]]:
    """The history of the one run of an experiment, its status and its parameters."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    there = client.get_experiment_by_name(experiment)
    assert there is not None
    (run,) = client.search_runs([there.experiment_id])
    curves: Curves = {}
    for name in run.data.metrics:
        for row in client.get_metric_history(run.info.run_id, name):
            assert name not in curves.get(row.step, {}), "a step is there twice"
            curves.setdefault(row.step, {})[name] = row.value
    paths = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert {"plan.json", "request.json", "environment.json", ".hydra"} <= paths
    return curves, run.info.status, run.data.params


def of_wandb(run_dir: Path) -> tuple[Curves, list[int]]:
    """The history of a run's offline segments as W&B puts them together, and their exit codes.

    A segment with a branch point begins after its step, and the rows after that are dropped.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    curves: Curves = {}
    ids, codes = set(), []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        last = 0
        for content in _records(path.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                if record.run.HasField("branch_point"):
                    point = record.run.branch_point
                    assert (point.run, point.metric) == (record.run.run_id, "_step")
                    curves = {step: row for step, row in curves.items() if step <= point.value}
                    last = int(point.value)
            elif record.HasField("history"):
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                step = items["_step"]
                assert step > last, "W&B drops a row whose step is not above the one before"
                last = step
                curves[step] = {k: v for k, v in items.items() if not k.startswith("_")}
            elif record.HasField("exit"):
                codes.append(record.exit.exit_code)
    assert len(ids) == 1
    return curves, codes


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a file of W&B: a header of seven bytes, then LevelDB's log format."""
    assert content[:4] == b":W&B"
    block, head, place, record = 32768, 7, 7, b""
    while place + head <= len(content):
        left = block - place % block
        if left < head:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        place += head
        record = (b"" if kind in (1, 2) else record) + content[place : place + length]
        place += length
        if kind in (1, 4):  # whole, or the last part
            yield record


def of_trackio(folder: Path, project: str) -> tuple[Curves, list[str]]:
    """The rows of a project with one run, and the titles of its alerts."""
    curves: Curves = {}
    with sqlite3.connect(folder / f"{project}.db") as store:
        rows = store.execute("SELECT run_id, step, metrics FROM metrics").fetchall()
        assert len({run_id for run_id, _, _ in rows}) == 1
        for _, step, numbers in rows:
            assert step not in curves, "a step is there twice"
            curves[step] = json.loads(numbers)
        alerts = [title for (title,) in store.execute("SELECT title FROM alerts ORDER BY id")]
    return curves, alerts
