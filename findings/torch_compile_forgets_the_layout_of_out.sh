#!/bin/sh
# torch 2.13.0, seen on 2026-11-29. Needs a C++ compiler.
#
# One expects: a tensor that is made contiguous and given as `out` to an operation to be contiguous in
# compiled code too, so that a kernel which takes one layout alone can read it.
# What happens: inside torch.compile the result is laid out as the operation's input. Codes of a
# transposed weight are transposed, and functional.scaled_mm, which wants its second factor column by
# column, raises InductorError ("mat_b must be col_major"). Without torch.compile the same lines run.
# What to do: in compiled code write `(x * scale).to(dtype).contiguous()` in place of `out`.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
TORCHINDUCTOR_CACHE_DIR="$folder/cache" "$folder/venv/bin/python" -W ignore - <<'PY'
import torch
from torch.nn import functional

ROWS = functional.ScalingType.RowWise


def by_out(x, scale):
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    torch.mul(x, scale, out=codes)
    return codes


def by_copy(x, scale):
    return (x * scale).to(torch.float8_e4m3fn).contiguous()


def product(x, weight, rounded):
    factors = []
    for values in (x, weight.t()):
        scale = 448 / values.abs().amax(1, keepdim=True).float()
        factors.append((rounded(values, scale), 1 / scale))
    (a, of_a), (b, of_b) = factors
    return functional.scaled_mm(a, b.t(), of_a, ROWS, of_b.t(), ROWS)


x, weight = torch.randn(32, 64).bfloat16(), torch.randn(64, 48).bfloat16()
shown = {}
for rounded in (by_out, by_copy):
    eager = product(x, weight, rounded)
    try:
        equal = torch.equal(torch.compile(product)(x, weight, rounded), eager)
        shown[rounded.__name__] = "as without it" if equal else "other numbers"
    except Exception as error:
        shown[rounded.__name__] = type(error).__name__
for name, outcome in shown.items():
    print(f"{name}: compiled, {outcome}")
raise SystemExit(0 if shown == {"by_out": "InductorError", "by_copy": "as without it"} else 1)
PY
