#!/bin/sh
# trackio 0.43.0, seen on 2026-11-28.
#
# One expects: `trackio.init(name=..., resume="must")`, which follows wandb's, to go on with one's run,
# and a step that is logged again to take the place of the one before.
# What happens: a run is gone on with by its name, and the last run of that name is taken. A second run
# of the same name, which `resume="never"` begins without a word, is the one that the first then
# writes into. Steps that are logged again are there twice.
# What to do: give every run a name of its own, and delete the rows after the checkpoint from the
# project's SQLite file before going on.
#
# Exits 0 while Trackio behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q trackio==0.43.0
cd "$folder"
HOME="$folder" TRACKIO_DIR="$folder/store" HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'PY'
import contextlib
import io
import sqlite3

import trackio


def part(resume: str, rows: dict[int, float]) -> str:
    run = trackio.init(
        project="p", name="same", resume=resume, embed=False, auto_log_cpu=False, auto_log_gpu=False
    )
    for step, loss in rows.items():
        run.log({"loss": loss}, step=step)
    run.finish()
    return run.id


said = contextlib.redirect_stdout(io.StringIO())
with said:
    first = part("never", {1: 9.0, 2: 8.0})
    second = part("never", {1: 1.0, 2: 0.9, 3: 0.8})
    resumed = part("must", {2: 7.0})  # meant for the first, which goes back to step 1
with sqlite3.connect("store/p.db") as store:
    steps = [row[0] for row in store.execute("SELECT step FROM metrics WHERE run_id = ?", (second,))]
print(f"two runs of one name: {first != second}; the second is gone on with: {resumed == second}")
print(f"its steps: {sorted(steps)}")
raise SystemExit(0 if first != second == resumed and sorted(steps) == [1, 2, 2, 3] else 1)
PY
