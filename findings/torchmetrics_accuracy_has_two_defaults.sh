#!/bin/sh
# torchmetrics 1.9.0, seen on 2026-11-28.
#
# One expects: `torchmetrics.Accuracy(task="multiclass")` and `torchmetrics.classification.
# MulticlassAccuracy`, which are the same class, to give the same number.
# What happens: the first has average="micro", the share of all samples that are right; the second has
# average="macro", the mean of the classes' shares. On rare classes they are far apart (0.99 and 0.75
# below). F1Score, Precision and Recall differ from their Multiclass twins in the same way.
# What to do: write `average` in every config, whichever name is used.
#
# Exits 0 while torchmetrics behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 torchmetrics==1.9.0
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import torch
import torchmetrics
from torchmetrics import classification

target = torch.tensor([0] * 98 + [1, 1])
predicted = torch.tensor([0] * 98 + [1, 0])
seen = []
for name in ("Accuracy", "F1Score"):
    by_task = getattr(torchmetrics, name)(task="multiclass", num_classes=2)
    by_class = getattr(classification, f"Multiclass{name}")(num_classes=2)
    numbers = [metric(predicted, target).item() for metric in (by_task, by_class)]
    print(f"{name}(task='multiclass'): {numbers[0]:.4f}, {by_task.average}")
    print(f"Multiclass{name}(): {numbers[1]:.4f}, {by_class.average}")
    seen.append(type(by_task) is type(by_class) and numbers[0] - numbers[1] > 0.1)
raise SystemExit(0 if all(seen) else 1)
PY
