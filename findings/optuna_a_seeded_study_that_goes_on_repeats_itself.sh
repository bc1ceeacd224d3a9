#!/bin/sh
# optuna 5.0.0 with SQLAlchemy 2.1.9, seen on 2026-11-28.
#
# One expects: a study that is kept in a database and goes on, with the sampler and seed it was begun with,
# to try values that it has not tried.
# What happens: the sampler begins its seed anew in every process, so that random values (all of
# RandomSampler's, the first ten of TPESampler's) are those of the first process again, to the last digit.
# What to do: derive the seed of a process from the seed and the number of trials that are there already.
#
# Exits 0 while optuna behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q optuna==5.0.0 SQLAlchemy==2.1.9
cd "$folder"
for process in 1 2; do
    "$folder/venv/bin/python" -W ignore - >>drawn <<'PY'
import optuna

optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(
    study_name="kept",
    storage="sqlite:///study.db",
    sampler=optuna.samplers.TPESampler(seed=1),
    load_if_exists=True,
)
for _ in range(3):
    trial = study.ask({"x": optuna.distributions.FloatDistribution(0.0, 1.0)})
    print(trial.params["x"])
    study.tell(trial, trial.params["x"])
PY
done
cat drawn
[ "$(sort drawn | uniq -d | wc -l)" = 3 ]
