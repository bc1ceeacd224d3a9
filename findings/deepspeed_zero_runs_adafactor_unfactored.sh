#!/bin/sh
# DeepSpeed 0.19.8 with torch 2.13.0, seen on 2026-11-28.
#
# One expects: an optimizer that is handed to `deepspeed.initialize` to be the optimizer that trains,
# or to be refused. `zero_allow_untested_optimizer` sounds as if nobody had run it yet.
# What happens: ZeRO hands the optimizer flat partitions instead of matrices, from stage 1 on and with
# one process too. `torch.optim.Adafactor` then keeps a value for every element (`variance`) where it
# would keep a row and a column, and its updates are others. A warning calls it untested, no more. It
# is so of every optimizer that looks at a whole parameter (LARS, LAMB, Shampoo).
# What to do: use such optimizers without ZeRO, or look at the state after a step.
#
# Exits 0 while DeepSpeed behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 numpy setuptools
cat > "$folder/both.py" <<'PY'
import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
import deepspeed
import torch


def trained(stage):
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 4, bias=False)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.Adafactor(layer.parameters(), lr=0.1)
    inputs = torch.randn(16, 8)
    if not stage:
        layer(inputs).square().sum().backward()
        optimizer.step()
        return layer.weight.detach() - before, optimizer.state
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=layer, optimizer=optimizer, config=config)
    engine.backward(engine(inputs).square().sum())
    engine.step()
    return layer.weight.detach() - before, engine.optimizer.optimizer.state


names = []
updates = []
for stage in (0, 1):
    update, state = trained(stage)
    updates.append(update)
    names.append(sorted(name for kept in state.values() for name in kept))
    print(f"zero {stage}: keeps {', '.join(names[-1])}", flush=True)
apart = float((updates[0] - updates[1]).norm() / updates[0].norm())
print(f"the updates differ by {apart:.2f} of the update")
unfactored = "row_var" in names[0] and "variance" in names[1]
raise SystemExit(0 if unfactored and apart > 0.01 else 1)
PY
status=0
"$folder/venv/bin/python" -W ignore "$folder/both.py" >"$folder/said" 2>&1 || status=$?
grep -E "^(zero|the updates)" "$folder/said" || cat "$folder/said"
exit "$status"
