#!/bin/sh
# torch-optimizer 0.3.0 (torch 2.13.0), seen on 2026-11-28.
#
# One expects: `torch_optimizer.LARS` to scale each parameter's step to a fraction (trust_coefficient) of
# the parameter, whatever the size of the gradient, as the paper's Algorithm 1 does with any weight decay.
# What happens: a parameter without weight decay, which is the default, has no trust ratio. The optimizer
# is then plain SGD at a rate that is meant for LARS, hundreds of times too large. lightning-bolts 0.7.0
# has the same lines; timm 1.0.31 does so too unless `always_adapt=True`.
# What to do: give weights a decay, however small; or use optimizer=lars here, whose groups say what has
# a ratio (trust_ratio), apart from the decay.
#
# Exits 0 while torch-optimizer behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy torch-optimizer==0.3.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
import torch_optimizer

torch.manual_seed(0)
weight, gradient = torch.randn(8, 4), torch.randn(8, 4)
moved = {}
for decay in (0.0, 1e-12):
    for size in (1.0, 100.0):
        parameter = torch.nn.Parameter(weight.clone())
        optimizer = torch_optimizer.LARS([parameter], lr=1.0, weight_decay=decay)
        parameter.grad = gradient * size
        optimizer.step()
        moved[decay, size] = float((parameter.detach() - weight).norm() / weight.norm())
        print(f"weight_decay={decay:g}, gradient x {size:g}: moved by {moved[decay, size]:.3g} of itself")
is_sgd = abs(moved[0.0, 100.0] / moved[0.0, 1.0] - 100) < 0.1
is_lars = all(abs(moved[1e-12, size] - 0.01) < 1e-5 for size in (1.0, 100.0))
raise SystemExit(0 if is_sgd and is_lars else 1)
PY
