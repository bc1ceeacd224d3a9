#!/bin/sh
# timm 1.0.31 (torch 2.13.0), seen on 2026-11-28.
#
# One expects: LARS as in the paper's Algorithm 1, where the learning rate is within the momentum
# (v = m v + rate ratio g, w = w - v). What a step left in v is not changed by a later rate.
# What happens: `timm.optim.Lars` keeps the momentum without the rate, as torch's SGD, and multiplies by
# the rate of the moment. After a warm-up the first small steps count as large ones, and where a rate
# falls what is left of the large steps falls with it: at a rate of 0 nothing moves.
# What to do: with a schedule of the paper, use a LARS that has its momentum (optimizer=lars here); expect
# other results of one schedule in the two.
#
# Exits 0 while timm behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/pip" install -q --no-deps timm==1.0.31  # its models alone need torchvision
"$folder/venv/bin/python" -W ignore - <<'PY'
import importlib
import sys
import sysconfig
import types

import torch

package = types.ModuleType("timm_optim")
package.__path__ = [f"{sysconfig.get_path('purelib')}/timm/optim"]
sys.modules["timm_optim"] = package
module = importlib.import_module("timm_optim.lars")
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = module.Lars([parameter], lr=1.0, momentum=0.5, trust_coeff=0.1, always_adapt=True)
moves = []
for rate in (1.0, 0.0):
    optimizer.param_groups[0]["lr"] = rate
    before = float(parameter.detach())
    parameter.grad = torch.ones(1)
    optimizer.step()
    moves.append(before - float(parameter.detach()))
print(f"moved by {moves[0]:.3f} at rate 1, and by {moves[1]:.3f} at rate 0; the paper: 0.100 and 0.050")
raise SystemExit(0 if abs(moves[0] - 0.1) < 1e-4 and moves[1] == 0.0 else 1)
PY
