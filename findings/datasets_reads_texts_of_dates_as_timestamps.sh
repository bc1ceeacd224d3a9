#!/bin/sh
# datasets 5.2.0 with pyarrow 26.0.1, seen on 2026-11-28.
#
# One expects: a field of strings in a .jsonl file to be a column of strings.
# What happens: pyarrow guesses the type of a column from the first block of the file, and strings that
# look like dates make it timestamps. A corpus whose texts are all of that kind loses how they were
# written ("2024-01-02" becomes midnight). One whose first block is of that kind (10 MB here, as of log
# lines or diary headings) fails at the first other text, after what came before it has been converted.
# Giving load_dataset `features` with Value("string") does not help: the guess comes first, and is then
# written out as text ("2024-01-02 00:00:00").
# What to do: read the lines with Python's json, through Dataset.from_generator.
#
# Exits 0 while datasets behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder" HF_DATASETS_DISABLE_PROGRESS_BARS=1 venv/bin/python - <<'PY'
import datasets

datasets.disable_progress_bars()
datasets.logging.set_verbosity(datasets.logging.CRITICAL)
date, other = '{"text": "2024-01-02"}\n', '{"text": "It rained."}\n'
with open("dates.jsonl", "w") as file:
    file.write(date * 3)
with open("then_text.jsonl", "w") as file:
    file.write(date * 600_000 + other)


def load(name, **how):
    return datasets.load_dataset("json", data_files=name, split="train", **how)


rows = load("dates.jsonl")
print(f"three dates: {rows.features['text']}, row 0 is {rows[0]['text']!r}")
try:
    load("then_text.jsonl")
    failed = False
except Exception as error:
    failed = True
    print(f"600,000 dates and a sentence: {type(error.__cause__).__name__}: {error.__cause__}")
features = datasets.Features({"text": datasets.Value("string")})
kept = load("dates.jsonl", features=features)
print(f"with features given: row 0 is {kept[0]['text']!r}")
as_seen = rows.features["text"].dtype == "timestamp[s]" and kept[0]["text"] != "2024-01-02"
raise SystemExit(0 if as_seen and failed else 1)
PY
