#!/bin/sh
# ray 2.60.0, seen on 2026-11-29.
#
# One expects: a process that an actor has started ends with the actor, in whatever way that one ends. It
# does where the placement group is removed, and after ray.kill(), in a session of its own or not.
# What happens: where the actor's process is killed by SIGKILL, as the kernel does for want of memory, a
# child ends too if it is in the actor's process group, and lives on if it was started with
# start_new_session=True. Ray gives the actor's resources to the next one while the child still has the
# cores, the memory or the GPU.
# What to do: have the child ask for a signal at its parent's end (prctl PR_SET_PDEATHSIG).
#
# Exits 0 while ray behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q ray==2.60.0
cd "$folder"
RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 venv/bin/python - 2>/dev/null <<'PY'
import os
import signal
import subprocess
import time

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

ray.init(
    num_cpus=1,
    object_store_memory=80 * 2**20,
    include_dashboard=False,
    log_to_driver=False,
    logging_level="ERROR",
)


@ray.remote(num_cpus=1)
class Actor:
    def start(self, apart):
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=apart)
        return os.getpid(), self.child.pid


def lives_after(ending, apart):
    group = placement_group([{"CPU": 1}])
    group.wait(60)
    actor = Actor.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)
    ).remote()
    process, child = ray.get(actor.start.remote(apart))
    if ending == "removed group":
        remove_placement_group(group)
    elif ending == "ray.kill":
        ray.kill(actor)
    else:
        os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 15.0
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        time.sleep(0.1)
    lives = os.path.exists(f"/proc/{child}")
    if lives:
        os.kill(child, signal.SIGKILL)
    remove_placement_group(group)
    print(f"{ending}, {'a session of its own' if apart else 'one session'}: lives on {lives}")
    return lives


endings = ("removed group", "ray.kill", "SIGKILL")
found = [lives_after(ending, apart) for ending in endings for apart in (False, True)]
ray.shutdown()
raise SystemExit(0 if found == [False] * 5 + [True] else 1)
PY
