#!/bin/sh
# DeepSpeed 0.19.8 with torch 2.13.0 on CPUs, seen on 2026-11-29.
#
# One expects: a step to change no parameter that got no gradient in it (a layer behind a branch, an
# adapter whose turn it is not), as torch, and as DeepSpeed at stages 0, 1 and 2.
# What happens: at stage 3 such a parameter is updated by the gradient of the last step that had one,
# again and again, whether or not the optimizer is offloaded. Nothing is logged; losses drift.
# What to do: give every parameter a gradient in every step, as by adding `0 * parameter.sum()` to the
# loss, or use stage 2.
#
# Exits 0 while DeepSpeed behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 numpy setuptools
cat > "$folder/branch.py" <<'PY'
import os

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29736", "LOCAL_SIZE": "1"}
import deepspeed
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.always = torch.nn.Linear(8, 8)
        self.rarely = torch.nn.Linear(8, 8)

    def forward(self, inputs, is_turn):
        hidden = self.always(inputs)
        return (self.rarely(hidden) if is_turn else hidden).square().mean()


changes = {}
for stage in (0, 1, 2, 3):
    torch.manual_seed(0)
    model, inputs = Net(), torch.randn(4, 8)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    weight, values = model.rarely.weight, []
    for is_turn in (True, False, False):
        engine.backward(engine(inputs, is_turn))
        engine.step()
        with deepspeed.zero.GatheredParameters([weight], enabled=stage == 3):
            values.append(weight.detach().clone())
    changes[stage] = [float((b - a).norm()) for a, b in zip(values, values[1:])]
    print(f"stage {stage}: changed by", *(f"{x:.4f}" for x in changes[stage]), flush=True)
rest = max(*changes[0], *changes[1], *changes[2])
raise SystemExit(0 if rest == 0 and min(changes[3]) > 0.01 else 1)
PY
status=0
"$folder/venv/bin/python" -W ignore "$folder/branch.py" >"$folder/said" 2>&1 || status=$?
grep -E "^stage" "$folder/said" || cat "$folder/said"
exit "$status"
