"""Kill ranks of a run again and again, and compare its end with that of an undisturbed run.

python benchmarks/soak.py --kills 100 --seed 7
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from whale_train.checkpoints.checkpoint_files import check, checkpoints_in, unfinished_in

EVERY = 2  # steps between checkpoints
STEPS_A_KILL = 4  # the least number of steps between two kills
TOLERANCE = 1e-5
DEADLINE_S = 7200.0
_MARK = "WHALE_SOAK"  # in the environment of the run and all it starts


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="zero1")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="whale-soak-"))
    try:
        soak(folder, options.kills, random.Random(options.seed), options.ranks, options.strategy)
    finally:
        shutil.rmtree(folder)


def soak(folder: Path, kills: int, draw: random.Random, ranks: int, strategy: str) -> None:
    """Run a job undisturbed and disturbed, print the faults of the second run, and exit.

    folder: the folder of both runs.
    kills: number of kills.
    draw: draws the ranks and the moments to kill.
    ranks: number of ranks.
    strategy: name of the strategy.
    """
    steps = (kills + 2) * (STEPS_A_KILL + EVERY + 2)
    calm, run = folder / "calm", folder / "run"
    process = start(calm, ranks, strategy, steps, 0)
    if process.wait(DEADLINE_S):
        sys.exit("the undisturbed run failed")
    started = time.monotonic()
    process = start(run, ranks, strategy, steps, kills)
    done = disturb(process, run, kills, draw, ranks)
    status = process.wait(DEADLINE_S)
    faults = wrong(calm, run, status, steps)
    attempts = json.loads((run / "attempts.json").read_text())
    repeated = [one["reached"] - two["began"] for one, two in pairwise(attempts)]
    seconds = time.monotonic() - started
    print(
        f"{done} kills in {seconds:.0f} s, {len(attempts)} attempts of {ranks} ranks, "
        f"{steps} steps; "
        f"at most {max(repeated, default=0)} steps were taken again; "
        f"last losses {losses(run)[-1]:.6f} and {losses(calm)[-1]:.6f} undisturbed"
    )
    for fault in faults:
        print(f"wrong: {fault}")
    sys.exit(bool(faults))


def start(
    run_dir: Path, ranks: int, strategy: str, steps: int, restarts: int
) -> "subprocess.Popen[bytes]":
    """Start a run of `steps` steps in `run_dir`, with at most `restarts` restarts."""
    command = [sys.executable, "-m", "whale_train.launcher.cli", f"strategy={strategy}"]
    command += ["hardware=cpu", f"hardware.devices={ranks}", f"train.global_batch={2 * ranks}"]
    command += ["model.width=64", "model.depth=2", "model.heads=4", f"train.steps={steps}"]
    command += [f"checkpoint.every={EVERY}", "checkpoint.keep=3", f"hydra.run.dir={run_dir}"]
    command += [f"launcher.max_restarts={restarts}"]
    with run_dir.with_suffix(".log").open("wb") as log:
        environment = os.environ | {_MARK: str(run_dir)}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def disturb(
    process: "subprocess.Popen[bytes]", run: Path, kills: int, draw: random.Random, ranks: int
) -> int:
    """Kill ranks at random steps and moments, at most `kills` times, and return the number of
    kills."""
    reached, done = 0, 0
    while done < kills and process.poll() is None:
        reached = max(reached, steps_of(run)) + STEPS_A_KILL + draw.randrange(EVERY + 1)
        rank, moment = draw.randrange(ranks), draw.random()
        while steps_of(run) < reached and process.poll() is None:
            time.sleep(0.005)
        # The moment is in the step, in the writing of its checkpoint, or in the next step.
        time.sleep(moment * 1.5 * step_s(run))
        for pid in processes(run):
            if Path(f"/proc/{pid}/comm").read_text().strip() == f"whale-rank-{rank}":
                os.kill(pid, signal.SIGKILL)
                done += 1
    return done


def wrong(calm: Path, run: Path, status: int, steps: int) -> list[str]:
    """Return sentences on all faults of the disturbed run: its status, losses, files and
    processes."""
    faults = [] if status == 0 else [f"exit status {status}"]
    own_losses, theirs = losses(run), losses(calm)
    if len(own_losses) != steps:
        faults.append(f"{len(own_losses)} of {steps} steps")
    far = [
        a / b - 1 for a, b in zip(own_losses, theirs, strict=False) if abs(a / b - 1) > TOLERANCE
    ]
    if far:
        faults.append(f"{len(far)} losses are off, by {max(map(abs, far)):.1e} at most")
    for path in checkpoints_in(run / "checkpoints"):
        check(path)
    faults += [f"{path} is left" for path in unfinished_in(run)]
    deadline = time.monotonic() + 5
    while processes(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    return faults + [f"process {pid} is left" for pid in processes(run)]


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the complete lines of a run's metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def steps_of(run: Path) -> int:
    """Return the number of the last step in a run's metrics; 0 without metrics."""
    records = metrics(run)
    return int(records[-1]["step"]) if records else 0


def step_s(run: Path) -> float:
    """Return the seconds of the last step in a run's metrics; 0 without metrics."""
    records = metrics(run)
    return records[-1]["step_time_s"] if records else 0.0


def losses(run: Path) -> list[float]:
    """Return the losses in a run's metrics."""
    return [line["loss"] for line in metrics(run)]


def processes(run: Path) -> list[int]:
    """Return the ids of a run's living processes, which have a mark in their environment."""
    mark, pids = f"{_MARK}={run}".encode(), []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            if mark in environment and (entry / "cmdline").read_bytes():
                pids.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return pids


if __name__ == "__main__":
    main()
