#!/bin/sh
# mlflow-skinny 3.17.2 with SQLAlchemy 2.1.9, seen on 2026-11-28.
#
# One expects: a run that goes back to its checkpoint of step 4 and logs steps 5 and 6 again, under its
# run_id, to show the values that were logged last.
# What happens: both values of a step stay, in one history, and no call of the client removes one. The
# run's own value of a metric is that of the largest step, whenever it was logged: after steps 5 and 6
# have been logged again as 0.5 and 0.4, a run that had reached step 9 before shows the value of 9.
# What to do: let a new run begin with the rows up to the checkpoint, and delete the one before.
#
# Exits 0 while MLflow behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mlflow-skinny==3.17.2 SQLAlchemy==2.1.9 alembic==1.20.1
cd "$folder"
MLFLOW_DISABLE_TELEMETRY=true venv/bin/python -W ignore - <<'PY' 2> /dev/null
from mlflow.tracking import MlflowClient

client = MlflowClient("sqlite:///runs.db")
run_id = client.create_run(client.create_experiment("e")).info.run_id
for step in range(1, 10):
    client.log_metric(run_id, "loss", 10.0 + step, step=step)
for step, loss in ((5, 0.5), (6, 0.4)):  # gone on from step 4
    client.log_metric(run_id, "loss", loss, step=step)
values = {step: [] for step in (5, 6)}
for row in client.get_metric_history(run_id, "loss"):
    values.setdefault(row.step, []).append(row.value)
shown = client.get_run(run_id).data.metrics["loss"]
removers = [name for name in dir(client) if "metric" in name and ("delete" in name or "remove" in name)]
print(f"step 5: {values[5]}, step 6: {values[6]}, the run's loss: {shown}, calls to remove: {removers}")
raise SystemExit(0 if values[5] == [15.0, 0.5] and shown == 19.0 and not removers else 1)
PY
