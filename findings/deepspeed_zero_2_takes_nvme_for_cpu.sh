#!/bin/sh
# DeepSpeed 0.19.8 with torch 2.13.0 on CPUs, seen on 2026-11-29.
#
# One expects: `offload_optimizer: {device: nvme, nvme_path: ...}` to keep the optimizer's state on the
# disk, or to be refused. The option's own description says: valid with stages 1, 2 and 3.
# What happens: at stages 1 and 2, every device but `none` means the host's memory. No file is made,
# nothing is logged, and `nvme_path` need not exist. A host that was sized for a disk runs out of memory.
# What to do: use stage 3 with `nvme`, or look into the folder after a step.
#
# Exits 0 while DeepSpeed behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 numpy setuptools
cat > "$folder/step.py" <<'PY'
import os
import sys
from pathlib import Path

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29733", "LOCAL_SIZE": "1"}
import deepspeed
import torch

made = []
for stage in (1, 2):
    disk = Path(sys.argv[1]) / f"disk_{stage}"
    layer = torch.nn.Linear(1024, 1024)  # 4 MB a tensor, of which stage 3 swaps those from 1 MB
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(disk)},
        },
    }
    engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=config)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 1024)).square().mean())
        engine.step()
    made += [disk.exists()]
    moments = engine.optimizer.optimizer.state.values()
    held = sum(x.nbytes for state in moments for x in state.values() if torch.is_tensor(x))
    print(f"stage {stage}: folder made: {disk.exists()}, moments in memory: {held} bytes", flush=True)
raise SystemExit(1 if any(made) else 0)
PY
status=0
"$folder/venv/bin/python" -W ignore "$folder/step.py" "$folder" >"$folder/said" 2>&1 || status=$?
grep -E "^stage" "$folder/said" || cat "$folder/said"
exit "$status"
