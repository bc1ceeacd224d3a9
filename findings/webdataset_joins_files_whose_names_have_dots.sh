#!/bin/sh
# webdataset 1.0.2, seen on 2026-11-28.
#
# One expects: files of different names in a shard, as walk.2024.05.01.png and walk.2024.05.02.png, to be
# samples of their own, since only the last dot begins an extension elsewhere.
# What happens: the key of a sample ends at the first dot of a name, and all of the rest is the field's
# name. Neighbours that differ behind it become one sample with fields "2024.05.01.png" and
# "2024.05.02.png": a shard of dated or versioned files has one sample instead of thousands, no field
# is called "png", and nothing is said. So does `TarWriter` of such a key, whose reader gets other keys.
# What to do: take dots out of keys when shards are written, and compare the number of samples.
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

with tarfile.open("shard.tar", "w") as tar:
    for day in ("01", "02", "03"):
        member = tarfile.TarInfo(f"walk.2024.05.{day}.png")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"png"))
samples = list(webdataset.WebDataset("shard.tar", shardshuffle=False))
fields = [[name for name in sample if not name.startswith("__")] for sample in samples]
print(f"three files: {len(samples)} sample, of key {samples[0]['__key__']!r} and fields {fields[0]}")

with webdataset.TarWriter("written.tar") as sink:
    for day in ("01", "02"):
        sink.write({"__key__": f"walk.{day}", "txt": "fair"})
read = [x["__key__"] for x in webdataset.WebDataset("written.tar", shardshuffle=False)]
print(f"keys walk.01 and walk.02 are read as {read}")
raise SystemExit(0 if len(samples) == 1 and read == ["walk"] else 1)
PY
