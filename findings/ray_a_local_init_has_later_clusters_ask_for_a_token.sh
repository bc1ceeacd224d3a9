#!/bin/sh
# ray 2.60.0, seen on 2026-11-29.
#
# One expects: ray.init() without an address, as in a notebook, to leave nothing behind. A cluster that is
# started later by `ray start --head` takes nodes by `ray start --address=...`, as before.
# What happens: ray.init() writes a token into ~/.ray/auth_token. From then on `ray start --head` of that
# user wants a token, because the file is there, and says so in a warning. `ray start --address` on the same
# host, by the same user with the same file, is refused: it does not read the file unless it is told to.
# What to do: set RAY_AUTH_MODE for all of a cluster, its nodes and its drivers alike: token or disabled.
#
# Exits 0 while ray behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'ray==2.60.0'
cd "$folder"
mkdir home
unset RAY_AUTH_MODE
HOME="$folder/home" RAY_USAGE_STATS_ENABLED=0 venv/bin/python - <<'PY' 2>/dev/null
import pathlib
import subprocess
import sys
import tempfile
import time

START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
START += [f"--object-store-memory={80 * 2**20}"]
INIT = "import ray; ray.init(num_cpus=1, object_store_memory=80 * 2**20, include_dashboard=False)"


def joins():
    """Return whether a second node joins a new cluster."""
    with tempfile.TemporaryDirectory(prefix="ray_", dir="/tmp") as own:
        options = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={own}"]
        head = subprocess.Popen([*START, *options], stdout=subprocess.DEVNULL)
        address = pathlib.Path(own) / "ray_current_cluster"
        while not (address.exists() and address.read_text()):
            time.sleep(0.1)
        node = subprocess.Popen(
            [*START, f"--address={address.read_text()}", "--dashboard-agent-listen-port=0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        joined = any("Ray runtime started" in line for line in node.stdout)  # or its output ends
        for process in (node, head):
            process.terminate()
            process.wait()
        return joined


before = joins()
subprocess.run([sys.executable, "-c", INIT], check=True, stdout=subprocess.DEVNULL)
token = (pathlib.Path.home() / ".ray" / "auth_token").exists()
after = joins()
print("a second node joins:", before)
print("ray.init() has written a token:", token)
print("a second node joins:", after)
raise SystemExit(0 if (before, token, after) == (True, True, False) else 1)
PY
