#!/bin/sh
# webdataset 1.0.2, seen on 2026-11-28.
#
# One expects: random.seed, numpy.random.seed and torch.manual_seed, or WebDataset(seed=0), to make
# WebDataset(...).shuffle(1000) give the samples in the same order in every run.
# What happens: the buffer of .shuffle has a generator of its own, seeded by the time and the process's
# number. No seed of a library and not the seed of the dataset before it reaches it, so two runs of one
# script read other samples, and a run that goes on from a checkpoint cannot find its place again.
# What to do: .shuffle(1000, seed=0), which then gives every epoch the same order, or the stage
# webdataset.detshuffle(1000, seed=0), which counts epochs.
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
import random
import tarfile

import numpy
import webdataset

with tarfile.open("shard.tar", "w") as tar:
    for number in range(100):
        member = tarfile.TarInfo(f"{number:02}.txt")
        member.size = 2
        tar.addfile(member, io.BytesIO(f"{number:02}".encode()))


def order(**options):
    random.seed(0)
    numpy.random.seed(0)
    dataset = webdataset.WebDataset("shard.tar", shardshuffle=False, seed=0)
    return " ".join(x["txt"].decode() for x in dataset.shuffle(100, **options))


seeded, given = [order() for _ in range(3)], [order(seed=0) for _ in range(3)]
print(f"all seeded by 0: {len(set(seeded))} orders of 3 runs; .shuffle(100, seed=0): {len(set(given))}")
for samples in seeded:
    print(f"  {samples[:23]} ...")
raise SystemExit(0 if len(set(seeded)) == 3 and len(set(given)) == 1 else 1)
PY
