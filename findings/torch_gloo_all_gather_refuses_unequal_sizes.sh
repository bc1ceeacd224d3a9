#!/bin/sh
# torch 2.13.0 on a CPU, seen on 2026-11-29.
#
# One expects: `torch.distributed.all_gather` to gather tensors of unequal sizes, into a list of tensors
# of these sizes. Its documentation says so: "Complex and uneven sized tensors are supported."
# What happens: with gloo it raises "ProcessGroupGloo::allgather: invalid tensor size at index 1". With
# NCCL it works, by one broadcast for each rank. gloo's reduce_scatter takes a list of unequal sizes.
# What to do: on gloo, let every rank broadcast its tensor (torch.distributed.broadcast), which works in
# place and is what NCCL does; or pad all tensors to the largest.
#
# Exits 0 while torch behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/unequal.py" <<'PY'
import sys

import torch
from torch import distributed as dist
from torch import multiprocessing

SIZES = [3, 5]


def rank(number, meeting, results):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=2)
    own = torch.full((SIZES[number],), number + 1.0)
    said = "gathered"
    try:
        dist.all_gather([torch.empty(size) for size in SIZES], own)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    whole = torch.empty(sum(SIZES))
    for owner, part in enumerate(whole.split(SIZES)):
        part.copy_(own) if owner == number else None
        dist.broadcast(part, src=owner)
    scattered = torch.empty(SIZES[number])
    dist.reduce_scatter(scattered, [torch.ones(size) for size in SIZES])
    results.put((said, whole.tolist(), scattered.tolist()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(rank, (sys.argv[1], results), 2)
    found = [results.get() for _ in SIZES]
    print(found[0][0])
    assert all(whole == [1.0] * 3 + [2.0] * 5 for _, whole, _ in found), found
    assert all(set(scattered) == {2.0} for _, _, scattered in found), found
    raise SystemExit(0 if all("invalid tensor size" in said for said, _, _ in found) else 1)
PY
"$folder/venv/bin/python" -W ignore "$folder/unequal.py" "$folder/meeting"
