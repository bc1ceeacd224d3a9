#!/bin/sh
# torch 2.13.0, seen on 2026-11-27.
#
# One expects: `torch.backends.cudnn.flags(enabled=False)` to work whatever else was set, as it sets
# what it names and puts it back; and reading `allow_tf32` to answer.
# What happens: after the settings per operation (`torch.backends.cudnn.conv.fp32_precision = "ieee"`
# and `...rnn...`, both the same) reading `torch.backends.cudnn.allow_tf32` raises RuntimeError, and
# `cudnn.flags` reads it on entry, so that it raises too: on CPUs as well, without any GPU. Every CTC
# loss of transformers enters `cudnn.flags(enabled=False)`.
# `torch.backends.cuda.matmul.fp32_precision = "tf32"` does the same to its `allow_tf32` and to
# `torch.get_float32_matmul_precision()`. The other way round all is well: `allow_tf32 = False` also
# sets what the new settings read.
# What to do: a launcher that sets precision for models it did not write sets `allow_tf32`.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch

cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul


def outcome(what):
    try:
        what()
    except RuntimeError as error:
        return "RuntimeError: " + str(error)[:60]
    return "works"


def enter():
    with cudnn.flags(enabled=False):
        pass


seen = {"cudnn.flags at first": outcome(enter)}
cudnn.allow_tf32 = matmul.allow_tf32 = False
seen["cudnn.flags after allow_tf32 = False"] = outcome(enter)
seen["conv after allow_tf32 = False"] = cudnn.conv.fp32_precision
cudnn.allow_tf32 = True
cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
seen["reading allow_tf32 after fp32_precision"] = outcome(lambda: cudnn.allow_tf32)
seen["cudnn.flags after fp32_precision"] = outcome(enter)
matmul.fp32_precision = "tf32"
seen["matmul.allow_tf32 after fp32_precision"] = outcome(lambda: matmul.allow_tf32)
seen["get_float32_matmul_precision after it"] = outcome(torch.get_float32_matmul_precision)
for what, said in seen.items():
    print(f"{what}: {said}")
said = list(seen.values())
as_seen = said[:2] == ["works"] * 2 and said[2] != "tf32"
raise SystemExit(0 if as_seen and all(x.startswith("RuntimeError") for x in said[3:]) else 1)
PY
