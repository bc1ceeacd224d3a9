#!/bin/sh
# deepspeed 0.19.8 with torch 2.13.0 on CPUs, seen on 2026-11-28. Needs a C compiler.
#
# One expects: `deepspeed.init_distributed("gloo")` to join a process group, which takes milliseconds,
# and an operation of DeepSpeed's to be compiled when something calls it.
# What happens: to learn whether it may compile its shared-memory all-reduce (for inference), DeepSpeed
# asks of all its operations whether they could be compiled. For some of them it compiles and links a
# test program, in every process that joins: every rank of every run runs the C compiler twice, about
# 0.1 s each time. Then it compiles the all-reduce, which the first process waits for.
# What to do: where the all-reduce is not wanted, replace `build_shm_op` of the module
# `deepspeed.comm.torch` before joining. `import_module("deepspeed.comm.torch")` finds it:
# `deepspeed.comm.torch` as an attribute, and `from deepspeed.comm import torch`, is torch itself.
#
# Exits 0 while DeepSpeed behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 setuptools
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install -q --no-build-isolation deepspeed==0.19.8
cat > "$folder/join.py" <<'PY'
import os
import subprocess
import sys
import time
from importlib import import_module

ran = []
start = subprocess.Popen.__init__


def noted(process, command, *rest, **options):
    ran.append(str(command if isinstance(command, str) else command[0]))
    start(process, command, *rest, **options)


import deepspeed  # noqa: E402

if sys.argv[1] == "told":
    import_module("deepspeed.comm.torch").build_shm_op = lambda: None
subprocess.Popen.__init__ = noted
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
began = time.perf_counter()
deepspeed.init_distributed("gloo")
compiled = [name for name in ran if os.path.basename(name) in ("cc", "gcc", "clang")]
print(f"{sys.argv[1]}: {time.perf_counter() - began:.2f} s, the C compiler ran {len(compiled)} times")
import torch  # noqa: E402

print("the attribute deepspeed.comm.torch is torch itself:", deepspeed.comm.torch is torch)
raise SystemExit(0 if bool(compiled) == (sys.argv[1] == "untold") else 1)
PY
export TORCH_EXTENSIONS_DIR="$folder/extensions"
"$folder/venv/bin/python" "$folder/join.py" untold 2>"$folder/said" || { tail -5 "$folder/said"; exit 1; }
"$folder/venv/bin/python" "$folder/join.py" told 2>"$folder/said" || { tail -5 "$folder/said"; exit 1; }
