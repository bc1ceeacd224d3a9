"""Hosts that are too small for what a plan would have them hold."""

from dataclasses import replace

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
from tests.unit.test_show_plan import PROFILE, mixed_plan

from whale_train.errors import Fault
from whale_train.launcher.planning.devices.host_memory import refuse_small_hosts, weight_bytes
from whale_train.machine.hosts import Host, Seen, joined
from whale_train.runtime.engines.accelerator import use_accelerator

WHOLE = weight_bytes(PROFILE)


def hosts(*memory_bytes: int) -> tuple[Host, ...]:
    ranks = mixed_plan().world_size // len(memory_bytes)
    of_each = [Seen(str(n), f"host{n}", 8, size, ()) for n, size in enumerate(memory_bytes)]
    return joined(each for each in of_each for _ in range(ranks))


def refused(there: tuple[Host, ...], on_cpu: bool = False, is_whole: bool = True) -> list[str]:
    faults: list[Fault] = []
    refuse_small_hosts(mixed_plan(), PROFILE, there, is_whole, on_cpu, faults)
    return [str(fault) for fault in faults]


def test_weights_are_built_whole_by_every_rank_that_others_started() -> None:
    ranks = mixed_plan().world_size // 2
    enough, little = ranks * WHOLE, ranks * WHOLE - 1
    assert refused(hosts(enough, enough)) == []
    (said,) = refused(hosts(enough, little))
    assert f"built whole on host1 by each of its {ranks} ranks before they are cut" in said
    assert said.endswith("; use model.init=sharded, which builds them tensor by tensor")
    assert refused(hosts(enough, little), is_whole=False) == []


def test_weights_are_built_once_for_ranks_of_the_launchers() -> None:
    (host,) = hosts(WHOLE)
    alone = replace(host, ranks=(), visible=())
    assert refused((alone,)) == []
    (said,) = refused((replace(alone, memory_bytes=WHOLE - 1),))
    assert "built whole on host0 before they are cut, and there are" in said


def test_processes_share_what_their_host_has() -> None:
    plan = mixed_plan()
    needed = int(sum(rank.memory_bytes.total for rank in plan.ranks[: plan.world_size // 2]))
    size = max(needed // 2, plan.world_size // 2 * WHOLE)
    assert size < needed
    assert refused(hosts(size, 10**13)) == []
    (said,) = refused(hosts(size, 10**13), on_cpu=True)
    assert "of host0, whose memory its processes share: there are" in said


def test_deepspeed_works_where_the_plan_says() -> None:
    before = get_accelerator()
    try:
        set_accelerator(CUDA_Accelerator())  # as where there is a GPU
        use_accelerator(torch.device("cpu"))
        assert get_accelerator().device_name() == "cpu"
    finally:
        set_accelerator(before)
