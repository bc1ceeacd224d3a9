#!/bin/sh
# torch 2.13.0, seen on 2026-11-29.
#
# One expects: a TorchFunctionMode that is active around a forward and a backward to see every operation,
# those of forwards included that torch.utils.checkpoint computes again within the backward.
# What happens: a backward is itself a call that the mode handles, and while it does, torch has the mode
# switched off. Of a checkpointed dropout the mode sees the first run alone. A mode that changes
# operations then makes a second forward that differs from the first.
# What to do: in the mode, on Tensor.backward and torch.autograd.backward, enter the mode again and call
# the engine (torch.autograd.Variable._execution_engine.run_backward), which asks no mode.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

runs = []


def block(x):
    runs.append(1)
    return torch.nn.functional.dropout(x, 0.5).sin()


class Watch(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        Watch.seen += getattr(func, "__name__", "") == "dropout"
        return func(*args, **(kwargs or {}))


x = torch.randn(4, requires_grad=True)
with Watch():
    checkpoint(block, x, use_reentrant=False).sum().backward()
print(f"the block ran {len(runs)} times, and the mode saw {Watch.seen} of its dropouts")
raise SystemExit(0 if (len(runs), Watch.seen) == (2, 1) else 1)
PY
