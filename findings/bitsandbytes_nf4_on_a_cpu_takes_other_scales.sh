#!/bin/sh
# bitsandbytes 0.50.2 with torch 2.13.0, seen on 2026-11-29.
#
# One expects: dequantize_4bit to return what quantize_4bit stored, on a CPU as on a GPU: within half a step
# between two of the 16 values.
# What happens: quantize_4bit counts blocks of 64 elements through the flat matrix, and the CPU kernel of
# dequantize_4bit begins a block anew in every row. Where rows are no multiple of 64 (48 x 80), elements
# get the scales of other blocks, and nothing is said. Linear4bit computes with them.
# What to do: give both the flat matrix, and view the result in its shape.
#
# Exits 0 while bitsandbytes behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q bitsandbytes==0.50.2 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

torch.manual_seed(0)


def error(values):
    codes, state = quantize_4bit(values, quant_type="nf4", blocksize=64)
    return float((dequantize_4bit(codes, state) - values).abs().max())


found = {}
for shape in ((48, 80), (64, 64)):
    matrix = torch.randn(shape)
    found[shape] = error(matrix), error(matrix.flatten())
    print(f"{shape}: largest error {found[shape][0]:.2f}, and flat {found[shape][1]:.2f}")
wrong = found[48, 80][0] > 2 * found[48, 80][1] and found[64, 64][0] == found[64, 64][1]
raise SystemExit(0 if wrong else 1)
PY
