"""Train a model that no single host could hold, with hosts limited by control groups.

python benchmarks/small_hosts.py
python benchmarks/small_hosts.py --one-host --memory-gb 8

By default there are four hosts: namespaces that share neither network nor files, each with one rank
and a control group with less memory than the model's weights. With `--one-host`, four ranks on one
host train low-rank additions to a Llama of 3.02 B parameters in bf16. `model.init=whole` must be
refused before any rank starts. With `model.init=sharded`, two steps are trained. The peak of each
rank's resident memory, minus that of the same rank with a tiny model, is compared with the plan.
The script needs root, iproute2, util-linux and a writable hierarchy of control groups.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed.apart import HostApart, hosts_apart

GB = 1e9
PORT = 29411
HOSTS = ("apple", "fig", "pear", "plum")
DEADLINE_S = 1800.0
COMMAND = (
    *("-m", "whale_train.launcher.cli", "model=gpt", "strategy=zero3", "optimizer=sgd"),
    *("hardware=cpu", f"hardware.devices={len(HOSTS)}"),
    *("model.sequence_length=16", "data.sequence_length=16", "data.max_bytes=100000"),
    *("train.global_batch=4", "train.steps=2", "checkpoint.final=false", "model.heads=16"),
)
LLAMA = (
    *("-m", "whale_train.launcher.cli", "model=hf", "model.architecture=LlamaForCausalLM"),
    *("model.adapters={r: 8}", "strategy=split", "hardware=cpu", "hardware.devices=4"),
    *("train.precision=bf16", "data.sequence_length=4", "data.max_bytes=100000"),
    *("train.global_batch=4", "train.steps=2", "checkpoint.final=false"),
    f"launcher.timeout_s={DEADLINE_S}",
)
LARGE_LLAMA = (
    "model.config={hidden_size: 2560, num_hidden_layers: 37, num_attention_heads: 20,"
    "num_key_value_heads: 20, intermediate_size: 6912, vocab_size: 16000}"
)
TINY_LLAMA = (
    "model.config={hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4,"
    "num_key_value_heads: 4, intermediate_size: 64, vocab_size: 1000}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--memory-gb", type=float, default=5.0, help="of each host")
    parser.add_argument("--one-host", action="store_true", help="four ranks in one group")
    options = parser.parse_args()
    if options.one_host:
        one_host(options.memory_gb * GB)
        return
    large = (f"model.width={options.width}", f"model.depth={options.depth}")
    tiny = ("model.width=64", "model.depth=2")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "job"
        folder.mkdir()
        memory = options.memory_gb * GB
        with hosts_apart(folder, HOSTS, "10gbit") as hosts, groups(HOSTS, memory) as folders:
            peaks_of_whole = run(hosts, folders, folder / "whole", *large)
            if peaks_of_whole is not None:
                sys.exit("model.init=whole was not refused")
            sharded = run(hosts, folders, folder / "sharded", *large, "model.init=sharded")
            small = run(hosts, folders, folder / "tiny", *tiny, "model.init=sharded")
            if sharded is None or small is None:
                sys.exit("model.init=sharded did not train")
    show(sharded, small)


def one_host(memory_bytes: float) -> None:
    """Train adapters of the Llama in one control group, and print the memory of the ranks.

    memory_bytes: the memory limit of the group.

    Exits the process where a job has another exit status than expected.
    """
    with tempfile.TemporaryDirectory() as name, groups(("one",), memory_bytes) as (group,):
        memories = []
        jobs = (("whole", LARGE_LLAMA), ("sharded", LARGE_LLAMA), ("sharded", TINY_LLAMA))
        for init, model in jobs:
            run_dir = Path(name) / str(len(memories))
            command = (*LLAMA, model, f"model.init={init}", f"hydra.run.dir={run_dir}")
            joins = f'echo $$ > {group}/cgroup.procs; exec "$@"'
            done = subprocess.run(["sh", "-c", joins, "-", sys.executable, *command], check=False)
            if done.returncode != (2 if init == "whole" else 0):
                sys.exit(f"model.init={init} ended with status {done.returncode}")
            memories.append(None if init == "whole" else memory_of(run_dir))
    _, sharded, small = memories
    assert sharded is not None
    assert small is not None
    show(sharded, small)


def run(
    hosts: Sequence[HostApart], made: Sequence[Path], run_dir: Path, *overrides: str
) -> tuple[list[float], list[float]] | None:
    """Run a job on the hosts, and return the planned and the peak resident bytes of each rank.

    hosts: the hosts, with one rank each.
    made: the folders of the hosts' control groups.
    run_dir: the run directory.
    overrides: further overrides of the command.

    Returns None where the job was refused. Exits the process where the job failed.
    """
    shared = {"MASTER_ADDR": HOSTS[0], "MASTER_PORT": str(PORT), "WORLD_SIZE": str(len(HOSTS))}
    shared |= {"WHALE_TRAIN_SECRET": "5" * 64, "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
    shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    started = []
    for rank, (host, group) in enumerate(zip(hosts, made, strict=True)):
        joins = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        command = (sys.executable, *COMMAND, *overrides, f"hydra.run.dir={run_dir}")
        started.append(
            subprocess.Popen(
                host.command("sh", "-c", joins, "-", *command),
                env=os.environ | shared | {"RANK": str(rank), "GROUP_RANK": str(rank)},
            )
        )
    statuses = [process.wait(DEADLINE_S) for process in started]
    if set(statuses) == {2}:
        return None
    if any(statuses):
        sys.exit(f"exit statuses {statuses}")
    return memory_of(run_dir)


def memory_of(run_dir: Path) -> tuple[list[float], list[float]]:
    """Return the planned and the peak resident bytes of each rank of a run."""
    plan = json.loads((run_dir / "plan.json").read_text())
    planned = [rank["memory_bytes"]["total"] for rank in plan["ranks"]]
    return planned, json.loads((run_dir / "summary.json").read_text())["peak_memory_bytes"]


@contextmanager
def groups(names: Sequence[str], memory_bytes: float) -> Iterator[list[Path]]:
    """Make a control group for each name, and yield the groups' folders. The groups are removed
    afterwards.

    names: the names of the groups.
    memory_bytes: the memory limit of each group.

    Both versions of control groups are supported.
    """
    root = Path("/sys/fs/cgroup")
    root, limit = (
        (root / "memory", "memory.limit_in_bytes")
        if (root / "memory").is_dir()
        else (root, "memory.max")
    )
    folders = [root / f"whale-train-{os.getpid()}-{name}" for name in names]
    try:
        for group in folders:
            group.mkdir()
            (group / limit).write_text(str(int(memory_bytes)))
        yield folders
    finally:
        for group in folders:
            if group.is_dir():
                group.rmdir()


def show(
    of_large: tuple[Sequence[float], Sequence[float]],
    of_tiny: tuple[Sequence[float], Sequence[float]],
) -> None:
    """Print the planned memory of each rank, and the measured memory minus that of a tiny model.

    of_large, of_tiny: the planned and the peak resident bytes of each rank with either model.
    """
    planned = of_large[0]
    measured = [peak - base for peak, base in zip(of_large[1], of_tiny[1], strict=True)]
    table = Table(box=None)
    for name in ("rank", "planned GB", "resident GB", "off by"):
        table.add_column(name, justify="right")
    for rank, (plan, resident) in enumerate(zip(planned, measured, strict=True)):
        row = (f"{plan / GB:.2f}", f"{resident / GB:.2f}", f"{resident / plan - 1:+.1%}")
        table.add_row(str(rank), *row)
    Console().print(table)


if __name__ == "__main__":
    main()
