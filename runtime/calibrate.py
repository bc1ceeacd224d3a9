"""How fast this machine's devices compute and its links carry: `mode=calibrate`, on the ranks.

Every rank measures at once, as it will compute beside the others. Those that compute the same wait
for the slowest before they go on, and so of every run what its slowest rank took is kept. What is
run to measure computing is `probes.py`'s and `block_probes.py`'s, and to measure
ZeRO `partition_probes.py`'s.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
from torch import distributed as dist

from whale_train.runtime.block_probes import BLOCKS, SMALLEST, Block, run_block
from whale_train.runtime.clock import agreed, now, undisturbed
from whale_train.runtime.engine import autocast
from whale_train.runtime.norms import total_norm
from whale_train.runtime.optimizers import MakeOptimizer
from whale_train.runtime.partition_probes import partition_kernels
from whale_train.runtime.probes import Measured, Probe, probes
from whale_train.runtime.shared_memory import SharedMemoryGroup, home
from whale_train.strategies.cluster import Kernel, Link, Roofline
from whale_train.strategies.work import BY_FLOPS, Kind

RESULT = "calibration.json"
_PASSES, _RUNS = 3, 2  # over all probes, and of each in one of them
_REPEATS = 5
_UNBOUND = 1e30  # a rate whose limit nothing reached
_SMALL_BYTES, _LARGE_BYTES = 1 << 10, 8 << 20
_UPDATED = 1 << 22  # elements of the parameters whose update is timed


def calibrate(
    run_dir: Path,
    device: torch.device,
    precision: str,
    optimizer: MakeOptimizer,
    chosen: Sequence[Probe] | None = None,
    blocks: Sequence[Block] = BLOCKS,
) -> None:
    """Measure, together with all other ranks; rank 0 writes `run_dir/calibration.json`, a mapping
    of `Calibration`'s fields but for the device's name. `chosen` are the probes (None: all), and
    `blocks` what operations between products are timed in."""
    ranks = dist.get_world_size()
    listed = list(probes()) if chosen is None else chosen
    links, memories = list[Link](), list[Link]()
    shared = _shared_memory_group()

    def look_at_links() -> None:
        if ranks > 1:
            links.append(measured_link(dist.group.WORLD, device, carried_by_waiting=False))
        if shared is not None:
            memories.append(measured_link(shared, device, carried_by_waiting=True))

    look_at_links()
    kernels = measured_kernels(listed, blocks, device, precision, dist.barrier, _slowest)
    look_at_links()
    update = _update(device, optimizer)
    kernels[Kind.UPDATE] = Kernel(update, update)
    look_at_links()
    link, memory = _median_link(links), _median_link(memories)
    if link is not None:
        kernels |= partition_kernels(device, precision, link, update)
    everyones: list[dict[Kind, Kernel]] = [{} for _ in range(ranks)]
    dist.all_gather_object(everyones, kernels)
    if dist.get_rank() == 0:
        found = {
            "threads": torch.get_num_threads() if device.type == "cpu" else 0,
            "ranks": ranks,
            "kernels": {
                precision: {
                    kind: asdict(_median_kernel([each[kind] for each in everyones]))
                    for kind in kernels
                }
            },
            "link": link and asdict(link),
            "shared_memory": memory and asdict(memory),
        }
        (run_dir / RESULT).write_text(json.dumps(found, indent=1) + "\n")


def _shared_memory_group() -> dist.ProcessGroup | None:
    """As shard groups have it, where all ranks can share memory."""
    ranks = dist.get_world_size()
    homes: list[str | None] = [None] * ranks
    dist.all_gather_object(homes, home())
    if ranks == 1 or dist.get_backend() != "gloo" or homes[0] is None or len(set(homes)) > 1:
        return None
    return SharedMemoryGroup.new(list(range(ranks)), timedelta(minutes=5), "calibrate")


def _median_link(links: Sequence[Link]) -> Link | None:
    """Of one measured several times, some time apart."""
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
    """An alpha-beta link through which all-reduces of `group` take as long as they do, as rings.
    `carried_by_waiting`: a rank carries them itself while it waits; else they go on beside its
    computing, and `busy` is how much they slow it."""
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
    """Seconds of one, the same on all ranks: the median of their medians."""
    value = torch.zeros(num_bytes // 4, device=device)
    taken = []
    for _ in range(times + 2):
        dist.barrier()
        started = now(device)
        dist.all_reduce(value, group=group)
        taken.append(now(device) - started)
    return agreed(median(taken[2:]))


def _busy(group: dist.ProcessGroup | None, device: torch.device, transfer_s: float) -> float:
    """How much longer computing takes for a second of transfers beside it."""
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


def _update(device: torch.device, make: MakeOptimizer) -> Roofline:
    """An optimizer's update, in bytes as `cost.py` counts them: states and weights read and
    written, gradients read once for it and once for their norm."""

    def seconds(elements: int) -> tuple[float, float]:
        parameters = [
            torch.nn.Parameter(torch.randn(elements // 8, device=device)) for _ in range(8)
        ]
        optimizer, taken = make(parameters), []
        for _ in range(_REPEATS + 1):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            started = now(device)
            total_norm([p.grad for p in parameters if p.grad is not None])
            optimizer.step()
            taken.append(now(device) - started)
        first = parameters[0]
        kept = optimizer.state[first].values()
        states = sum(torch.is_tensor(x) and x.shape == first.shape for x in kept)
        return undisturbed(taken[1:]), 4.0 * elements * (2 * states + 4)

    dist.barrier()
    overhead, _ = seconds(64)
    dist.barrier()
    whole, moved = seconds(_UPDATED)
    return Roofline(overhead, _UNBOUND, moved / max(whole - overhead, 1e-9))


Runs = Sequence[Sequence[float]]  # seconds: of every probe, those of each of its runs


def measured_kernels(
    listed: Sequence[Probe],
    blocks: Sequence[Block],
    device: torch.device,
    precision: str,
    together: Callable[[], None],
    slowest: Callable[[Runs], Runs],
) -> dict[Kind, Kernel]:
    """The rooflines of every kind of operation `listed` on `device`, of which those between
    products move their bytes as in `blocks`. `together` waits for the other ranks, before each
    probe, and `slowest` gives the most that any of them took. All probes are run several times
    over, so that what else the machine does for a while is in no kind's figures alone."""
    forward: list[list[float]] = [[] for _ in listed]
    backward: list[list[float]] = [[] for _ in listed]
    in_blocks: list[list[list[Measured]]] = [[] for _ in (SMALLEST, *blocks)]
    for _ in range(_PASSES):
        for number, probe in enumerate(listed):
            together()
            times = _timed(probe, device, precision)
            forward[number] += times[0]
            backward[number] += times[1]
        for block, runs in zip((SMALLEST, *blocks), in_blocks, strict=True):
            together()
            runs += [run_block(block, device, precision) for _ in range(_RUNS + 1)][1:]
    found: dict[Kind, list[Measured]] = {}
    for probe, ahead, back in zip(listed, slowest(forward), slowest(backward), strict=True):
        measured = Measured(probe, undisturbed(ahead), undisturbed(back))
        found.setdefault(probe.kind, []).append(measured)
    smallest, *larger = (_of_runs(runs) for runs in in_blocks)
    for measured in (each for block in larger for each in block):
        kind = measured.probe.kind
        # What stopping to look at the clock adds is taken off.
        least = next(each for each in smallest if each.probe.kind is kind)
        alone = found[kind][0]
        found[kind].append(
            Measured(
                measured.probe,
                alone.forward_s + max(measured.forward_s - least.forward_s, 0.0),
                alone.backward_s + max(measured.backward_s - least.backward_s, 0.0),
            )
        )
    return {kind: _kernel(kind, measured) for kind, measured in found.items()}


def _slowest(mine: Runs) -> Runs:
    """Of every run what it took the rank that took longest."""
    everyones: list[Runs] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return [
        [max(of_ranks) for of_ranks in zip(*of_probe, strict=True)]
        for of_probe in zip(*everyones, strict=True)
    ]


def _of_runs(runs: Sequence[Sequence[Measured]]) -> list[Measured]:
    """Of several runs of the same."""
    return [
        Measured(
            each[0].probe,
            undisturbed(x.forward_s for x in each),
            undisturbed(x.backward_s for x in each),
        )
        for each in zip(*runs, strict=True)
    ]


def _timed(probe: Probe, device: torch.device, precision: str) -> tuple[list[float], list[float]]:
    """Seconds of one of the operations in some runs, forward and backward."""
    value, held = probe.make(probe.length, device)
    forward, backward = [], []
    for _ in range(_RUNS + 1):
        for tensor in (value, *held):
            tensor.grad = None
        started = now(device)
        result = value
        with autocast(precision, device):
            for i in range(probe.length):
                result = probe.step(result, i, held)
        between = now(device)
        gradient = torch.ones_like(result)
        begun = now(device)
        torch.autograd.backward([result], [gradient])
        ended = now(device)
        forward.append((between - started) / probe.length)
        backward.append((ended - begun) / probe.length)
        del result
    return forward[1:], backward[1:]  # the first run pays for what libraries set up


def _kernel(kind: Kind, measured: Sequence[Measured]) -> Kernel:
    forward = [(x.probe.flops, x.probe.num_bytes, x.forward_s) for x in measured]
    backward = [(x.probe.flops, x.probe.backward_bytes, x.backward_s) for x in measured]
    return Kernel(fitted(kind in BY_FLOPS, forward), fitted(kind in BY_FLOPS, backward))


def fitted(by_flops: bool, points: Sequence[tuple[float, float, float]]) -> Roofline:
    """The roofline through (FLOPs, bytes, seconds) of single operations, the first of which is all
    overhead: least squares of the relative errors, neither rate below 0."""
    (_, _, overhead), *rest = points
    flops, moved, target = [], [], []
    for f, b, seconds in rest:
        flops.append(f / seconds if by_flops else 0.0)
        moved.append(b / seconds)
        target.append(max(seconds - overhead, 0.0) / seconds)
    per_flop, per_byte = _least_squares(flops, moved, target)
    return Roofline(
        overhead, 1 / per_flop if per_flop else _UNBOUND, 1 / per_byte if per_byte else _UNBOUND
    )


def _least_squares(
    first: Sequence[float], second: Sequence[float], target: Sequence[float]
) -> tuple[float, float]:
    """Factors x, y >= 0 for which x * first + y * second comes nearest to target."""

    def dot(a: Sequence[float], b: Sequence[float]) -> float:
        return sum(p * q for p, q in zip(a, b, strict=True))

    aa, ab, bb = dot(first, first), dot(first, second), dot(second, second)
    at, bt = dot(first, target), dot(second, target)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
    alone = [(at / aa, 0.0)] if aa else []
    alone += [(0.0, bt / bb)] if bb else []
    return min(
        alone or [(0.0, 0.0)],
        key=lambda xy: sum(
            (xy[0] * f + xy[1] * s - t) ** 2 for f, s, t in zip(first, second, target, strict=True)
        ),
    )
