#!/bin/sh
# datasets 5.2.0, seen on 2026-11-28.
#
# One expects: after `load_state_dict` an IterableDataset goes on where the state was taken, and a second
# pass over it goes through everything, as it does on a dataset whose state was not loaded.
# What happens: every further pass begins at the loaded place too. A resumed training of several epochs
# trains on the rest of the data alone, and says nothing.
# What to do: go on with another object after the first pass, or load its first state again.
#
# Exits 0 while datasets behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0
cat > "$folder/passes.py" <<'PY'
import sys

import datasets

stream = datasets.Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset()
begun = iter(stream)
for _ in range(4):
    next(begun)
state = stream.state_dict()
untouched = [[row["x"] for row in stream] for _ in range(2)]
stream.load_state_dict(state)
loaded = [[row["x"] for row in stream] for _ in range(2)]
print(f"two passes: {untouched}; after load_state_dict: {loaded}")
whole = list(range(6))
sys.exit(0 if (untouched, loaded) == ([whole, whole], [[4, 5], [4, 5]]) else 1)
PY
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" "$folder/passes.py"
