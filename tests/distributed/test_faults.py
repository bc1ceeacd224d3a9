"""A rank that dies ends the whole job: named, at once, and with nothing left running."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.pairs import IS_FULL

# The promise is any rank, any step, every time.
REPEATS = 20 if IS_FULL else 1
STRATEGIES = ("dp", "zero1", "hybrid_split_dp", "zero3")
START_DEADLINE_S = 120.0
END_DEADLINE_S = 30.0


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "whale_train.launcher.cli",
        f"hydra.run.dir={run_dir}",
        "data.max_bytes=100000",
        "data.sequence_length=16",
        "model.sequence_length=16",
        "model.width=32",
        "model.depth=2",
        "train.steps=100000",
        "train.global_batch=8",
        *overrides,
    ]


def processes_of(run_dir: Path) -> dict[int, str]:
    """Every living process that has the run directory in its command line, or its logs open."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            links = [os.readlink(link) for link in (entry / "fd").iterdir()]
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        mentions = str(run_dir) in line or any(link.startswith(str(run_dir)) for link in links)
        if mentions and state != "Z" and int(entry.name) != os.getpid():
            found[int(entry.name)] = (entry / "comm").read_text().strip()
    return found


def wait_for_steps(run_dir: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step was made in time"
        time.sleep(0.02)


@pytest.mark.parametrize("attempt", range(REPEATS))
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path, attempt: int) -> None:
    chosen = random.Random(attempt)
    strategy = STRATEGIES[attempt % len(STRATEGIES)]
    run_dir = tmp_path / "run"
    overrides = (f"strategy={strategy}", "hardware=cpu", "hardware.devices=3")
    process = subprocess.Popen(
        command(run_dir, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_steps(run_dir, chosen.randint(1, 30), process)
        ranks = {name: pid for pid, name in processes_of(run_dir).items() if "rank" in name}
        assert sorted(ranks) == ["whale-rank-0", "whale-rank-1", "whale-rank-2"]
        victim = chosen.randrange(3)
        os.kill(ranks[f"whale-rank-{victim}"], signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=END_DEADLINE_S)
        took = time.monotonic() - killed
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, errors
    assert took < END_DEADLINE_S
    assert f"rank {victim} (cpu_process, node 0, TaskGraph " in errors
    assert "was killed by SIGKILL at step " in errors
    assert errors.count("rank ") == 1, errors
    assert json.loads((run_dir / "failure.json").read_text())["rank"] == victim
    assert not processes_of(run_dir)


def test_ctrl_c_leaves_no_process_and_says_where_the_run_is(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command(run_dir, "strategy=zero1", "hardware=cpu", "hardware.devices=2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_steps(run_dir, 2, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=END_DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert errors == f"interrupted; what was written is in {run_dir}\n"
    assert not processes_of(run_dir)


# That the one that raised is named, with its traceback, test_host asks of a host alone.
@pytest.mark.full
def test_a_rank_that_raises_shows_its_own_traceback_once(tmp_path: Path) -> None:
    """The model's forward fails on one rank only, the one that gets the sample."""
    (tmp_path / "trouble.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(4, 3)\n"
        "    def forward(self, x):\n"
        "        if x.device.type != 'meta' and bool((x == 7).any()):\n"
        "            raise ValueError('seven is not for me')\n"
        "        return self.head(x)\n"
    )
    numpy = pytest.importorskip("numpy")
    x = numpy.zeros((64, 4), dtype=numpy.float32)
    x[13] = 7  # the fourth step's second sample, which is rank 0's
    numpy.savez(tmp_path / "samples.npz", x=x, labels=numpy.zeros(64, dtype=numpy.int64))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "whale_train.launcher.cli",
            "model._target_=trouble.Net",
            "model.loss=cross_entropy",
            "data=arrays",
            "data.path=samples.npz",
            "data.shuffle=false",
            "hardware=cpu",
            "hardware.devices=2",
            "train.global_batch=4",
            "train.steps=10",
            f"hydra.run.dir={tmp_path / 'run'}",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "rank 0 (cpu_process, node 0, TaskGraph model) failed" in done.stderr
    assert done.stderr.count("ValueError: seven is not for me") == 1
    assert done.stderr.count("Traceback") == 1
    assert not processes_of(tmp_path / "run")
