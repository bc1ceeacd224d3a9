"""What ranks free goes back to the system where the machine would not hold it as well."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.distributed.equality import run_host
from tests.distributed.served import ROOT, Served

from whale_train.config import read_request
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.launcher.ranks.run_dir import create_run_dir, write_text
from whale_train.launcher.ranks.run_files import start_ranks
from whale_train.machine import limits
from whale_train.runtime.process import rank_main as worker
from whale_train.strategies.memory.malloc_headroom import THRESHOLD

MIB = 2**20
BLOCKS = 200
# Blocks of half a MiB are freed between small ones that stay, after one that raised glibc's own
# threshold over them; what the process has left of them, in bytes.
HELD = f"""
import ctypes
import os
from whale_train.runtime.cpu.malloc_trim import trim_heap

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def block(num_bytes):
    made = libc.malloc(num_bytes)
    libc.memset(made, 1, num_bytes)
    return made

{{first}}
libc.free(block(8 * {MIB}))
before = resident()
blocks = [(block({MIB} // 2), block(1000)) for _ in range({BLOCKS})]
for large, _ in blocks:
    libc.free(large)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc's malloc")
@pytest.mark.parametrize(
    ("first", "least", "most"),
    [("", 0.9, 1.1), ("trim_heap()", 0.0, 0.05)],
    ids=["kept", "given_back"],
)
def test_what_is_freed_between_what_stays(first: str, least: float, most: float) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", HELD.format(first=first)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    whole = BLOCKS * MIB / 2
    assert least * whole <= int(ran.stdout) <= most * whole


# --- A run on a machine with a limit -------------------------------------------------------------

JOB = (
    *("model=gpt", "model.width=32", "model.depth=2", "model.heads=2"),
    *("data=text", "data.sequence_length=16", "strategy=dp", "hardware=cpu", "hardware.devices=2"),
    *("train.steps=1", "train.global_batch=4"),
)


def ran(served: Served, run_dir: Path, memory_bytes: int) -> tuple[float, list[str], set[str]]:
    """(bytes all ranks need, what the plan says of them, the thresholds they had) where there is so
    much memory."""
    failure = served.ask(run_limited, run_dir=str(run_dir), memory_bytes=memory_bytes)
    assert not failure, failure
    plan = json.loads((run_dir / "plan.json").read_text())
    needed = sum(rank["memory_bytes"]["total"] for rank in plan["ranks"])
    said = [each["chosen"] for each in plan["decisions"] if each["key"] == "memory"]
    return needed, said, {path.read_text() for path in run_dir.glob("threshold_*")}


def test_a_run_gives_memory_back_where_there_is_no_room_for_holes(
    served: Served, tmp_path: Path
) -> None:
    needed, *found = ran(served, tmp_path / "plenty", 10**9)
    assert found == [[], {""}]
    _, *found = ran(served, tmp_path / "short", int(1.2 * needed))
    assert found == [["freed blocks given back"], {"65536"}]


def run_limited(run_dir: str, memory_bytes: int) -> str:
    """The job as the command runs it, in a group that leaves ranks so much; why it failed."""
    folder = Path(run_dir)
    request = read_request(
        composed(rewritten(list(JOB))), {"hardware": "inventory", "strategy": "strategy"}
    )
    create_run_dir(folder)
    (folder / "own").write_text("0::/\n")
    (folder / "memory.max").write_text(f"{memory_bytes + limits.PROGRAMS_BYTES}\n")
    write_text(folder / "request.json", request.to_json())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "OWN_GROUPS", folder / "own")
        patch.setattr(limits, "GROUPS", folder)
        start_ranks(folder, resolve_request(request), request)
        return run_host(folder, train_and_tell)


def train_and_tell(run_dir: Path, rank: int, world_size: int, prepared: worker.Prepared) -> None:
    worker.run_rank(run_dir, rank, world_size, prepared)
    (run_dir / f"threshold_{rank}").write_text(os.environ.get(THRESHOLD, ""))
