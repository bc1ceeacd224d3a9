#!/bin/sh
# torch 2.13.0, seen on 2026-11-28.
#
# One expects: the graph of `torch.export.export` to show every buffer that a forward writes: by an
# operation whose schema marks an argument as written, as `add_` of num_batches_tracked, or by
# `buffers_to_mutate` of the signature.
# What happens: aten.batch_norm of a model in training mode writes running_mean and running_var, and
# its schema says that it changes nothing. The signature of the exported program names no buffer at
# all; only after `run_decompositions` it names the three that change.
# What to do: count the buffers that aten.batch_norm and aten.instance_norm read as written, or
# decompose first. Who gives each copy of a model the state it changes, and goes by the exported graph,
# gives it num_batches_tracked and shares the statistics.
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

model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3)).train()
x = torch.randn(4, 2, 5) + 1
exported = torch.export.export(model, (x,))
calls = [node.target for node in exported.graph.nodes if node.op == "call_function"]
mutable = {str(call): call._schema.is_mutable for call in calls}
named = sorted(exported.graph_signature.buffers_to_mutate.values())
decomposed = sorted(exported.run_decompositions().graph_signature.buffers_to_mutate.values())
before = {name: buffer.clone() for name, buffer in model.named_buffers()}
model(x)
changed = sorted(name for name, buffer in model.named_buffers() if not before[name].equal(buffer))
print("operations, and whether their schema writes:", mutable)
print("buffers that the signature names:", named)
print("after run_decompositions:        ", decomposed)
print("buffers that a forward changes:  ", changed)
hidden = not mutable["aten.batch_norm.default"] and mutable["aten.add_.Tensor"]
raise SystemExit(0 if hidden and not named and decomposed == changed and len(changed) == 3 else 1)
PY
