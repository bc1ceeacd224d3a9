"""A rank that hangs ends the job in a message that names it and those who waited, and where."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
from tests.distributed.harness import run_ranks
from tests.distributed.test_faults import command, processes_of, wait_for_steps
from tests.pairs import some

from whale_train.launcher.ranks.host_process import RunFailure, describe_failure
from whale_train.runtime.cpu import shm_collectives
from whale_train.runtime.failures.failure import RankEnd, RankError, failure_among, first_failure
from whale_train.runtime.failures.timeouts import (
    StackCall,
    Wait,
    find_hang,
    is_waiting,
    read_stack,
    read_watchdog,
)
from whale_train.strategies.plan.group_names import group_name, plan_path
from whale_train.strategies.plan.plan import Plan, Prediction, TaskGraph

TIMEOUT_S = 5
# What the end of a job may take after its first timeout.
END_DEADLINE_S = 30.0

# A model of the user's own. The operation is opaque to torch.export, so it runs under every
# strategy; it never returns on rank HANGS from the sixth call on.
HANGING = """
import os, pathlib, time, torch
calls = 0
@torch.library.custom_op("hanging::pass_on", mutates_args=())
def pass_on(x: torch.Tensor) -> torch.Tensor:
    global calls
    if os.environ.get("RANK") == os.environ["HANGS"]:
        calls += 1
        if calls > 5:
            pathlib.Path("hanging_since").touch()
            time.sleep(3600)
    return x.clone()
@pass_on.register_fake
def _(x):
    return torch.empty_like(x)
pass_on.register_autograd(lambda ctx, gradient: gradient)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return pass_on(x) + self.down(torch.relu(self.up(x)))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(8, 3)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""

STAGES = "strategy.graph.pipeline.stages=[{stage: {}}, {stage: {}}]"
IN_COPIES = STAGES.replace("graph.pipeline", "graph.replicate.of.pipeline")


# By name: overrides, ranks, the one that hangs, who waits, in which group, of which path.
HANGS: dict[str, tuple[list[str], int, int, tuple[int, ...], list[str], str]] = {
    "dp": (
        *(["strategy=dp"], 3, 1, (0, 2), ["model.data_parallel"]),
        "strategy.graph.replicate",
    ),
    "zero1": (
        *(["strategy=zero1"], 2, 0, (1,), ["model.data_parallel"]),
        "strategy.graph.replicate",
    ),
    "split": (["strategy=split"], 2, 1, (0,), ["model.model_parallel"], "strategy.graph.split"),
    "pipeline_first": (
        ["strategy=pipeline", STAGES],
        *(2, 0, (1,), ["stage_0 to stage_1"]),
        "strategy.graph.pipeline.stages[0].stage to strategy.graph.pipeline.stages[1].stage",
    ),
    "pipeline_last": (
        ["strategy=pipeline", STAGES],
        *(2, 1, (0,), ["stage_1 to stage_0"]),
        "strategy.graph.pipeline.stages[1].stage to strategy.graph.pipeline.stages[0].stage",
    ),
    "nested": (
        ["strategy=3d", IN_COPIES, "strategy.balance=even"],
        *(4, 3, (1, 2), ["stage_1 to stage_0", "stage_1.data_parallel"]),
        "strategy.graph.replicate.of.pipeline.stages[1].stage",
    ),
}


# The nested one waits as copies and as stages do.
@pytest.mark.parametrize("name", some(HANGS, ["nested"]))
def test_a_hanging_rank_is_named(tmp_path: Path, name: str) -> None:
    overrides, ranks, hangs, waits, group, path = HANGS[name]
    (tmp_path / "hanging.py").write_text(HANGING)
    x = numpy.random.default_rng(0).normal(size=(64, 8)).astype(numpy.float32)
    numpy.savez(tmp_path / "samples.npz", x=x, labels=numpy.zeros(64, dtype=numpy.int64))
    run_dir = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "whale_train.launcher.cli"),
            *("model._target_=hanging.Net", "model.loss=cross_entropy"),
            *("data=arrays", "data.path=samples.npz", "train.steps=1000", "train.global_batch=16"),
            *("hardware=cpu", f"hardware.devices={ranks}", f"launcher.timeout_s={TIMEOUT_S}"),
            *(f"hydra.run.dir={run_dir}", *overrides),
        ],
        cwd=tmp_path,
        env={**os.environ, "HANGS": str(hangs)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    took = time.time() - (tmp_path / "hanging_since").stat().st_mtime
    assert took < TIMEOUT_S + END_DEADLINE_S
    message = done.stderr.splitlines()[0]
    failure = json.loads((run_dir / "failure.json").read_text())
    assert failure["kind"] == "timeout"
    assert failure["absent"] == [hangs], message
    assert failure["rank"] in waits, message
    assert message.startswith(f"error: rank {failure['rank']} (cpu_process, node 0, TaskGraph ")
    assert f" waited {TIMEOUT_S} s at step {failure['step']}" in message
    assert any(f" in group {name} ({path}" in message for name in group), message
    assert f") for rank {hangs}, which did not arrive; rank {hangs} was last seen in " in message
    assert "pass_on (hanging.py:" in message
    assert (", in receive" in message) == (" to " in message), message
    # What hangs is shown, not what waits for it.
    assert "hanging.py" in done.stderr.splitlines()[-2]
    assert "Traceback" not in done.stderr
    assert not processes_of(run_dir)


def test_a_stopped_rank_is_named_though_it_cannot_answer(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    overrides = ("strategy=dp", "hardware=cpu", "hardware.devices=2")
    process = subprocess.Popen(
        command(run_dir, *overrides, f"launcher.timeout_s={TIMEOUT_S}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for_steps(run_dir, 3, process)
        ranks = {name: pid for pid, name in processes_of(run_dir).items() if "rank" in name}
        os.kill(ranks["whale-rank-1"], signal.SIGSTOP)
        _, errors = process.communicate(timeout=TIMEOUT_S + END_DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 1, errors
    steps = len((run_dir / "metrics.jsonl").read_text().splitlines())
    ending = f"for rank 1, which did not arrive; rank 1 was last seen in step {steps}"
    assert errors.splitlines()[0].endswith(ending), errors
    assert f"CollectiveTimeout: waited {TIMEOUT_S} s" in errors  # its own traceback's end
    assert not processes_of(run_dir)


# Every group's time limit.


def limits(plan: Plan) -> dict[str, tuple[float, float, str]]:
    """For each group of this rank, one that is not the plan's among them: the seconds it may wait
    when it is made, and when all are limited to 9; and its description."""
    import torch
    from torch import distributed as dist

    from whale_train.runtime.comms.process_groups import limit_waits, make_groups
    from whale_train.runtime.cpu.shm_collectives import SharedMemoryGroup

    def limit(group: dist.ProcessGroup) -> float:
        backend = group._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())

    groups = make_groups(plan, dist.get_rank(), timedelta(seconds=7))
    # Its time limit is its own, from the beginning.
    sums = groups.pop("front.data_parallel.sums", None)
    assert isinstance(sums, SharedMemoryGroup) == (dist.get_rank() < 2)
    groups["another"] = dist.new_group()
    made = {name: limit(group) for name, group in groups.items()}
    limit_waits(timedelta(seconds=9))
    return {name: (made[name], limit(group), group.group_desc) for name, group in groups.items()}


def test_every_group_has_the_time_limit_and_the_plan_s_name() -> None:
    for rank, found in enumerate(run_ranks(limits, 3, plan())):
        inner = "back.data_parallel" if rank == 2 else "front.data_parallel"
        assert found[inner] == (7.0, 9.0, inner)
        assert {name: limited for name, (_, limited, _) in found.items()} == {
            **dict.fromkeys(("world", "another", "shared.head.weight"), 9.0),
            inner: 9.0,
        }


# What is said of a wait: no processes.


def plan() -> Plan:
    """front on ranks 0 and 1, back on rank 2, both on all of them once more as `both`."""
    parts = [
        TaskGraph(number, name, "replicate", path, (), (), 1.0, 0, {}, ((0, 1),), (1,))
        for number, (name, path) in enumerate([("front", "graph[0]"), ("back", "graph[1]")])
    ]
    return Plan(
        cluster="cpu",
        world_size=3,
        global_batch=1,
        precision="fp32",
        task_graphs=tuple(parts),
        groups={
            "world": ((0, 1, 2),),
            "front.data_parallel": ((0, 1),),
            "back.data_parallel": ((2,),),
            "shared.head.weight": ((0, 1, 2),),
        },
        schedule="none",
        ranks=(),
        predicted=Prediction(1, 1, 1, 0, 0, 0),
        decisions=(),
    )


def test_a_group_has_its_most_telling_name_and_the_path_of_its_task_graph() -> None:
    assert group_name(plan(), (0, 1)) == "front.data_parallel"
    assert group_name(plan(), (0, 1, 2)) == "shared.head.weight"
    assert group_name(plan(), (1, 2)) == "world"
    assert plan_path(plan(), "back.data_parallel") == "graph[1]"
    assert plan_path(plan(), "shared.head.weight") == "the holders of head.weight"
    assert plan_path(plan(), "world") == "the whole job"


def wait_of(*ranks: int) -> Wait:
    return Wait(f"g{len(ranks)}", "p", ranks, 3.0)


BUSY = (
    StackCall("/home/me/mine.py", 7, "forward"),
    StackCall("/site/torch/nn/module.py", 1, "_call"),
)
WAITING = (StackCall("/site/torch/distributed/distributed_c10d.py", 5, "all_reduce"), *BUSY)


@pytest.mark.parametrize(
    ("waits", "others", "stacks", "found"),
    [
        # One does not come; who waits, but longer than the others or elsewhere, is not blamed.
        ({0: wait_of(0, 1, 2)}, [], {1: WAITING, 2: BUSY}, (0, (2,))),
        ({0: wait_of(0, 1, 2)}, [], {1: BUSY, 2: ()}, (0, (1, 2))),
        # Cut off by the end of rank 0: they were there.
        ({0: wait_of(0, 1, 2)}, [1], {2: BUSY}, (0, (2,))),
        # A chain: rank 0 waits for 1, who waits for 2.
        ({0: wait_of(0, 1), 1: wait_of(1, 2)}, [], {2: BUSY}, (1, (2,))),
        # The smaller group tells more.
        ({0: wait_of(0, 1, 2), 1: wait_of(1, 2)}, [], {2: BUSY}, (1, (2,))),
        # All live ones wait, so it is one of those after all.
        ({0: wait_of(0, 1)}, [], {1: WAITING}, (0, (1,))),
        # It came when the others had left.
        ({0: wait_of(0, 1)}, [1], {}, (0, (1,))),
        # It is in no group that was waited in.
        ({0: wait_of(0, 1), 1: wait_of(0, 1)}, [], {2: BUSY}, (0, (2,))),
        # Nobody is missing: they wait for each other.
        ({0: wait_of(0, 1), 1: wait_of(0, 1, 2), 2: wait_of(1, 2)}, [], {}, (0, ())),
    ],
)
def test_who_did_not_come(
    waits: dict[int, Wait],
    others: list[int],
    stacks: dict[int, tuple[StackCall, ...]],
    found: tuple[int, tuple[int, ...]],
) -> None:
    hang = find_hang(waits, others, stacks, step=18)
    assert (hang.rank, hang.absent) == found


def test_a_wait_is_told_in_one_sentence() -> None:
    wait = Wait("front.data_parallel", "graph[0]", (0, 1, 2), 1800.0, "receive of chunk 1", 17)
    head = (
        "waited 1800 s at step 17, in receive of chunk 1, in group front.data_parallel (graph[0])"
    )
    assert find_hang({0: wait}, [2], {1: ()}, 18).message == (
        f"{head} for rank 1, which did not arrive; rank 1 was last seen in step 17"
    )
    assert find_hang({0: wait}, [], {1: BUSY, 2: ()}, None).message == (
        f"{head} for ranks 1 and 2, who did not arrive; rank 1 was last seen in forward (mine.py:7)"
    )
    everybody = {0: wait, 1: wait_of(0, 1), 2: wait_of(0, 2)}
    assert find_hang(everybody, [], {}, 18).message == (
        f"{head}, whose other members waited elsewhere: "
        "rank 1 waited 3 s in group g2 (p); rank 2 waited 3 s in group g2 (p)"
    )


def test_the_main_thread_s_stack_is_read_from_a_dump() -> None:
    dump = (
        "an earlier line of the log\n"
        "Thread 0x00007f1 (most recent call first):\n"
        '  File "/lib/threading.py", line 3 in wait\n'
        "\n"
        "Current thread 0x00007f2 (most recent call first):\n"
        '  File "/home/me/mine.py", line 7 in forward\n'
        '  File "/site/torch/nn/module.py", line 1 in _call\n'
    )
    assert read_stack(dump) == BUSY
    assert read_stack("a line of the log\n") == ()
    assert is_waiting(WAITING)
    assert is_waiting((StackCall("/site/torch/autograd/graph.py", 1, "_engine_run_backward"),))
    shared_memory = str(Path(shm_collectives.__file__))
    assert is_waiting((StackCall(shared_memory, 1, "_take"),))
    assert not is_waiting(BUSY)
    assert not is_waiting(())


# torch 2.6's words, with a group of ours.
WATCHDOG = (
    "[rank1]:[E626 06:24:44.90 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE, NumelIn=9, NumelOut=9, "
    "Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
    "[rank1]:[E626 06:24:44.90 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 1({group}) Rank 1] "
    "Exception (either an error or timeout) detected by watchdog at work: 8, last enqueued NCCL "
    "work: 11, last completed NCCL work: 7.\n"
)


def test_what_nccl_s_watchdog_logged_is_a_wait() -> None:
    log = WATCHDOG.replace("{group}", "front.data_parallel")
    expected = Wait("front.data_parallel", "graph[0]", (0, 1), 600.0, None, 4)
    assert read_watchdog(log, plan(), 1, 4) == expected
    world = Wait("shared.head.weight", "the holders of head.weight", (0, 1, 2), 600.0, None, 4)
    assert read_watchdog(WATCHDOG.replace("{group}", "default_pg"), plan(), 1, 4) == world
    assert read_watchdog("terminate called after a CUDA error\n", plan(), 1, 4) is None


def test_a_wait_in_vain_comes_after_the_causes_of_waits() -> None:
    def error(rank: int, time_s: float, wait: Wait | None, communication: bool = True) -> RankError:
        return RankError(rank, time_s, "E", "m", communication, 5, f"traceback of {rank}", wait)

    waited, cut_off = error(0, 9.0, wait_of(0, 1, 2)), error(1, 9.5, None)
    raised = error(2, 9.9, None, communication=False)
    ends = [RankEnd(0, 1, 9.1)]
    hung = first_failure(ends, {0: waited, 1: cut_off}, 5, {2: BUSY})
    assert (hung.kind, hung.rank, hung.absent, hung.step) == ("timeout", 0, (2,), 5)
    assert "mine.py" in (hung.traceback or "")
    own = first_failure(ends, {0: waited, 2: raised}, 5, {1: BUSY})
    assert (own.kind, own.rank) == ("exception", 2)
    # Where no host saw the ranks end, one without a word hangs if the others' time was up.
    alone = failure_among({0: waited, 1: cut_off}, 3)
    assert (alone.kind, alone.absent, alone.traceback) == ("timeout", (2,), "traceback of 0")
    assert failure_among({0: error(0, 9.0, None), 1: cut_off}, 3).rank == 2


def test_the_message_has_the_place_and_the_log_of_the_one_that_waited() -> None:
    failure = RunFailure(0, "timeout", "logs/rank_0.log", message="waited", traceback="Stack\n")
    assert describe_failure(failure, "P") == "rank 0 (P) waited\nStack\nIts log: logs/rank_0.log"
