#!/bin/sh
# datasets 5.2.0 with pyarrow 26.0.1 and numpy 2.4.6, seen on 2026-11-27.
#
# One expects: `with_format("numpy")` to keep a column of integers as integers, or, where one is null, to
# refuse it or to make float64 of it, as pandas does.
# What happens: rows that are read together with a null come as float32, so that their neighbours lose
# digits above 2^24 (an id of 16,777,217 is read as 16,777,216), and a cast to int64, which an embedding
# wants, makes -9223372036854775808 of the null. Rows that are read beside no null come as they are: what
# a sample is depends on which others are read with it.
# What to do: look at the Arrow column's null_count before anything is read as numpy.
#
# Exits 0 while datasets behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1 numpy==2.4.6
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder" "$folder/venv/bin/python" -W ignore - <<'PY'
import warnings

import datasets
import numpy as np

warnings.simplefilter("ignore")
rows = datasets.Dataset.from_dict({"id": [2**24 + 1, None, 7]}).with_format("numpy")
alone, beside = rows[0:1]["id"], rows[0:2]["id"]
print(f"row 0 by itself: {alone!r}")
print(f"row 0 beside a null: {beside!r}, as int64 {beside.astype(np.int64)!r}")
as_seen = alone.dtype == np.int64 and beside.dtype == np.float32 and int(beside[0]) == 2**24
raise SystemExit(0 if as_seen else 1)
PY
