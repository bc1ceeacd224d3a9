#!/bin/sh
# hydra-core 1.3.8, seen on 2026-11-28.
#
# One expects: a sweep over range(0.1,0.4,0.1) to have 0.1, 0.2 and 0.3, as one over range(1,4) has 1, 2 and
# 3: a range does not reach its stop.
# What happens: it has four values, the last 0.4, and range(0.1,0.5,0.1) has four as well. Floats are made
# Decimals digit for digit and summed with 28 digits, so that the rounding of a sum decides whether the
# stop is reached.
# What to do: list such values (choice(0.1,0.2,0.3)), or put the stop half a step before the value to leave
# out.
#
# Exits 0 while hydra behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q hydra-core==1.3.8
"$folder/venv/bin/python" -W ignore - <<'PY'
from hydra.core.override_parser.overrides_parser import OverridesParser

values = {}
for text in ("x=range(1,4)", "x=range(0.1,0.4,0.1)", "x=range(0.1,0.5,0.1)"):
    (override,) = OverridesParser.create().parse_overrides([text])
    values[text] = list(override.sweep_string_iterator())
    print(f"{text}: {', '.join(values[text])}")
raise SystemExit(0 if [len(x) for x in values.values()] == [3, 4, 4] else 1)
PY
