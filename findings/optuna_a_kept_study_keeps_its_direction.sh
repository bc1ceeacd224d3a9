#!/bin/sh
# optuna 5.0.0 with SQLAlchemy 2.1.9, seen on 2026-11-28.
#
# One expects: `create_study(direction="maximize", load_if_exists=True)` of a study that was begun with
# "minimize" to be refused, or to maximise.
# What happens: nothing is said, and the study goes on minimising: `best_trial` is the worst one.
# What to do: compare `study.directions` with those asked for.
#
# Exits 0 while optuna behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q optuna==5.0.0 SQLAlchemy==2.1.9
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import warnings

import optuna

optuna.logging.set_verbosity(optuna.logging.WARNING)
with warnings.catch_warnings(record=True) as said:
    for direction in ("minimize", "maximize"):
        study = optuna.create_study(
            study_name="kept",
            storage="sqlite:///study.db",
            direction=direction,
            load_if_exists=True,
        )
        trial = study.ask({"x": optuna.distributions.FloatDistribution(0.0, 1.0)})
        study.tell(trial, trial.params["x"])
values = [trial.value for trial in study.trials]
print(f"asked to maximize {values}: direction {study.direction.name}, best {study.best_value}")
print(f"warnings: {[str(warning.message) for warning in said]}")
raise SystemExit(0 if study.best_value == min(values) and not said else 1)
PY
