#!/bin/sh
# torch 2.13.0, seen on 2026-11-29.
#
# One expects: a block under torch.utils.checkpoint to leave its input alone behind, under autocast too.
# What happens: autocast keeps the 16-bit copy that it makes of each fp32 weight until the autocast context
# ends. At the end of a forward of eight checkpointed layers all eight copies are there, half as large
# as the model.
# What to do: switch the cache off inside the checkpointed function, by torch.set_autocast_cache_enabled(False).
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

copies = []


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.shape == (64, 64):
            copies.append(weakref.ref(result.untyped_storage()))
        return result


def alive(keeps):
    copies.clear()
    layers = [torch.nn.Linear(64, 64, bias=False) for _ in range(8)]

    def run(layer, x):
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(keeps)
        try:
            return layer(x)
        finally:
            torch.set_autocast_cache_enabled(before)

    with Watch(), torch.autocast("cpu", torch.bfloat16):
        x = torch.rand(4, 64, requires_grad=True)
        for layer in layers:
            x = checkpoint(run, layer, x, use_reentrant=False)
        return sum(copy() is not None for copy in copies)


kept, without = alive(True), alive(False)
print(f"copies alive after the forward: {kept} with the cache, {without} without")
raise SystemExit(0 if (kept, without) == (8, 0) else 1)
PY
