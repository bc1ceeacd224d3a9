#!/bin/sh
# wandb 0.31.0, seen on 2026-11-28.
#
# One expects: in `mode="offline"` a row that was logged is in the run's file a moment later, so that a
# run that is killed keeps its curve. The file is the only copy.
# What happens: rows are written when a buffer is full, when the run finishes, or every 15 s. A run that
# is killed five seconds after its last row leaves a file of seven bytes, which is the header alone: not
# even the run is in it. (W&B's own process sees that its parent has died, and ends without writing.)
# What to do: `wandb.Settings(x_transaction_log_flush_interval=0.2)`.
#
# Exits 0 while wandb behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q wandb==0.31.0
cat > "$folder/killed.py" <<'PY'
import os
import sys
import time

import wandb

settings = wandb.Settings(console="off", silent=True)
if len(sys.argv) > 1:
    settings.x_transaction_log_flush_interval = float(sys.argv[1])
run = wandb.init(project="p", dir=".", mode="offline", settings=settings)
for step in range(1, 101):
    run.log({"loss": 1 / step}, step=step, commit=True)
time.sleep(5.0)
os._exit(1)
PY
size() {
    mkdir "$folder/$1"
    (cd "$folder/$1" && HOME="$folder" ../venv/bin/python ../killed.py $2) || true
    sleep 2
    wc -c < "$(ls "$folder/$1"/wandb/offline-run-*/run-*.wandb)"
}
as_it_is=$(size as_it_is "")
flushed=$(size flushed 0.2)
echo "100 rows, killed 5 s after the last: a file of $as_it_is bytes, flushed every 0.2 s $flushed"
[ "$as_it_is" -eq 7 ] && [ "$flushed" -gt 1000 ]
