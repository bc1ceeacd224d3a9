#!/bin/sh
# torch 2.13.0, seen on 2026-11-28.
#
# One expects: `torch.set_default_device` to do for devices what `torch.set_default_dtype` does for
# dtypes, as its documentation says it sets the default "globally"; so a model that a worker thread
# builds is where the program said models are.
# What happens: the default dtype is the process's, the default device that of the thread alone. In
# any other thread, and in those of a ThreadPoolExecutor, tensors are made on the CPU, of the dtype
# that the main thread has set. Nothing is said.
# What to do: set the device in each thread, or name it where tensors are made. A library that
# measures a model in its caller's thread has both to undo, in another thread the dtype alone.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PY'
from concurrent.futures import ThreadPoolExecutor

import torch

torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")


def made():
    weight = torch.nn.Linear(2, 2).weight
    return weight.device.type, str(weight.dtype)


with ThreadPoolExecutor(1) as pool:
    seen = {"in the thread that set them": made(), "in another thread": pool.submit(made).result()}
for where, what in seen.items():
    print(f"{where}: {' '.join(what)}")
as_seen = list(seen.values()) == [("meta", "torch.float64"), ("cpu", "torch.float64")]
raise SystemExit(0 if as_seen else 1)
PY
