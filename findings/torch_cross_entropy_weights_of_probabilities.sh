#!/bin/sh
# torch 2.13.0, seen on 2026-11-28.
#
# One expects: `cross_entropy(logits, target, weight)` to be the same mean for class numbers and for
# the same targets written as one-hot probabilities (as MixUp, CutMix and distillation write them).
# What happens: both give the same sum, but the mean over class numbers divides by the sum of the
# targets' class weights, and that over probabilities by the number of rows. With weights that are
# not 1 in the mean, turning MixUp on multiplies the loss and all gradients by that mean weight, of
# this batch: another learning rate, step by step. So does a row that is all zeros: it counts.
# What to do: scale weights to a mean of 1 over the data, or take reduction="sum" and divide oneself.
# Who shares a batch among devices has to count weights for the one kind and rows for the other.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch.nn.functional import cross_entropy, one_hot

torch.manual_seed(0)
logits, weight = torch.randn(4, 3), torch.tensor([1.0, 2.0, 5.0])
numbers = torch.tensor([0, 1, 2, 1])
rows = one_hot(numbers, 3).float()
sums = [cross_entropy(logits, x, weight, reduction="sum") for x in (numbers, rows)]
means = [cross_entropy(logits, x, weight) for x in (numbers, rows)]
print("sums: class numbers %.4f, one-hot %.4f" % tuple(sums))
print("means: class numbers %.4f, one-hot %.4f" % tuple(means))
ratio, mean_weight = means[1] / means[0], weight[numbers].mean()
print(f"ratio of the means {ratio:.4f}, mean weight of the targets {mean_weight:.4f}")
left_out = rows.clone()
left_out[0] = 0  # no target at all
kept = cross_entropy(logits, left_out, weight) / cross_entropy(logits[1:], rows[1:], weight)
print(f"with a row of zeros in four, the mean is {kept:.4f} of that without the row")
same = torch.allclose(sums[0], sums[1]) and torch.allclose(ratio, mean_weight)
raise SystemExit(0 if same and abs(kept - 0.75) < 1e-5 and mean_weight == 2.5 else 1)
PY
