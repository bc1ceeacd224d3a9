"""`mode=calibrate`, on the ranks: measure the computing speed of devices and the bandwidth of
links.

All ranks measure at once, as they will compute at once in training. Ranks of one kind of device
wait for the slowest before they continue, so for every run the time of the slowest of the kind
counts. A single process that would have more threads is measured in alternation with the ranks,
because plans compare the two, and a machine that others use is not always equally fast.
`roofline_fit.py` times operations, and `zero_probes.py` ZeRO.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

from whale_train.runtime.calibrate.block_probes import ProbedBlock, blocks_for
from whale_train.runtime.calibrate.probes import Probe, probes
from whale_train.runtime.calibrate.roofline_fit import UNBOUND, KernelTimes, Runs
from whale_train.runtime.calibrate.timing import agreed, moment, seconds, undisturbed
from whale_train.runtime.calibrate.zero_probes import partition_kernels
from whale_train.runtime.comms.process_groups import homes
from whale_train.runtime.cpu.shm_collectives import SharedMemoryGroup
from whale_train.runtime.optim.cpu_norms import total_norm
from whale_train.runtime.optim.optimizers import MakeOptimizer
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.hardware.cluster import Kernel, Link, Roofline

RESULT = "calibration.json"
DEVICES, NETWORK = "devices", "network"  # the keys of the result
_PASSES = 3  # over all measurements
_REPEATS = 5
_SMALL_BYTES = 1 << 10
_FEW = 64  # elements of parameters for which an update is all overhead
_UPDATES = 2  # timed updates of each size in a pass


@dataclass(frozen=True)
class _Large:
    """Sizes at which the time on a type of device is far more than overhead.

    sent_bytes: the bytes of an all-reduce.
    updated: the elements of parameters that are updated.
    rows: the rows (and columns) of the factors of a product.
    """

    sent_bytes: int
    updated: int
    rows: int


_ON_CPU, _ON_GPU = _Large(8 << 20, 1 << 22, 512), _Large(256 << 20, 1 << 27, 4096)


def _large(device: torch.device) -> _Large:
    """Return the large sizes of a type of device."""
    return _ON_GPU if device.type == "cuda" else _ON_CPU


@dataclass(frozen=True)
class Ranks:
    """The devices of a job, by rank.

    kinds: the name of the kind of device.
    nodes: the number of the node that the device is on.
    """

    kinds: tuple[str, ...]
    nodes: tuple[int, ...]


def measure_devices(
    run_dir: Path,
    ranks: Ranks,
    device: torch.device,
    precision: str,
    make_optimizer: MakeOptimizer,
    alone: int | None,
    chosen: Sequence[Probe] | None = None,
    blocks: Sequence[ProbedBlock] | None = None,
) -> None:
    """Measure together with all other ranks, and on rank 0 write `run_dir/calibration.json`.

    The file has mappings of `Calibration`'s fields under "devices", one for each kind of device and
    one for a single process, and the link between nodes under "network" (null on one node).

    alone: the number of threads with which rank 0 measures a single process; None: no single
        process is measured, as it would have no more threads.
    chosen: the probes; None: all for this type of device.
    blocks: the blocks in which operations between products are timed; None: all for this type of
        device.
    """
    rank, kind = dist.get_rank(), ranks.kinds[dist.get_rank()]
    of_node = _groups(ranks)
    across = len(set(ranks.nodes)) > 1
    measured_probes = list(probes(device.type)) if chosen is None else chosen
    blocks = blocks_for(device.type) if blocks is None else blocks
    beside_others, by_itself = (
        _Computing(KernelTimes(measured_probes, blocks), device, precision, make_optimizer)
        for _ in range(2)
    )
    links, memories, networks = list[Link](), list[Link](), list[Link]()
    for _ in range(_PASSES):
        if of_node.link is not None:
            links.append(measured_link(of_node.link, device))
        if of_node.memory is not None:
            memories.append(measured_link(of_node.memory, device, of_node.link))
        dist.barrier()
        if across:
            networks.append(measured_link(_world(), device))
        beside_others.take(dist.barrier)
        if alone is not None:
            if rank == 0:
                with _threads(alone):
                    by_itself.take(lambda: None)
            dist.barrier()
    kernels = beside_others.kernels(lambda own_runs: _slowest(own_runs, ranks.kinds))
    link, memory, network = map(_median_link, (links, memories, networks))
    joins_all = network if across else link
    if joins_all is not None:
        update = kernels[KernelKind.UPDATE].forward
        kernels |= partition_kernels(device, precision, joins_all, update)
    threads = torch.get_num_threads() if device.type == "cpu" else 0
    own = _Own(kind, threads, kernels, link, memory)
    gathered: list[_Own] = [own] * len(ranks.kinds)
    dist.all_gather_object(gathered, own)
    if rank == 0:
        devices = [
            _of_kind(
                [measurement for measurement in gathered if measurement.kind == kind], precision
            )
            for kind in dict.fromkeys(ranks.kinds)
        ]
        if alone is not None:
            kernels = by_itself.kernels(lambda own_runs: own_runs)
            devices.append(_written(kind, alone, 1, precision, kernels, None, None))
        content = {DEVICES: devices, NETWORK: network and asdict(network)}
        (run_dir / RESULT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Own:
    """The measurements of one rank.

    kind: the kind of its device.
    threads: the number of threads that it computes with; 0 on a GPU.
    kernels: the kernels of its device, by kind of operation.
    link: the link between the devices of its node; None if it is alone on the node.
    memory: the memory that the ranks of its node share; None if they share none.
    """

    kind: str
    threads: int
    kernels: Mapping[KernelKind, Kernel]
    link: Link | None
    memory: Link | None


def _of_kind(measurements: Sequence[_Own], precision: str) -> dict[str, Any]:
    """Return the JSON content of the calibration of one kind of device: the medians over its
    devices."""
    first = measurements[0]
    kernels = {
        op: _median_kernel([measurement.kernels[op] for measurement in measurements])
        for op in first.kernels
    }
    link = next(
        (measurement.link for measurement in measurements if measurement.link is not None), None
    )
    memory = next(
        (measurement.memory for measurement in measurements if measurement.memory is not None), None
    )
    return _written(first.kind, first.threads, len(measurements), precision, kernels, link, memory)


class _Computing:
    """The times of operations and updates on one rank, measured in passes."""

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
        self._updated_bytes = 0.0  # the bytes of the update of many elements

    def take(self, together: Callable[[], object]) -> None:
        """Measure one pass. `together` waits for the ranks that measure at the same time."""
        self._times.take(self._device, self._precision, together)
        large = _large(self._device).updated
        for elements, taken in ((_FEW, self._few_s), (large, self._many_s)):
            together()
            updates, self._updated_bytes = _updates(elements, self._device, self._make_optimizer)
            taken += updates

    def kernels(self, slowest: Callable[[Runs], Runs]) -> dict[KernelKind, Kernel]:
        """Return the rooflines of all kinds of operations but ZeRO's.

        `slowest` maps the seconds of this rank's runs to the seconds of the slowest rank in every
        run.
        """
        kernels = self._times.kernels(slowest)
        overhead, total = undisturbed(self._few_s), undisturbed(self._many_s)
        rate = self._updated_bytes / max(total - overhead, 1e-9)
        update = Roofline(overhead, UNBOUND, rate)
        return {**kernels, KernelKind.UPDATE: Kernel(update, update)}


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Make torch compute with `count` threads inside this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _written(
    kind: str,
    threads: int,
    ranks: int,
    precision: str,
    kernels: Mapping[KernelKind, Kernel],
    link: Link | None,
    memory: Link | None,
) -> dict[str, Any]:
    """Return the JSON content of the calibration of one kind of device."""
    return {
        "device": kind,
        "threads": threads,
        "ranks": ranks,
        "kernels": {precision: {kind: asdict(kernel) for kind, kernel in kernels.items()}},
        "link": link and asdict(link),
        "shared_memory": memory and asdict(memory),
    }


def _slowest(own_runs: Runs, kinds: Sequence[str]) -> Runs:
    """Return, for every run, the seconds of the slowest rank of this rank's kind. A collective."""
    all_runs: list[Runs] = [own_runs] * dist.get_world_size()
    dist.all_gather_object(all_runs, own_runs)
    kind = kinds[dist.get_rank()]
    runs_of_kind = [runs for runs, other in zip(all_runs, kinds, strict=True) if other == kind]
    return [
        [max(of_ranks) for of_ranks in zip(*of_probe, strict=True)]
        for of_probe in zip(*runs_of_kind, strict=True)
    ]


@dataclass(frozen=True)
class _Groups:
    """The groups of this rank's node.

    link: the node's ranks, over the link between its devices; None if this rank is alone.
    memory: the node's ranks, over the memory that they share; None if they share none.
    """

    link: dist.ProcessGroup | None
    memory: dist.ProcessGroup | None


def _groups(ranks: Ranks) -> _Groups:
    """Make the groups of every node, and return the groups of this rank's node."""
    rank, timeout, host_ids = dist.get_rank(), timedelta(minutes=5), homes()
    own = _Groups(None, None)
    for node in dict.fromkeys(ranks.nodes):
        members = [other for other, number in enumerate(ranks.nodes) if number == node]
        if len(members) < 2:
            continue
        is_whole = len(members) == len(ranks.nodes)
        link = _world() if is_whole else dist.new_group(members, timeout)
        memory = None
        if len({host_ids[member] for member in members}) == 1:
            memory = SharedMemoryGroup.new(members, timeout, "calibrate")
        if rank in members:
            own = _Groups(link, memory)
    return own


def _world() -> dist.ProcessGroup:
    """Return the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _median_link(links: Sequence[Link]) -> Link | None:
    """Return the median of several measurements of a link, or None without measurements."""
    if not links:
        return None
    return Link(
        links[0].name,
        median(link.bandwidth_bytes_s for link in links),
        median(link.latency_s for link in links),
        median(link.busy for link in links),
    )


def _median_kernel(kernels: Sequence[Kernel]) -> Kernel:
    """Return the median of several measurements of a kernel, figure by figure."""

    def middle(rooflines: Sequence[Roofline]) -> Roofline:
        return Roofline(
            median(x.overhead_s for x in rooflines),
            median(x.flops_s for x in rooflines),
            median(x.bytes_s for x in rooflines),
        )

    return Kernel(middle([x.forward for x in kernels]), middle([x.backward for x in kernels]))


def measured_link(
    group: dist.ProcessGroup, device: torch.device, beside: dist.ProcessGroup | None = None
) -> Link:
    """Return the alpha-beta link that predicts the measured times of `group`'s all-reduces, as
    rings.

    `busy` of the link is the time, from 0 to 1 second, that computing loses to one second of
    simultaneous transfers. In a group in shared memory the ranks move the data themselves while
    they wait, so it is 1. Such a group has no barrier; `beside` is then a group of the same ranks
    with a barrier.
    """
    meets = beside or group
    members = dist.get_world_size(group)
    small = _all_reduce_s(group, meets, device, _SMALL_BYTES, 40)
    sent = _large(device).sent_bytes
    large = _all_reduce_s(group, meets, device, sent, 12)
    latency = small / (2 * (members - 1))
    moved = 2 * (members - 1) / members * sent
    bandwidth = moved / max(large - small, 1e-9)
    busy = _busy(group, device, large) if beside is None else 1.0
    return Link("measured", bandwidth, latency, busy)


def _all_reduce_s(
    group: dist.ProcessGroup,
    meets: dist.ProcessGroup,
    device: torch.device,
    num_bytes: int,
    times: int,
) -> float:
    """Return the seconds of one all-reduce of `num_bytes`: the median over members of medians.

    The result is the same on all members. `meets` is a group of the same ranks with a barrier.
    """
    value = torch.zeros(num_bytes // 4, device=device)
    taken = []
    for _ in range(times + 2):
        dist.barrier(meets)
        started = moment(device)
        dist.all_reduce(value, group=group)
        taken.append(seconds(started, moment(device)))
    return agreed(median(taken[2:]), meets)


def _busy(group: dist.ProcessGroup, device: torch.device, transfer_s: float) -> float:
    """Return the seconds, from 0 to 1, that computing loses to one second of simultaneous
    transfers."""
    large = _large(device)
    factor = torch.randn(large.rows, large.rows, device=device)
    value = torch.zeros(large.sent_bytes // 4, device=device)
    transfers = 4

    def computing(products: int) -> float:
        started = moment(device)
        for _ in range(products):
            factor.mm(factor)
        return seconds(started, moment(device))

    computing(4)
    products = max(4, int(agreed(1.5 * transfers * transfer_s / (computing(8) / 8), group)))
    extra = []
    for _ in range(_REPEATS):
        dist.barrier(group)
        alone = computing(products)
        dist.barrier(group)
        works = [dist.all_reduce(value, group=group, async_op=True) for _ in range(transfers)]
        beside = computing(products)
        for work in works:
            assert work is not None
            work.wait()
        extra.append((beside - alone) / (transfers * transfer_s))
    return agreed(min(1.0, max(0.0, median(extra))), group)


def _updates(elements: int, device: torch.device, make: MakeOptimizer) -> tuple[list[float], float]:
    """Return the seconds of several updates of an optimizer, each with the norm of the gradients,
    and the bytes of one.

    The bytes are counted as in `roofline.py`: states and weights are read and written, gradients
    are read once by the update and once for the norm.
    """
    parameters = [torch.nn.Parameter(torch.randn(elements // 8, device=device)) for _ in range(8)]
    optimizer, taken = make(parameters), []
    for _ in range(_UPDATES + 1):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        started = moment(device)
        total_norm([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        taken.append(seconds(started, moment(device)))
    first = parameters[0]
    slots = optimizer.state[first].values()
    states = sum(torch.is_tensor(x) and x.shape == first.shape for x in slots)
    return taken[1:], 4.0 * elements * (2 * states + 4)
