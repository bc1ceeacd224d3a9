#!/bin/sh
# torch 2.13.0, ml_dtypes 0.5.4, seen on 2026-11-29.
#
# One expects: an infinite value converted to an 8-bit float to stay visible: as infinity in e5m2, and as
# NaN in e4m3fn, which has no infinity. ml_dtypes, on which JAX builds, converts so.
# What happens: torch's e4m3fn turns infinity, like every number too large, into 448, its largest number;
# its e5m2 keeps infinity. An overflow before a product in e4m3 becomes an ordinary number, and neither
# the loss nor a norm of gradients tells of it.
# What to do: look for values that are not finite while the scale is computed, and make the scale NaN.
#
# Exits 0 while both behave so, 1 when they no longer do.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6 ml_dtypes==0.5.4
"$folder/venv/bin/python" -W ignore - <<'PY'
import ml_dtypes
import numpy
import torch

values = [float("inf"), 500.0, float("nan")]
shown = {}
for name in ("float8_e4m3fn", "float8_e5m2"):
    shown["torch", name] = torch.tensor(values).to(getattr(torch, name)).float().tolist()
    of_jax = numpy.array(values, numpy.float32).astype(getattr(ml_dtypes, name))
    shown["ml_dtypes", name] = of_jax.astype(numpy.float32).tolist()
for (library, name), numbers in shown.items():
    print(f"{values} in {name} of {library}: {numbers}")
hides = shown["torch", "float8_e4m3fn"][:2] == [448.0, 448.0]
keeps = shown["torch", "float8_e5m2"][0] == float("inf")
of_jax = numpy.isnan(shown["ml_dtypes", "float8_e4m3fn"][:2]).all()
raise SystemExit(0 if hides and keeps and of_jax else 1)
PY
