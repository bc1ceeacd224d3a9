#!/bin/sh
# torchmetrics 1.9.0 with torch 2.13.0, seen on 2026-11-28.
#
# One expects: a metric that one rank alone updates and computes to be a matter of that rank.
# What happens: `compute()` adds up the states of all ranks wherever a process group is initialised, without
# being asked. Where every rank has been given the same answers, counts are multiplied by the number of
# ranks, and ratios such as accuracy hide it. Where one rank alone computes, it waits for the others.
# What to do: set `metric.distributed_available_fn = lambda: False` before `compute()`, or pass
# `sync_on_compute=False`.
#
# Exits 0 while torchmetrics behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 torchmetrics==1.9.0
cat > "$folder/ranks.py" <<'PY'
import sys

import torch
from torch import distributed as dist
from torch import multiprocessing
from torchmetrics.classification import BinaryAccuracy, BinaryStatScores


def rank(number, store):
    dist.init_process_group("gloo", f"file://{store}", rank=number, world_size=2)
    answers = torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1, 0, 1])
    values = []
    for made in (
        BinaryAccuracy(),
        BinaryStatScores(),
        BinaryStatScores(distributed_available_fn=lambda: False),
    ):
        made.update(*answers)
        values.append(made.compute().tolist())
    dist.destroy_process_group()
    if number == 0:
        accuracy, counts, alone = values
        print(f"of 4 answers that both ranks have: accuracy {accuracy}, {counts[-1]} positive targets")
        print(f"with distributed_available_fn: {alone[-1]} positive targets")
        sys.exit(0 if (accuracy, counts[-1], alone[-1]) == (0.75, 4, 2) else 1)


if __name__ == "__main__":
    multiprocessing.spawn(rank, (sys.argv[1],), nprocs=2)
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/ranks.py" "$folder/store"
