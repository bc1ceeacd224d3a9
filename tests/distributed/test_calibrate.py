"""Measuring a machine: what probes claim to do, what is fitted to them, what ranks write."""

import json
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.harness import run_ranks
from torch import distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from whale_train.runtime.calibrate import block_probes
from whale_train.runtime.calibrate import calibrate as calibrating
from whale_train.runtime.calibrate import roofline_fit as kernel_times
from whale_train.runtime.calibrate import zero_probes as partition_probes
from whale_train.runtime.calibrate.block_probes import (
    SMALLEST,
    ProbedBlock,
    blocks_for,
    run_block,
)
from whale_train.runtime.calibrate.calibrate import RESULT, Ranks, measure_devices
from whale_train.runtime.calibrate.probes import Measured, Probe, probes
from whale_train.runtime.calibrate.roofline_fit import KernelTimes, fitted
from whale_train.runtime.calibrate.timing import moment, seconds, undisturbed
from whale_train.runtime.calibrate.zero_probes import through
from whale_train.runtime.engines.deepspeed import DeepSpeedEngine
from whale_train.runtime.optim.optimizers import make_optimizer
from whale_train.strategies.cost.op_work import BY_FLOPS, KernelKind
from whale_train.strategies.hardware.calibration import Calibration
from whale_train.strategies.hardware.cluster import Roofline

CPU = torch.device("cpu")


def test_what_is_disturbed_most_of_the_time_counts_as_undisturbed() -> None:
    assert undisturbed([9.0, 1.0, 8.0, 1.0, 1.0, 9.0, 8.0, 7.0]) == 1.0


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_every_kind_has_a_probe_that_is_all_overhead_and_larger_ones(device_type: str) -> None:
    between = [probe for block in blocks_for(device_type) for probe in probes_in(block)]
    listed = (*probes(device_type), *between)
    kinds = {kind: [p for p in listed if p.kind is kind] for kind in KernelKind}
    for other in (
        KernelKind.UPDATE,
        KernelKind.PARTITION,
        KernelKind.GATHER,
        KernelKind.SCALED,
    ):  # an optimizer's, an engine's, and what products in bf16 tell
        assert not kinds.pop(other)
    for kind, found in kinds.items():
        first, *larger = found
        assert first.num_bytes < 20_000, kind
        assert bool(larger) == (kind is not KernelKind.VIEW)
        assert all(probe.num_bytes > 10 * first.num_bytes for probe in larger)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_probes_fit_into_a_small_device(device_type: str) -> None:
    """What one keeps, and its gradients, in a GPU of 8 GB, or in what a process has."""
    room = 8e9 if device_type == "cuda" else 1e9
    for probe in probes(device_type):
        assert 2 * probe.length * max(probe.num_bytes, probe.backward_bytes) < room, probe


def test_a_gpu_is_kept_busy() -> None:
    """Products that take it a tenth of a millisecond and more (an H100 multiplies 1e15 a second)
    or move more than its caches hold."""
    _, *products = (p for p in probes("cuda") if p.kind is KernelKind.PRODUCT)
    assert sum(probe.flops > 1e11 for probe in products) >= 2
    assert all(probe.flops > 5e9 for probe in products)


def test_a_gpu_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between which it was busy for 250 ms; what the host did meanwhile is not in it."""
    ticks, waited = count(1000, 250), list[float]()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1.0

        def record(self, stream: str) -> None:
            assert stream == "the stream of cuda:1"
            self.at = float(next(ticks))

        def synchronize(self) -> None:
            waited.append(self.at)

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    device = torch.device("cuda:1")
    first, last = moment(device), moment(device)
    assert seconds(first, last) == 0.25
    assert waited == [1250.0]


@pytest.mark.parametrize("kind", sorted(BY_FLOPS - {KernelKind.SCALED}))
@pytest.mark.parametrize("number", [0, 1, -1])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_probes_do_what_they_say(device_type: str, number: int, kind: KernelKind) -> None:
    probe = [p for p in probes(device_type) if p.kind is kind][number]
    value, held = probe.make(2, torch.device("meta"))  # where all products are counted
    with FlopCounterMode(display=False) as counter:
        result = probe.step(probe.step(value, 0, held), 1, held)
    assert counter.get_total_flops() == 2 * probe.flops
    result.sum().backward()  # type: ignore[no-untyped-call]
    assert value.grad is not None


@pytest.mark.parametrize("by_flops", [True, False])
def test_a_roofline_is_found_again(by_flops: bool) -> None:
    real = Roofline(1e-5, 8e10 if by_flops else 1e30, 7e9)
    sizes = [(0.0, 0.0), (1e8, 1e6), (1e9, 4e6), (3e7, 4e6), (5e8, 5e7)]
    found = fitted(by_flops, [(f, b, real.seconds(f, b)) for f, b in sizes])
    for flops, num_bytes in sizes:
        expected = real.seconds(flops, num_bytes)
        assert found.seconds(flops, num_bytes) == pytest.approx(expected, rel=1e-6)


def test_no_rate_is_negative_however_odd_the_times() -> None:
    found = fitted(True, [(0.0, 0.0, 1e-3), (1e6, 1e6, 1e-3), (1e9, 1e3, 1e-3), (1e3, 1e9, 1.0)])
    assert min(found.overhead_s, found.flops_s, found.bytes_s) > 0


@pytest.mark.parametrize("overheads", [1, 48])
def test_overheads_and_bytes_are_told_apart(overheads: int) -> None:
    few = 1 if overheads == 1 else 8
    found = through([(overheads, 0.0, overheads * 2e-3), (few, 4e8, few * 2e-3 + 0.1)])
    assert found.seconds(0.0, 0.0) == pytest.approx(2e-3)
    assert found.seconds(0.0, 8e8) == pytest.approx(2e-3 + 0.2)


def test_an_engine_that_costs_nothing_is_no_faster_than_none() -> None:
    found = through([(1, 0.0, -1e-3), (1, 4e8, -0.2)])
    assert 0 < found.seconds(0.0, 4e8) < 1e-6


def probes_in(block: ProbedBlock) -> list[Probe]:
    return [each.probe for each in run_block(block, torch.device("meta"), "fp32")]


def test_what_is_between_products_is_timed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock on which a tick is an operation begun or ended, each takes one forward and one
    backward, those between products alone are told, and of each kind one in either width."""
    ticks = count()
    monkeypatch.setattr(block_probes, "moment", lambda device: float(next(ticks)))
    found = run_block(ProbedBlock(6, 4, 8), CPU, "fp32")
    assert {(each.forward_s, each.backward_s) for each in found} == {(1.0, 1.0)}
    widths: dict[KernelKind, list[float]] = {}
    for each in found:
        assert each.probe.kind not in BY_FLOPS
        widths.setdefault(each.probe.kind, []).append(each.probe.num_bytes)
    assert all(wide == 2 * narrow for wide, narrow in widths.values())
    # Every one of them and a product before it, twice each.
    assert next(ticks) == 2 * 2 * 2 * len(found)


def test_a_block_says_how_fast_bytes_move_and_a_chain_what_is_over_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chains of 2 s an operation; in blocks 5 s to look at the clock and 3 s a byte, 7 s in the
    backward."""

    def timed(*_: object) -> tuple[list[float], list[float]]:
        return [2.0], [4.0]

    def run(block: ProbedBlock, *_: object) -> list[Measured]:
        sizes = [(p, 0.0 if block == SMALLEST else p.num_bytes) for p in probes_in(block)]
        return [Measured(p, 5 + 3 * size, 5 + 7 * size) for p, size in sizes]

    monkeypatch.setattr(kernel_times, "_timed", timed)
    monkeypatch.setattr(kernel_times, "run_block", run)
    kinds = {probe.kind for probe in probes_in(SMALLEST)}
    alone, blocks = (
        [p for p in probes("cpu") if p.kind in kinds],
        [ProbedBlock(6, 4, 8), ProbedBlock(8, 4, 16)],
    )
    times = KernelTimes(alone, blocks)
    for _ in range(2):
        times.take(CPU, "fp32", lambda: None)
    for kernel in times.kernels(lambda mine: mine).values():
        assert kernel.forward.seconds(0.0, 1e3) == pytest.approx(2 + 3e3)
        assert kernel.backward.seconds(0.0, 1e3) == pytest.approx(4 + 7e3)


def runs_of(rank_factor: Sequence[float], kinds: Sequence[str]) -> Any:
    factor = rank_factor[dist.get_rank()]
    return calibrating._slowest([[factor * x for x in (1.0, 2.0)], [3.0]], kinds)


def test_of_every_run_the_slowest_rank_of_its_kind_counts() -> None:
    slow, slower = [[1.5, 3.0], [3.0]], [[2.0, 4.0], [3.0]]
    assert run_ranks(runs_of, 3, (1.0, 2.0, 1.5), ("a", "b", "a")) == [slow, slower, slow]


def measured(folder: str) -> tuple[list[int], list[int]]:
    """How many steps each of DeepSpeed's engines left out; and the threads this rank had whenever
    it was its turn."""
    engines, threads = list[Any](), list[int]()

    class Noted(DeepSpeedEngine):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            engines.append(self._engine)

    class Told(KernelTimes):
        def take(self, *args: Any) -> None:
            threads.append(torch.get_num_threads())
            super().take(*args)

    vars(partition_probes)["DeepSpeedEngine"] = Noted
    vars(calibrating)["KernelTimes"] = Told
    first_of_each: dict[KernelKind, list[Probe]] = {}
    for probe in probes("cpu"):
        first_of_each.setdefault(probe.kind, []).append(probe)
    few = [probe for found in first_of_each.values() for probe in found[:2]]
    # As a host says it.
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    make = make_optimizer("adamw", {"lr": 0.1, "fused": True})
    torch.set_num_threads(1)
    ranks = Ranks(("cpu_process",) * 2, (0, 0))
    measure_devices(Path(folder), ranks, CPU, "fp32", make, 2, few, [ProbedBlock(64, 16, 32)])
    return [engine.skipped_steps for engine in engines], threads


def test_ranks_measure_together_and_one_alone_in_turns_with_them(tmp_path: Path) -> None:
    first, second = run_ranks(measured, 2, str(tmp_path))
    # Small and larger modules under stage 1 and 3: all of their steps end in an update.
    assert first == ([0] * 4, [1, 2] * 3)
    assert second == ([0] * 4, [1] * 3)
    written = json.loads((tmp_path / RESULT).read_text())
    both, one = map(Calibration.from_mapping, written["devices"])
    assert (both.device, one.device, written["network"]) == ("cpu_process", "cpu_process", None)
    assert (both.ranks, both.threads, one.ranks, one.threads) == (2, 1, 1, 2)
    kinds = set(KernelKind) - {KernelKind.SCALED}
    assert both.kernels["fp32"].keys() == kinds
    assert one.kernels["fp32"].keys() == kinds - {KernelKind.PARTITION, KernelKind.GATHER}
    for kind, kernel in (*both.kernels["fp32"].items(), *one.kernels["fp32"].items()):
        for roofline in (kernel.forward, kernel.backward):
            assert roofline.overhead_s > 0, kind
            assert min(roofline.flops_s, roofline.bytes_s) > 0, kind
    assert (one.link, one.shared_memory) == (None, None)
    for link in (both.link, both.shared_memory):
        assert link is not None
        assert link.bandwidth_bytes_s > 0
        assert link.latency_s > 0
        assert 0 <= link.busy <= 1
