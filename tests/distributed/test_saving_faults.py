"""What happens to a rank, or to the disk, while a checkpoint is being written."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.distributed.test_faults import END_DEADLINE_S, START_DEADLINE_S, processes_of

from whale_train.checkpoints.checkpoint_files import check, checkpoints_in, unfinished_in

TIMEOUT_S = 8
# 13 MB of weights and twice that of moments: long enough to write for something to happen.
LARGE = (
    *("data.max_bytes=100000", "data.sequence_length=16", "model.sequence_length=16"),
    *("model.width=256", "train.global_batch=4", "hardware=cpu", "hardware.devices=2"),
)


def command(run_dir: Path, *overrides: str) -> list[str]:
    program = (sys.executable, "-m", "whale_train.launcher.cli", f"hydra.run.dir={run_dir}")
    return [*program, *LARGE, *overrides]


def wait_for_saving(run_dir: Path, process: subprocess.Popen[str]) -> None:
    """Return while a checkpoint is being written, and there is one already."""
    folder = run_dir / "checkpoints"
    deadline = time.monotonic() + START_DEADLINE_S
    while not (checkpoints_in(folder) and any(folder.glob(".unfinished_*"))):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing was being saved in time"
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            signal.SIGKILL,
            "rank 1 (cpu_process, node 0, TaskGraph model) was killed by SIGKILL",
        ),
        # Who stops is named by the same time limit as in test_hangs.
        pytest.param(signal.SIGSTOP, "for rank 1, which did not arrive", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_ends_while_it_saves_leaves_what_was_saved(
    number: signal.Signals, said: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        command(
            *(run_dir, "strategy=zero1", "train.steps=100000", "checkpoint.every=1"),
            *("checkpoint.keep=2", f"launcher.timeout_s={TIMEOUT_S}"),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_for_saving(run_dir, process)
            ranks = {name: pid for pid, name in processes_of(run_dir).items() if "rank" in name}
            os.kill(ranks["whale-rank-1"], number)
            _, errors = process.communicate(timeout=2 * TIMEOUT_S + END_DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 1, errors
    assert said in errors
    assert not processes_of(run_dir)
    saved = checkpoints_in(run_dir / "checkpoints")
    step = check(saved[0]).step
    more = ("strategy=dp", f"train.steps={step + 1}", "train.resume=auto", "checkpoint.every=100")
    done = subprocess.run(
        command(run_dir, *more), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"going on after step {step}, from {saved[0]}\n" in done.stdout
    assert unfinished_in(run_dir) == []


FULL = r"No space left on device \(/\S+: [\d.]+ \w+ wanted, [\d.]+ \w+ free\)"


def can_mount() -> bool:
    """Return whether this user may have a disk of their own, in a namespace of theirs."""
    try:
        made = ("unshare", "--user", "--map-root-user", "--mount", "true")
        return subprocess.run(made, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_mount(), reason="needs a user namespace, to mount a small disk in")
def test_a_full_disk_ends_no_training(tmp_path: Path) -> None:
    """Of 3 MB, on which neither a checkpoint nor the weights have room."""
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=3m small "$1"; "${@:3}"; status=$?; cp -r "$1"/run "$2"; '
    unshared = ("unshare", "--user", "--map-root-user", "--mount", "bash", "-c")
    done = subprocess.run(
        [
            *(*unshared, f"{script}exit $status", "-", str(disk), str(kept)),
            *command(disk / "run", "strategy=dp", "train.steps=6", "checkpoint.every=2"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    for step in (2, 4, 6):
        said = rf"warning: no checkpoint after step {step}: rank \d: {FULL}\n"
        assert re.search(said, done.stdout), done.stdout
    said = (
        rf"error: rank 0 \(.*\) failed: the trained model could not be written: "
        rf"rank \d: {FULL}\nIts log: logs/rank_0.log\n"
    )
    assert re.fullmatch(said, done.stderr), done.stderr
    lines = [json.loads(line) for line in (kept / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert unfinished_in(kept) == []
    assert not list((kept / "checkpoints").iterdir())
    shutil.rmtree(kept)
