"""`mode=calibrate`: this machine's devices and links measured, and the figures kept for plans."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from whale_train.config import Request
from whale_train.data.open import DataOptions
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.planning.calibrations import keep
from whale_train.launcher.planning.plan_request import Resolved
from whale_train.launcher.ui.terminal import Portable
from whale_train.models.options import ModelOptions
from whale_train.quantities import in_seconds
from whale_train.strategies.hardware.calibration import Calibration
from whale_train.strategies.hardware.cluster import Cluster, Link

_MODEL = {"_target_": "whale_train.models.class_head.ClassHead", "num_classes": 10}
_DATA = {"kind": "classes", "num_classes": 10, "num_samples": 1000}
_SAMPLES = 1000  # of which every rank has some


def measuring(request: Request, devices: int | None = None) -> Request:
    """Return the request whose ranks measure: on the same devices (or so many of them), with a
    model that is in nobody's way and a copy of it on each."""
    data: TypeAdapter[DataOptions] = TypeAdapter(DataOptions)
    train = {"global_batch": _SAMPLES, "accumulate": 1, "trace": False, "evaluate_every": None}
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
    """Return how many devices measure: as many processes as there are processors for. More would
    measure how they wait for each other, which plans count by themselves."""
    return max(1, int(min(len(cluster.devices), cluster.processors)))


def refuse_others(resolved: Resolved) -> None:
    """Raise ConfigError where the inventory's devices are not this machine's, or of several
    kinds, of which one calibration would be for none."""
    kinds = sorted({device.name for device in resolved.cluster.devices})
    rule = ""
    if resolved.emulated:
        rule = f"measures this machine's devices, and those of hardware={resolved.cluster.name} "
        rule += "are others"
    elif len(kinds) > 1:
        rule = f"measures devices of one kind, and there are {', '.join(kinds)}"
    if rule:
        raise ConfigError([Fault("mode", "calibrate", rule, "use hardware=local or hardware=cpu")])


def announced(cluster: Cluster, count: int, threads_of: Callable[[int], int]) -> str:
    """Return the line that says who measures (`count` devices of `cluster`), and how long that is
    waited for. So many of its processes have `threads_of` them each."""
    said = f"measuring {count} x {cluster.devices[0].name}"
    each, alone = threads_of(count), threads_of(1)
    if cluster.on_cpu and each != alone:
        said += f", {_in_threads(each)}, in turns with one that has {alone}"
    return f"{said}: less than a minute"


def _in_threads(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''} each"


def kept_of(run_dir: Path, kind: str) -> list[tuple[Calibration, Path]]:
    """Return what the ranks, devices of that `kind`, measured, and the files it is kept in."""
    written = json.loads((run_dir / "calibration.json").read_text())
    found = [Calibration.from_mapping({"device": kind, **each}) for each in written]
    return [(calibration, keep(calibration)) for calibration in found]


def show(found: Sequence[tuple[Calibration, Path]], console: Console) -> None:
    """Print a table for each kind of device: a line a kind of operation, then the links. Fits 60
    columns and more."""
    for calibration, path in found:
        console.print(Portable(_view(calibration, path)))


def _view(calibration: Calibration, path: Path) -> Group:
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
    pairs = (("link", calibration.link), ("shared memory", calibration.shared_memory))
    return [(name, link) for name, link in pairs if link is not None]


_REACHED = 1e25  # rates beyond are no limits


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.2f} G" if rate < _REACHED else "-"
