#!/bin/sh
# torch 2.13.0, seen on 2026-11-27.
#
# One expects: torch.export to keep a region of `torch.inference_mode()` as it keeps one of
# `torch.no_grad()`, so that nothing inside has a gradient.
# What happens: `no_grad` becomes a region of the exported graph (`wrap_with_set_grad_enabled`), and
# `inference_mode` leaves no trace: its operations stand in the graph like any others, and the exported
# module sends gradients through a teacher that the eager module computes without any. Nothing is said.
# What to do: while a model is exported, have `torch.inference_mode` set the gradient mode instead, or
# write `torch.no_grad()` in code that is to be exported for training.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn


class Distilled(nn.Module):
    def __init__(self, region):
        super().__init__()
        self.layer, self.region = nn.Linear(3, 3), region

    def forward(self, x):
        with self.region():
            target = self.layer(x.flip(1))
        return ((self.layer(x) - target.clone()) ** 2).mean()


def gradient(module, x):
    module.zero_grad()
    module(x).backward()
    return next(module.parameters()).grad.clone()


x, off = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), {}
for region in (torch.no_grad, torch.inference_mode):
    torch.manual_seed(0)
    eager = Distilled(region)
    exported = torch.export.export(eager, (x,)).module()
    exported.load_state_dict(eager.state_dict())
    regions = sum("set_grad" in str(node.target) for node in exported.graph.nodes)
    expected = gradient(eager, x)
    off[region.__name__] = float((gradient(exported, x) - expected).norm() / expected.norm())
    print(f"{region.__name__}: {regions} region(s) in the graph, gradient off by {off[region.__name__]:.1%}")
raise SystemExit(0 if off["no_grad"] < 1e-6 and off["inference_mode"] > 1e-2 else 1)
PY
