#!/bin/sh
# optuna 5.0.0, seen on 2026-11-28.
#
# One expects: a study with a GridSampler to take the value of every point by `tell`, as with any sampler.
# What happens: the `tell` of the last point raises RuntimeError, "`Study.stop` is supposed to be invoked
# inside an objective function or a callback": the sampler ends a `Study.optimize` that there is not. The
# value has been recorded all the same.
# What to do: after that error, look whether the trial is finished.
#
# Exits 0 while optuna behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q optuna==5.0.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(sampler=optuna.samplers.GridSampler({"x": [1, 2]}))
raised = []
for number in range(2):
    trial = study.ask({"x": optuna.distributions.IntDistribution(1, 2)})
    try:
        study.tell(trial, 1.0)
    except RuntimeError as error:
        print(f"the tell of point {number + 1} of 2: {error}")
        raised.append(number)
states = [trial.state.name for trial in study.trials]
print(f"recorded: {states}")
raise SystemExit(0 if raised == [1] and states == ["COMPLETE"] * 2 else 1)
PY
