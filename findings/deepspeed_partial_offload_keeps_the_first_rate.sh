#!/bin/sh
# DeepSpeed 0.19.8 with torch 2.13.0 on CPUs, seen on 2026-11-29. Needs a C++ compiler.
#
# One expects: `offload_optimizer.ratio` to say which part of an optimizer is on the host, and the same
# optimizer to update both parts.
# What happens: the part on the device is updated by another optimizer, which is always
# `torch.optim.AdamW`. It copies the first parameter group's learning rate when it is made, so that a
# schedule, and warm-up from 0, never reach that group's part on the device. With Adam
# (`adam_w_mode: false`) its weight decay is AdamW's.
# What to do: leave `ratio` at 1, or set the groups of `engine.optimizer.backup_optimizer` in every step.
#
# Exits 0 while DeepSpeed behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 numpy setuptools ninja
cat > "$folder/rates.py" <<'PY'
import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29735", "LOCAL_SIZE": "1"}
import deepspeed
import torch

layer = torch.nn.Linear(64, 64)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 10},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
    },
}
engine, optimizer, _, _ = deepspeed.initialize(
    model=layer, model_parameters=layer.parameters(), config=config
)
rates = []
for _ in range(5):
    engine.backward(engine(torch.randn(4, 64)).square().mean())
    engine.step()
    both = (optimizer.optimizer, optimizer.backup_optimizer)
    rates.append(tuple(x.param_groups[0]["lr"] for x in both))
of_host, of_device = zip(*rates)
adam_w = optimizer.optimizer.adam_w_mode, type(optimizer.backup_optimizer).__name__
print("rates on the host:  ", *(f"{x:.2e}" for x in of_host), flush=True)
print("rates on the device:", *(f"{x:.2e}" for x in of_device), flush=True)
print(f"the host's adam_w_mode is {adam_w[0]}, the device's optimizer is {adam_w[1]}", flush=True)
apart = len(set(of_host)) > 1 and len(set(of_device)) == 1
raise SystemExit(0 if apart and adam_w == (False, "AdamW") else 1)
PY
status=0
"$folder/venv/bin/python" -W ignore "$folder/rates.py" >"$folder/said" 2>&1 || status=$?
grep -E "^(rates|the host)" "$folder/said" || cat "$folder/said"
exit "$status"
