"""How fast this machine's devices compute and its links carry: `mode=calibrate`, on the ranks.

Every rank measures at once, as it will compute beside the others. Those that compute the same wait
for the slowest before they go on, and so of every run what its slowest rank took is kept. One
process alone, where it would have more threads, is measured in turns with them: a machine that
others use is faster at one time than at another, and plans compare the one with the others. How
operations are timed is `roofline_fit.py`'s, and of ZeRO `zero_probes.py`'s.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

from whale_train.runtime.calibrate.block_probes import BLOCKS, ProbedBlock
from whale_train.runtime.calibrate.probes import Probe, probes
from whale_train.runtime.calibrate.roofline_fit import UNBOUND, KernelTimes, Runs
from whale_train.runtime.calibrate.timing import agreed, now, undisturbed
from whale_train.runtime.calibrate.zero_probes import partition_kernels
from whale_train.runtime.comms.process_groups import homes
from whale_train.runtime.cpu.shm_collectives import SharedMemoryGroup
from whale_train.runtime.engines.cpu_norms import total_norm
from whale_train.runtime.engines.optimizers import MakeOptimizer
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.hardware.cluster import Kernel, Link, Roofline

RESULT = "calibration.json"
_PASSES = 3  # over all that is measured
_REPEATS = 5
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 8 << 20
_FEW, _UPDATED = 64, 1 << 22  # elements of the parameters whose update is timed
_UPDATES = 2  # of each in a pass


def calibrate(
    run_dir: Path,
    device: torch.device,
    precision: str,
    make_optimizer: MakeOptimizer,
    alone: int | None,
    chosen: Sequence[Probe] | None = None,
    blocks: Sequence[ProbedBlock] = BLOCKS,
) -> None:
    """Measure, together with all other ranks; rank 0 also by itself, with `alone` threads (None:
    with no others than it has), and it writes `run_dir/calibration.json`: of all ranks, and of the
    one, mappings of `Calibration`'s fields but for the device's name. `chosen` are the probes
    (None: all), and `blocks` what operations between products are timed in."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    listed = list(probes()) if chosen is None else chosen
    beside_others, by_itself = (
        _Computing(KernelTimes(listed, blocks), device, precision, make_optimizer) for _ in range(2)
    )
    links, memories = list[Link](), list[Link]()
    shared = _shared_memory_group()
    for _ in range(_PASSES):
        if ranks > 1:
            links.append(measured_link(dist.group.WORLD, device, carried_by_waiting=False))
        if shared is not None:
            memories.append(measured_link(shared, device, carried_by_waiting=True))
        beside_others.take(dist.barrier)
        if alone is not None:
            if rank == 0:
                with _threads(alone):
                    by_itself.take(lambda: None)
            dist.barrier()
    kernels = beside_others.kernels(_slowest)
    link, memory = _median_link(links), _median_link(memories)
    if link is not None:
        kernels |= partition_kernels(device, precision, link, kernels[KernelKind.UPDATE].forward)
    everyones: list[dict[KernelKind, Kernel]] = [{} for _ in range(ranks)]
    dist.all_gather_object(everyones, kernels)
    if rank == 0:
        kernels = {kind: _median_kernel([each[kind] for each in everyones]) for kind in kernels}
        threads = torch.get_num_threads() if device.type == "cpu" else 0
        found = [_written(threads, ranks, precision, kernels, link, memory)]
        if alone is not None:
            kernels = by_itself.kernels(lambda mine: mine)
            found.append(_written(alone, 1, precision, kernels, None, None))
        (run_dir / RESULT).write_text(json.dumps(found, indent=1) + "\n")


class _Computing:
    """What operations and updates take a rank, taken in passes."""

    def __init__(
        self,
        times: KernelTimes,
        device: torch.device,
        precision: str,
        make_optimizer: MakeOptimizer,
    ) -> None:
        self._times, self._device, self._precision = times, device, precision
        self._make_optimizer = make_optimizer
        self._few_s, self._many_s = list[float](), list[float]()
        self._updated_bytes = 0.0  # when many are

    def take(self, together: Callable[[], object]) -> None:
        """Measure in one pass. `together` waits for those that measure at the same time."""
        self._times.take(self._device, self._precision, together)
        for elements, taken in ((_FEW, self._few_s), (_UPDATED, self._many_s)):
            together()
            seconds, self._updated_bytes = _updates(elements, self._device, self._make_optimizer)
            taken += seconds

    def kernels(self, slowest: Callable[[Runs], Runs]) -> dict[KernelKind, Kernel]:
        """Return the rooflines of all kinds of operations but ZeRO's. `slowest` gives the most that
        any rank took of a run."""
        kernels = self._times.kernels(slowest)
        overhead, whole = undisturbed(self._few_s), undisturbed(self._many_s)
        rate = self._updated_bytes / max(whole - overhead, 1e-9)
        update = Roofline(overhead, UNBOUND, rate)
        return {**kernels, KernelKind.UPDATE: Kernel(update, update)}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many of this process compute, and then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _written(
    threads: int,
    ranks: int,
    precision: str,
    kernels: Mapping[KernelKind, Kernel],
    link: Link | None,
    memory: Link | None,
) -> dict[str, Any]:
    return {
        "threads": threads,
        "ranks": ranks,
        "kernels": {precision: {kind: asdict(kernel) for kind, kernel in kernels.items()}},
        "link": link and asdict(link),
        "shared_memory": memory and asdict(memory),
    }


def _slowest(mine: Runs) -> Runs:
    """Return, of every run, the seconds of the rank that took longest."""
    everyones: list[Runs] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return [
        [max(of_ranks) for of_ranks in zip(*of_probe, strict=True)]
        for of_probe in zip(*everyones, strict=True)
    ]


def _shared_memory_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks as shard groups have it, where all can share memory."""
    if dist.get_world_size() == 1 or len(set(homes())) > 1:
        return None
    return SharedMemoryGroup.new(
        list(range(dist.get_world_size())), timedelta(minutes=5), "calibrate"
    )


def _median_link(links: Sequence[Link]) -> Link | None:
    """Return the median of a link measured several times, some time apart."""
    if not links:
        return None
    return Link(
        links[0].name,
        median(link.bandwidth_bytes_s for link in links),
        median(link.latency_s for link in links),
        median(link.busy for link in links),
    )


def _median_kernel(kernels: Sequence[Kernel]) -> Kernel:
    def middle(rooflines: Sequence[Roofline]) -> Roofline:
        return Roofline(
            median(x.overhead_s for x in rooflines),
            median(x.flops_s for x in rooflines),
            median(x.bytes_s for x in rooflines),
        )

    return Kernel(middle([x.forward for x in kernels]), middle([x.backward for x in kernels]))


def measured_link(
    group: dist.ProcessGroup | None, device: torch.device, *, carried_by_waiting: bool
) -> Link:
    """Return an alpha-beta link through which all-reduces of `group` take as long as they do, as
    rings. `carried_by_waiting`: a rank carries them itself while it waits; else they go on beside
    its computing, and `busy` is how much they slow it."""
    members = dist.get_world_size(group)
    small = _all_reduce_s(group, device, _SMALL_BYTES, 40)
    large = _all_reduce_s(group, device, _LARGE_BYTES, 12)
    latency = small / (2 * (members - 1))
    moved = 2 * (members - 1) / members * _LARGE_BYTES
    bandwidth = moved / max(large - small, 1e-9)
    busy = 1.0 if carried_by_waiting else _busy(group, device, large)
    return Link("measured", bandwidth, latency, busy)


def _all_reduce_s(
    group: dist.ProcessGroup | None, device: torch.device, num_bytes: int, times: int
) -> float:
    """Return the seconds of one all-reduce, the same on all ranks: the median of their medians."""
    value = torch.zeros(num_bytes // 4, device=device)
    taken = []
    for _ in range(times + 2):
        dist.barrier()
        started = now(device)
        dist.all_reduce(value, group=group)
        taken.append(now(device) - started)
    return agreed(median(taken[2:]))


def _busy(group: dist.ProcessGroup | None, device: torch.device, transfer_s: float) -> float:
    """Return how much longer computing takes for a second of transfers beside it."""
    factor = torch.randn(512, 512, device=device)
    value = torch.zeros(_LARGE_BYTES // 4, device=device)
    transfers = 4

    def computing(products: int) -> float:
        started = now(device)
        for _ in range(products):
            factor.mm(factor)
        return now(device) - started

    computing(4)
    products = max(4, int(agreed(1.5 * transfers * transfer_s / (computing(8) / 8))))
    extra = []
    for _ in range(_REPEATS):
        dist.barrier()
        alone = computing(products)
        dist.barrier()
        works = [dist.all_reduce(value, group=group, async_op=True) for _ in range(transfers)]
        beside = computing(products)
        for work in works:
            assert work is not None
            work.wait()
        extra.append((beside - alone) / (transfers * transfer_s))
    return agreed(min(1.0, max(0.0, median(extra))))


def _updates(elements: int, device: torch.device, make: MakeOptimizer) -> tuple[list[float], float]:
    """Return the seconds of some of an optimizer's updates, and the bytes of one as `roofline.py`
    counts them: states and weights read and written, gradients read once for it and once for their
    norm."""
    parameters = [torch.nn.Parameter(torch.randn(elements // 8, device=device)) for _ in range(8)]
    optimizer, taken = make(parameters), []
    for _ in range(_UPDATES + 1):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        started = now(device)
        total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        taken.append(now(device) - started)
    first = parameters[0]
    kept = optimizer.state[first].values()
    states = sum(torch.is_tensor(x) and x.shape == first.shape for x in kept)
    return taken[1:], 4.0 * elements * (2 * states + 4)
