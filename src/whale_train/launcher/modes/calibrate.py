"""Run `mode=calibrate`: measure this machine's devices and links, and save the measurements for
later plans."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml
from pydantic import TypeAdapter
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from whale_train.config import Request
from whale_train.data.open import DataOptions
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.job_end import JobEnd, finish, never_met
from whale_train.launcher.planning.devices.calibrations import keep_calibration
from whale_train.launcher.planning.devices.placing import threads_of
from whale_train.launcher.planning.plan_request import Resolved, resolve_request
from whale_train.launcher.ranks.external_ranks import JobProcess, RendezvousTimeout
from whale_train.launcher.ranks.rank_env import LaunchPlace
from whale_train.launcher.ranks.run_files import make_run_dir, start_ranks
from whale_train.launcher.ranks.stop_signals import StopSignals
from whale_train.launcher.ui.terminal import Portable
from whale_train.machine.limits import cores
from whale_train.models.options import ModelOptions
from whale_train.quantities import in_seconds
from whale_train.strategies.hardware.calibration import Calibration
from whale_train.strategies.hardware.cluster import Cluster, Link

_MODEL = {"_target_": "whale_train.models.class_head.ClassHead", "num_classes": 10}
_DATA = {"kind": "classes", "num_classes": 10, "num_samples": 1000}
_SAMPLES = 1000  # so that every rank has at least one


def calibrate(
    request: Request,
    run_dir: Path,
    console: Console,
    place: LaunchPlace | None,
    signals: StopSignals,
) -> JobEnd:
    """Start ranks that measure their devices and links, then save and show the measurements.

    The devices are this host's, or the devices of all hosts on which another launcher has started
    the ranks (`place`). On CPUs, the number of measuring processes is at most the number of cores.
    """
    request = measuring(request)
    run_dir = make_run_dir(request, run_dir)
    process = JobProcess(run_dir, place)
    try:
        with process.planned(request, signals.poll, console) as resolved:
            refuse_others(resolved)
        asked = count = resolved.plan.world_size
        if place is None:
            count = at_once(resolved.cluster)
        if count < asked:
            console.print(f"{count} of {asked} processes measure: as many as there are cores for")
            request = measuring(request, count)
            resolved = resolve_request(request.model_copy(update={"mode": "train"}))
        start_ranks(run_dir, resolved, request)
        threads = partial(threads_of, request, cores())
        console.print(announced(resolved.cluster, count, threads))
        outcome = process.wait(signals.poll)
    except RendezvousTimeout as error:
        return never_met(error.outcome, run_dir)
    finally:
        process.stop()
    if outcome.status != "done":
        return finish(outcome, resolved, run_dir, console)
    show(kept_of(run_dir), console)
    return JobEnd("done", run_dir)


def measuring(request: Request, devices: int | None = None) -> Request:
    """Return the request of the ranks that measure.

    Each device holds a copy of a model so small that it does not disturb the measurement.

    devices: number of devices; None for all devices of `request`.
    """
    data: TypeAdapter[DataOptions] = TypeAdapter(DataOptions)
    request = request.without_evaluations()
    train = {"global_batch": _SAMPLES, "accumulate": 1}
    return request.model_copy(
        update={
            "model": ModelOptions.from_mapping(_MODEL),
            "data": data.validate_python(_DATA),
            "strategy": {"devices": devices or "auto", "graph": {"replicate": {}}},
            "train": request.train.model_copy(update=train),
            "names": {**request.names, "model": "class_head", "data": "classes"},
        }
    )


def at_once(cluster: Cluster) -> int:
    """Return the number of devices that measure at the same time: at most one process for each
    processor.

    More processes would also measure the wait for a processor, which plans account for separately.
    """
    return max(1, int(min(len(cluster.devices), cluster.processors)))


def refuse_others(resolved: Resolved) -> None:
    """Raise ConfigError where the plan emulates its devices, which cannot be measured here."""
    if resolved.emulated:
        rule = f"measures the devices that are here, and those of hardware={resolved.cluster.name} "
        rule += "are others"
        raise ConfigError([Fault("mode", "calibrate", rule, "use hardware=local or hardware=cpu")])


def announced(cluster: Cluster, count: int, threads_of: Callable[[int], int]) -> str:
    """Return the line that announces a calibration, with its devices and its likely duration.

    cluster: the devices of the request.
    count: number of devices that measure; they are the first ones of `cluster`.
    threads_of: maps a number of processes to the number of threads of each process.
    """
    kinds = Counter(device.name for device in cluster.first(count).devices)
    said = "measuring " + " and ".join(f"{number} x {kind}" for kind, number in kinds.items())
    threads_each, alone = threads_of(count), threads_of(1)
    if cluster.on_cpu and threads_each != alone:
        said += f", {_in_threads(threads_each)}, in turns with one that has {alone}"
    across = len({node.at for node in cluster.nodes}) > 1
    return f"{said}: {'a minute or two' if across else 'less than a minute'}"


def _in_threads(threads: int) -> str:
    """Return the number of threads of each process, in words."""
    return f"{threads} thread{'s' if threads > 1 else ''} each"


@dataclass(frozen=True)
class KeptCalibration:
    """The measurements of all ranks.

    devices: the calibration of each kind of device, with the file that it is saved in.
    network: the link between hosts; None on one host.
    """

    devices: tuple[tuple[Calibration, Path], ...]
    network: Link | None


def kept_of(run_dir: Path) -> KeptCalibration:
    """Return the measurements in a run directory's `calibration.json`, and save them in one file
    for each kind of device."""
    content = json.loads((run_dir / "calibration.json").read_text(encoding="utf-8"))
    calibrations = (Calibration.from_mapping(mapping) for mapping in content["devices"])
    network = content["network"] and Link(**content["network"])
    return KeptCalibration(
        tuple((calibration, keep_calibration(calibration)) for calibration in calibrations), network
    )


def show(calibration_kept: KeptCalibration, console: Console) -> None:
    """Print a table for each kind of device, then the network between hosts in the form of an
    inventory.

    A table has a row for each kind of operation. A line for each link follows. The output needs 60
    columns.
    """
    for calibration, path in calibration_kept.devices:
        console.print(Portable(_view(calibration, path)))
    if calibration_kept.network is not None:
        figures = {
            "bandwidth_bytes_s": float(f"{calibration_kept.network.bandwidth_bytes_s:.4g}"),
            "latency_s": float(f"{calibration_kept.network.latency_s:.3g}"),
        }
        line = yaml.safe_dump({"network": figures}, default_flow_style=None, sort_keys=False)
        console.print(Text("between hosts, as an inventory says it:", style="bold"))
        console.print(Text(line.strip()), soft_wrap=True)


def _view(calibration: Calibration, path: Path) -> Group:
    """Return the table of one kind of device, its links, and the file of its calibration."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("operation")
    for name in ("each", "FLOP/s", "bytes/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for kinds in calibration.kernels.values():
        for kind, kernel in kinds.items():
            forward = kernel.forward
            rates = (_rate(forward.flops_s), _rate(forward.bytes_s))
            table.add_row(*map(Text, (kind, in_seconds(forward.overhead_s), *rates)))
    lines = [
        Text(f"{name}: {_rate(link.bandwidth_bytes_s)} bytes/s, {in_seconds(link.latency_s)} each")
        for name, link in _links(calibration)
    ]
    title = f"{calibration.ranks} x {calibration.device}"
    if calibration.threads:
        title += f", {_in_threads(calibration.threads)}"
    return Group(
        Text(title, style="bold"),
        table,
        *lines,
        Text(f"kept in {path}; plans for {calibration.device} use it"),
    )


def _links(calibration: Calibration) -> list[tuple[str, Link]]:
    """Return the measured links of a calibration, by name."""
    pairs = (("link", calibration.link), ("shared memory", calibration.shared_memory))
    return [(name, link) for name, link in pairs if link is not None]


_REACHED = 1e25  # a calibration has a higher rate where it has found no limit


def _rate(rate: float) -> str:
    """Return a rate, in FLOP/s or bytes/s, as text in units of 1e9; `-` for a rate without a
    limit."""
    return f"{rate / 1e9:,.2f} G" if rate < _REACHED else "-"
