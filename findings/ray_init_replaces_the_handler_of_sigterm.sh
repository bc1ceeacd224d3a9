#!/bin/sh
# ray 2.60.0, seen on 2026-11-29.
#
# One expects: a program that handles SIGTERM, to save a checkpoint and end, still does while it is
# connected to a Ray cluster, or at the least after ray.shutdown().
# What happens: ray.init() sets a handler of its own, without a word. SIGTERM then raises SystemExit(15), and
# nothing is saved. ray.shutdown() does not put the program's handler back: signal.getsignal still names
# Ray's, which is not called any more, and SIGTERM ends the process at once.
# What to do: keep signal.getsignal(signal.SIGTERM) before ray.init(), and set it again after ray.init(),
# and once more after ray.shutdown().
#
# Exits 0 while ray behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q ray==2.60.0
cd "$folder"
RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 venv/bin/python - <<'PY'
import subprocess
import sys

PROGRAM = """
import os, signal, sys

def save(number, frame):
    print("the program's handler")

signal.signal(signal.SIGTERM, save)
import ray
memory = 80 * 2**20
ray.init(num_cpus=1, object_store_memory=memory, include_dashboard=False, logging_level="ERROR")
print("after ray.init(), ours:", signal.getsignal(signal.SIGTERM) is save, flush=True)
if "shutdown" in sys.argv:
    ray.shutdown()
    print("after ray.shutdown(), ours:", signal.getsignal(signal.SIGTERM) is save, flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("went on after SIGTERM", flush=True)
"""
statuses = []
for words in ([], ["shutdown"]):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, text=True, check=False
    )
    said = [line for line in done.stdout.splitlines() if "after" in line or "handler" in line]
    print(*said, f"status {done.returncode}", sep="\n")
    statuses.append((done.returncode, "the program's handler" in said))
raise SystemExit(0 if statuses == [(15, False), (-15, False)] else 1)
PY
