#!/bin/sh
# DeepSpeed 0.19.8 with torch 2.13.0 on CPUs, seen on 2026-11-29. Needs libaio-dev, g++ and ninja, and
# some minutes to compile.
#
# One expects: the same losses with `torch.utils.checkpoint` around blocks as without it, whatever
# `use_reentrant` is.
# What happens: one process under ZeRO 3 with parameters on NVMe trains something else with
# `use_reentrant=False`. A gathered weight is a view of the buffer that its file was read into. The
# forward that runs again saves that view for its backward, and by then the buffer has another weight.
# Nothing is logged. Several processes gather copies, and train right.
# What to do: `use_reentrant=True`, or copy a weight out of the buffer after it was read.
#
# Exits 0 while DeepSpeed behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 deepspeed==0.19.8 numpy setuptools ninja
cat > "$folder/checkpointed.py" <<'PY'
import os
import sys

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29738", "LOCAL_SIZE": "1"}
import deepspeed
import torch
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(512, 1024)
        self.between = torch.nn.Linear(1024, 1024)
        self.down = torch.nn.Linear(1024, 512)

    def forward(self, inputs):
        return inputs + self.down(torch.relu(self.between(torch.relu(self.up(inputs)))))


class Net(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.first = torch.nn.Linear(512, 512)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))
        self.options = options

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            options = self.options
            hidden = block(hidden) if options is None else checkpoint(block, hidden, **options)
        return hidden.square().mean()


place = {"device": "nvme", "nvme_path": sys.argv[1]}
zero = {
    "stage": 3,
    "offload_optimizer": place,
    "offload_param": {**place, "max_in_cpu": 0, "buffer_count": 4, "buffer_size": 1_048_576},
    "sub_group_size": 1_000_000,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": zero,
}
losses = {}
deepspeed.init_distributed("gloo")
for options in (None, {"use_reentrant": True}, {"use_reentrant": False}):
    torch.manual_seed(0)
    inputs = torch.randn(4, 512)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Net(options)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    losses[str(options)] = seen = []
    for _ in range(3):
        loss = engine(inputs)
        engine.backward(loss)
        engine.step()
        seen.append(float(loss))
    print(f"loss, {options}:", *(f"{x:.5f}" for x in seen), flush=True)
plain, reentrant, other = losses.values()
same = max(abs(a - b) for a, b in zip(plain, reentrant))
raise SystemExit(0 if same < 1e-5 and abs(plain[-1] - other[-1]) > 1e-3 else 1)
PY
status=0
mkdir "$folder/state"
PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/python" -W ignore "$folder/checkpointed.py" \
    "$folder/state" >"$folder/said" 2>&1 || status=$?
grep -E "^loss" "$folder/said" || cat "$folder/said"
exit "$status"
