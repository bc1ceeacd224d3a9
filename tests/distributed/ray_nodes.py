"""A Ray cluster of several nodes on this machine, of which nothing is left afterwards."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

# Of the cluster and of those who use it: else a token that Ray once wrote for this user counts.
OPEN = {"RAY_AUTH_MODE": "disabled"}
_TRIES = 3
_OBJECTS_BYTES = 80 * 1024**2  # the least that Ray takes is 75 MiB
_NODE = (
    *("--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"),
    *("--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"),
    f"--object-store-memory={_OBJECTS_BYTES}",
)
# A node ends when these tests end, however they do.
_PROGRAM = """
import signal, sys
from ray.scripts.scripts import main
from whale_train.machine.parents import end_with_parent

end_with_parent(int(sys.argv.pop(1)), signal.SIGTERM)
main()
"""


@contextmanager
def ray_nodes(folder: Path, offered: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Run a cluster with a node for each of `offered`, its resources, and yield its address.

    folder: where the output of the nodes is kept.
    """
    # Sockets of Ray lie in its folder, and their paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray_", dir="/tmp") as own:
        started: list[subprocess.Popen[bytes]] = []
        try:
            head = ("--head", "--port=0", "--include-dashboard=false", f"--temp-dir={own}")
            file = Path(own) / "ray_current_cluster"
            started.append(_node(folder, offered[0], head, partial(_has_text, file)))
            address = file.read_text().strip()
            for number, resources in enumerate(offered[1:], start=2):
                there = partial(_has_nodes, address, number)
                started.append(_node(folder, resources, (f"--address={address}",), there))
            yield address
        finally:
            for process in reversed(started):  # a node whose head has gone waits for it
                process.terminate()
                process.wait(60.0)


def _node(
    folder: Path,
    resources: Mapping[str, float],
    options: Sequence[str],
    is_there: Callable[[], bool],
) -> "subprocess.Popen[bytes]":
    """Start a node, and return its process once it is there.

    Ray gives up after 30 s, which a busy machine may need, so it is tried more than once.
    """
    for _ in range(_TRIES):
        process = _start(folder, resources, options)
        while process.poll() is None:
            if is_there():
                return process
            time.sleep(0.1)
    raise AssertionError((folder / "ray.log").read_text()[-2000:])


def _start(
    folder: Path, resources: Mapping[str, float], options: Sequence[str]
) -> "subprocess.Popen[bytes]":
    """Start a node, which runs until the process is told to end."""
    custom = {name: amount for name, amount in resources.items() if name != "CPU"}
    given = (f"--num-cpus={resources['CPU']}", f"--resources={json.dumps(custom)}")
    program = [sys.executable, "-c", _PROGRAM, str(os.getpid()), "start", *options, *given, *_NODE]
    with (folder / "ray.log").open("ab") as log:
        return subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, **OPEN, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def _has_text(file: Path) -> bool:
    """Return whether a file has been written."""
    return file.exists() and bool(file.read_text())


def _has_nodes(address: str, count: int) -> bool:
    """Return whether the cluster has `count` living nodes."""
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    options = GcsClientOptions.create(
        address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
    )
    state = GlobalState()
    state._initialize_global_state(options)
    try:
        return sum(node["Alive"] for node in state.node_table()) >= count
    finally:
        state.disconnect()
