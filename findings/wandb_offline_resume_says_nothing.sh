#!/bin/sh
# wandb 0.31.0, seen on 2026-11-28.
#
# One expects: `wandb.init(id=..., resume="must")` offline to fail where there is no such run, or to
# write down that the run goes on, so that `wandb sync` puts the two parts together.
# What happens: any id is taken, and the file says the same as that of a new run. A run that goes back
# to step 4 logs steps 5 and 6 again, in a second file of the same id, and nothing tells `wandb sync`
# that those of the first file are to go.
# What to do: `resume_from="ID?_step=4"`, which is written down offline too, as a branch point.
#
# Exits 0 while wandb behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q wandb==0.31.0
cd "$folder"
HOME="$folder" venv/bin/python - <<'PY'
from pathlib import Path

import wandb


def written(folder: str, **how: str) -> bool:
    """Whether the file of a run without a row has the name of a step in it."""
    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(project="p", dir=folder, mode="offline", settings=settings, **how)
    run.finish()
    (path,) = Path(folder).glob("wandb/offline-run-*/run-*.wandb")
    return b"_step" in path.read_bytes()


for folder in ("must", "from"):
    Path(folder).mkdir()
must = written("must", id="nosuchrun", resume="must")
branch = written("from", resume_from="nosuchrun?_step=4")
print(f"resume='must' of no run: accepted, a step written down: {must}; resume_from: {branch}")
raise SystemExit(0 if branch and not must else 1)
PY
