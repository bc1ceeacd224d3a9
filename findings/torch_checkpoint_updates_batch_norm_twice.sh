#!/bin/sh
# torch 2.13.0, seen on 2026-11-29.
#
# One expects: a part of a model that torch.utils.checkpoint runs again in the backward
# (use_reentrant=False, which restores the random state) to be left as by an ordinary step; and a
# buffer that was written into to have a higher `_version`, as any tensor after an in-place operation.
# What happens: the second forward updates the running statistics of a BatchNorm once more, with the
# same batch. Gradients are equal and evaluations are not: num_batches_tracked counts double. And the
# version of running_mean stays what it was, after one update and after two.
# What to do: give the module copies of its buffers while it runs again, as in the second context of
# `context_fn`, and find out which buffers change by their values, not by their versions.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def step(again):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    x, norm = torch.randn(16, 4), block[1]
    version = norm.running_mean._version
    y = checkpoint(block, x, use_reentrant=False) if again else block(x)
    y[:, 0].square().sum().backward()
    return norm, block[0].weight.grad, norm.running_mean._version - version


(one, gradient, written), (two, same, written_again) = step(False), step(True)
print("gradients are equal:", torch.equal(gradient, same))
print("running_mean after a step:             ", one.running_mean.tolist())
print("running_mean after a checkpointed step:", two.running_mean.tolist())
print("batches counted:", int(one.num_batches_tracked), int(two.num_batches_tracked))
print("new versions of running_mean:", written, written_again)
# 0.1 of the mean, and then 0.9 of that and 0.1 of the mean
twice = torch.allclose(two.running_mean, 1.9 * one.running_mean)
counted = (int(one.num_batches_tracked), int(two.num_batches_tracked)) == (1, 2)
seen = torch.equal(gradient, same) and twice and counted
raise SystemExit(0 if seen and not written and not written_again else 1)
PY
