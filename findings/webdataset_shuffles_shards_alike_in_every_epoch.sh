#!/bin/sh
# webdataset 1.0.2, seen on 2026-11-28.
#
# One expects: WebDataset(urls, shardshuffle=100) to read the shards in another order in every epoch, as a
# DataLoader with shuffle=True does of samples.
# What happens: the order is drawn once, when the object is made. Its stage makes a generator of the same
# seed whenever an epoch begins, so that all epochs read the shards in one order, with and without
# `seed=`, and nothing is said. A buffer of .shuffle(1000) samples behind it mixes neighbouring shards
# alone: a model sees the first shards first, in every epoch.
# What to do: detshuffle=True beside shardshuffle, which counts epochs. The count is of the object, so a
# DataLoader needs persistent_workers=True, or every epoch begins with a copy that has counted none.
#
# Exits 0 while webdataset behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q webdataset==1.0.2 numpy==2.4.6
cd "$folder"
venv/bin/python -W ignore - <<'PY'
import io
import tarfile

import webdataset

for shard in range(8):
    with tarfile.open(f"{shard}.tar", "w") as tar:
        member = tarfile.TarInfo(f"{shard}.txt")
        member.size = 1
        tar.addfile(member, io.BytesIO(str(shard).encode()))


def epochs(**options):
    dataset = webdataset.WebDataset("{0..7}.tar", shardshuffle=100, **options)
    return ["".join(x["txt"].decode() for x in dataset) for _ in range(4)]


orders = {str(options): epochs(**options) for options in ({}, {"seed": 1}, {"detshuffle": True})}
for options, order in orders.items():
    print(f"shardshuffle=100 {options}: {' '.join(order)}")
several = [len(set(order)) for order in orders.values()]
raise SystemExit(0 if several[:2] == [1, 1] and several[2] > 1 else 1)
PY
