"""Time every kind of operation, in passes, and fit rooflines to the times."""

from collections.abc import Callable, Sequence

import torch

from whale_train.runtime.base.autocast import in_precision
from whale_train.runtime.calibrate.block_probes import SMALLEST, ProbedBlock, run_block
from whale_train.runtime.calibrate.probes import Measured, Probe
from whale_train.runtime.calibrate.timing import moment, seconds, undisturbed
from whale_train.strategies.cost.op_work import BY_FLOPS, KernelKind
from whale_train.strategies.hardware.cluster import Kernel, Roofline

UNBOUND = 1e30  # a rate that no measurement was limited by
_RUNS = 2  # runs of each probe in a pass

Runs = Sequence[Sequence[float]]  # seconds, by probe and run


class KernelTimes:
    """The times of operations on one device, in the chains of probes (`probes`) and in `blocks`.

    Every pass runs all of them, so that a temporary disturbance of the machine does not affect a
    single kind only.
    """

    def __init__(self, probes: Sequence[Probe], blocks: Sequence[ProbedBlock]) -> None:
        self._probes, self._blocks = probes, (SMALLEST, *blocks)
        self._forward: list[list[float]] = [[] for _ in probes]
        self._backward: list[list[float]] = [[] for _ in probes]
        self._in_blocks: list[list[list[Measured]]] = [[] for _ in self._blocks]

    def take(self, device: torch.device, precision: str, together: Callable[[], object]) -> None:
        """Measure one pass. `together` waits for the other ranks before each probe and each
        block."""
        for number, probe in enumerate(self._probes):
            together()
            ahead, back = _timed(probe, device, precision)
            self._forward[number] += ahead
            self._backward[number] += back
        for block, runs in zip(self._blocks, self._in_blocks, strict=True):
            together()
            runs += [run_block(block, device, precision) for _ in range(_RUNS + 1)][1:]

    def kernels(self, slowest: Callable[[Runs], Runs]) -> dict[KernelKind, Kernel]:
        """Return the rooflines of every kind of operation in the probes.

        Kinds between products have their rate of bytes from the blocks. `slowest` maps the seconds
        of this rank's runs to the seconds of the slowest rank in every run.
        """
        by_kind: dict[KernelKind, list[Measured]] = {}
        taken = zip(self._probes, slowest(self._forward), slowest(self._backward), strict=True)
        for probe, ahead, back in taken:
            measured = Measured(probe, undisturbed(ahead), undisturbed(back))
            by_kind.setdefault(probe.kind, []).append(measured)
        smallest, *larger = (_of_runs(runs) for runs in self._in_blocks)
        for measured in (figures for block in larger for figures in block):
            kind = measured.probe.kind
            # The smallest block measures the cost of reading the clock, which is subtracted.
            overhead = next(figures for figures in smallest if figures.probe.kind is kind)
            alone = by_kind[kind][0]
            by_kind[kind].append(
                Measured(
                    measured.probe,
                    alone.forward_s + max(measured.forward_s - overhead.forward_s, 0.0),
                    alone.backward_s + max(measured.backward_s - overhead.backward_s, 0.0),
                )
            )
        return {kind: _kernel(kind, measured) for kind, measured in by_kind.items()}


def _of_runs(runs: Sequence[Sequence[Measured]]) -> list[Measured]:
    """Return the undisturbed seconds of every probe, given several runs of the same probes."""
    return [
        Measured(
            probe_runs[0].probe,
            undisturbed(x.forward_s for x in probe_runs),
            undisturbed(x.backward_s for x in probe_runs),
        )
        for probe_runs in zip(*runs, strict=True)
    ]


def _timed(probe: Probe, device: torch.device, precision: str) -> tuple[list[float], list[float]]:
    """Return the seconds of one operation of `probe`, forward and backward, for each of several
    runs."""
    value, held = probe.make(probe.length, device)
    forward, backward = [], []
    for _ in range(_RUNS + 1):
        for tensor in (value, *held):
            tensor.grad = None
        started = moment(device)
        result = value
        with in_precision(precision, device):
            for i in range(probe.length):
                result = probe.step(result, i, held)
        between = moment(device)
        gradient = torch.ones_like(result)
        begun = moment(device)
        torch.autograd.backward([result], [gradient])
        ended = moment(device)
        forward.append(seconds(started, between) / probe.length)
        backward.append(seconds(begun, ended) / probe.length)
        del result
    return forward[1:], backward[1:]  # the first run includes the set-up of libraries


def _kernel(kind: KernelKind, measured: Sequence[Measured]) -> Kernel:
    """Return the rooflines fitted to the measurements of one kind."""
    forward = [(x.probe.flops, x.probe.num_bytes, x.forward_s) for x in measured]
    backward = [(x.probe.flops, x.probe.backward_bytes, x.backward_s) for x in measured]
    return Kernel(fitted(kind in BY_FLOPS, forward), fitted(kind in BY_FLOPS, backward))


def fitted(by_flops: bool, points: Sequence[tuple[float, float, float]]) -> Roofline:
    """Fit a roofline to the (FLOPs, bytes, seconds) of single operations, the first of which is all
    overhead.

    The fit is by least squares of the relative errors, with neither rate below 0. Unless
    `by_flops`, the time depends on bytes only.
    """
    (_, _, overhead), *rest = points
    flops, moved, target = [], [], []
    for f, b, taken in rest:
        flops.append(f / taken if by_flops else 0.0)
        moved.append(b / taken)
        target.append(max(taken - overhead, 0.0) / taken)
    per_flop, per_byte = _least_squares(flops, moved, target)
    return Roofline(
        overhead, 1 / per_flop if per_flop else UNBOUND, 1 / per_byte if per_byte else UNBOUND
    )


def _least_squares(
    first: Sequence[float], second: Sequence[float], target: Sequence[float]
) -> tuple[float, float]:
    """Return the factors x, y >= 0 that minimise the squared error of x * first + y * second to
    target."""

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
