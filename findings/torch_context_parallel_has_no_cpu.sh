#!/bin/sh
# torch 2.13.0, seen on 2026-11-29.
#
# One expects: `torch.distributed.tensor.experimental.context_parallel` over a mesh of CPUs (gloo) to
# compute scaled dot-product attention as over one of GPUs, or to say that it has CUDA kernels alone.
# What happens: the context shards the buffers, and the first attention raises that the operator
# `aten._scaled_dot_product_flash_attention_for_cpu` has no sharding strategy. Over CPUs nobody can
# test a program that uses it. The ring below it (`_templated_ring_attention`) does run with that
# kernel.
# What to do: test on GPUs, or call the ring with the CPU kernel as benchmarks/context_sides.py does.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/attend.py" <<'PY'
import sys

import torch
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional


def attend(rank, meet):
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    query, key, value = (torch.randn(1, 2, 16, 8) for _ in range(3))
    said = ""
    with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2]):
        try:
            functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        except NotImplementedError as error:
            said = str(error)
    if rank == 0:
        print(said or "attention was computed")
    dist.destroy_process_group()
    sys.exit(0 if "does not have a sharding strategy" in said else 1)


if __name__ == "__main__":
    multiprocessing.spawn(attend, (sys.argv[1],), 2)
PY
"$folder/venv/bin/python" -W ignore "$folder/attend.py" "$folder/meet"
