#!/bin/sh
# torch 2.13.0, seen on 2026-11-28.
#
# One expects: an update of an fp32 parameter to be computed in fp32, as all other optimizers of
# torch.optim compute theirs. Gradients that differ by one millionth then give updates that do.
# What happens: `torch.optim.Muon` makes the gradient orthogonal in bf16, whatever it is in. The same
# gradient with other roundings gives an update that differs by more than a thousandth: two runs that
# sum a gradient in another order (another number of GPUs, a resumed run elsewhere) part at once.
# What to do: compare runs of Muon with a tolerance of bf16, or keep an own copy with fp32 iterations.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch

torch.manual_seed(0)
gradient = torch.randn(32, 96)
rounded = gradient * (1 + 1e-6 * torch.randn(32, 96))
apart = {}
for kind in (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon):
    updates = []
    for given in (gradient, rounded):
        parameter = torch.nn.Parameter(torch.zeros(32, 96))
        optimizer = kind([parameter], lr=1.0, weight_decay=0.0)
        parameter.grad = given.clone()
        optimizer.step()
        updates.append(parameter.detach())
    apart[kind.__name__] = float((updates[0] - updates[1]).norm() / updates[0].norm())
    print(f"{kind.__name__}: updates in {updates[0].dtype} differ by {apart[kind.__name__]:.1e}")
raise SystemExit(0 if apart["Muon"] > 1e-3 > 1e-5 > max(apart["AdamW"], apart["Adafactor"]) else 1)
PY
