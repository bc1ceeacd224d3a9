"""What was measured of a machine: kept, read again, and put into clusters."""

import json
from dataclasses import asdict, replace
from io import StringIO
from math import inf
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tests.unit.plan_requests import strategy_of, training
from tests.unit.test_stages import model

from whale_train.errors import ConfigError
from whale_train.launcher.modes.calibrate import announced, at_once, kept_of, show
from whale_train.launcher.planning.devices.calibrations import (
    calibrations_folder,
    keep_calibration,
    with_kept_calibrations,
)
from whale_train.runtime.calibrate.roofline_fit import UNBOUND
from whale_train.strategies.cost.collectives import (
    all_reduce_time_s,
    modules_of,
    partitioned_sum_time_s,
    zero3_gather_overhead_s,
)
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.hardware.calibration import (
    Calibration,
    calibrated,
    is_measured,
    on_cores,
    stand_ins,
)
from whale_train.strategies.hardware.catalogue import DEVICES
from whale_train.strategies.hardware.cluster import Cluster, Device, Kernel, Link, Node, Roofline
from whale_train.strategies.resolver.resolve import resolve

FORWARD, BACKWARD = Roofline(1e-6, 1e9, 2e9), Roofline(2e-6, 5e8, 1e9)
KERNELS = {"fp32": {str(KernelKind.PRODUCT): Kernel(FORWARD, BACKWARD)}}
LINK, MEMORY = Link("measured", 1e9, 1e-4, 0.5), Link("measured", 4e9, 1e-5, 1.0)
MEASURED = Calibration("cpu_process", 1, 2, KERNELS, LINK, MEMORY)
CPU = Device("cpu_process", {"fp32": 1e11}, 1e9, 1e10)
NOMINAL = Link("nominal", 1.0, 1.0)
TWO = Cluster("cpu", (Node((CPU, CPU), NOMINAL),), NOMINAL)
GPUS = Cluster("gpus", (Node((DEVICES["h200_sxm_141gb"],) * 2, NOMINAL),), NOMINAL)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALE_TRAIN_CALIBRATIONS", str(tmp_path / "kept" / "here"))


def test_what_is_kept_is_found() -> None:
    assert with_kept_calibrations() == []
    path = keep_calibration(MEASURED)
    assert path == calibrations_folder() / "cpu_process-1-threads.yaml"
    assert with_kept_calibrations() == [MEASURED]
    alone = Calibration("h200_sxm_141gb", 0, 1, KERNELS)
    assert keep_calibration(alone).name == "h200_sxm_141gb.yaml"
    assert with_kept_calibrations() == [MEASURED, alone]


def test_a_rate_that_nothing_reached_is_kept() -> None:
    kernel = Kernel(Roofline(1e-6, UNBOUND, 2e9), Roofline(2e-6, UNBOUND, 1e9))
    measured = replace(MEASURED, kernels={"fp32": {str(KernelKind.PRODUCT): kernel}})
    keep_calibration(measured)
    assert with_kept_calibrations() == [measured]


def test_another_precision_joins_the_first() -> None:
    keep_calibration(MEASURED)
    faster = {"bf16": {str(KernelKind.PRODUCT): Kernel(BACKWARD, FORWARD)}}
    keep_calibration(Calibration("cpu_process", 1, 4, faster, LINK, None))
    (found,) = with_kept_calibrations()
    assert found.kernels == {**KERNELS, **faster}
    assert (found.ranks, found.shared_memory) == (4, None)


@pytest.mark.parametrize("text", ["[]", "{device: cpu_process}", "a: b: c", ""])
def test_a_file_that_is_no_calibration_is_named(text: str) -> None:
    calibrations_folder().mkdir(parents=True)
    (calibrations_folder() / "odd.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"odd\.yaml is no calibration"):
        with_kept_calibrations()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(ConfigError, match=r"\$WHALE_TRAIN_CALIBRATIONS"):
        keep_calibration(MEASURED)


def test_a_cluster_has_what_was_measured_of_it() -> None:
    assert not is_measured(TWO, "fp32")
    found = calibrated(TWO, [MEASURED], threads=1)
    assert is_measured(found, "fp32")
    assert not is_measured(found, "bf16")  # of which nobody measured anything
    assert {id(device) for device in found.devices} == {id(found.devices[0])}  # still one kind
    assert found.devices[0].kernels == KERNELS
    assert (found.nodes[0].link, found.shared_memory) == (LINK, MEMORY)
    # Of processes with other threads, and of other devices, it says nothing.
    assert not is_measured(calibrated(TWO, [MEASURED], threads=2), "fp32")
    assert not is_measured(calibrated(GPUS, [MEASURED], threads=1), "fp32")
    one = Calibration("h200_sxm_141gb", 0, 1, KERNELS)
    found = calibrated(GPUS, [MEASURED, one], threads=1)
    assert is_measured(found, "fp32")
    assert found.nodes[0].link == NOMINAL  # one alone has measured no link


def test_fewer_processes_have_more_threads() -> None:
    faster = {"fp32": {str(KernelKind.PRODUCT): Kernel(BACKWARD, FORWARD)}}
    known = [MEASURED, Calibration("cpu_process", 3, 1, faster)]
    eight = Cluster("cpu", (Node((CPU,) * 8, NOMINAL),), NOMINAL)
    found = on_cores(eight, known, 6, lambda count: max(1, 6 // count))
    assert (found.processors, found.devices[7].kernels) == (6, KERNELS)
    assert found.first(4) == replace(found, nodes=(Node(found.devices[:4], LINK),),
                                     fewer={n: found.fewer[n] for n in (1, 2, 3)})  # fmt: skip
    two, three = found.first(2), found.first(3)
    assert (two.processors, two.devices[1].kernels, len(two.devices)) == (2, faster, 2)
    assert two.nodes[0].link == NOMINAL  # one alone has measured no link
    assert (three.processors, is_measured(three, "fp32")) == (3, False)
    assert found.first(2).devices[0] is two.devices[0]  # still the same device, asked again
    assert found.first(4).first(2) == two
    # Where all have as many threads, however many run, a process is a process.
    assert on_cores(eight, known, 6, lambda count: 1).fewer == {}


@pytest.mark.parametrize(
    ("count", "processors", "measuring"), [(2, inf, 2), (2, 2.0, 2), (4, 2.0, 2), (4, 0.5, 1)]
)
def test_no_more_measure_than_compute_at_once(
    count: int, processors: float, measuring: int
) -> None:
    cluster = Cluster("cpu", (Node((CPU,) * count, NOMINAL),), NOMINAL, processors)
    assert at_once(cluster) == measuring


def test_who_measures_is_said_first() -> None:
    said = announced(TWO, 2, lambda ranks: 4 // ranks)
    assert "2 x cpu_process, 2 threads each, in turns with one that has 4" in said
    # Where one alone has no others, there is nothing to take turns with.
    for cluster, count, threads in ((TWO, 1, 4), (TWO, 2, 1), (GPUS, 2, 4)):
        said = announced(cluster, count, lambda ranks, threads=threads: threads // ranks or 1)
        assert said == f"measuring {count} x {cluster.devices[0].name}: less than a minute"


def test_what_ranks_and_one_alone_measured_is_kept_and_shown(tmp_path: Path) -> None:
    alone = replace(MEASURED, threads=2, ranks=1, link=None, shared_memory=None)
    written = [asdict(each) for each in (MEASURED, alone)]
    network = {"name": "measured", "bandwidth_bytes_s": 1.23456e8, "latency_s": 1e-4}
    content = {"devices": written, "network": network}
    (tmp_path / "calibration.json").write_text(json.dumps(content))
    found = kept_of(tmp_path)
    assert (
        [calibration for calibration, _ in found.devices]
        == with_kept_calibrations()
        == [MEASURED, alone]
    )
    console = Console(file=StringIO(), width=60)
    show(found, console)
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    titles = [number for number, line in enumerate(lines) if " x cpu_process" in line]
    assert [lines[number] for number in titles] == [
        "2 x cpu_process, 1 thread each",
        "1 x cpu_process, 2 threads each",
    ]
    assert sum("shared memory" in line for line in lines) == 1
    assert lines[-1] == "network: {bandwidth_bytes_s: 123500000.0, latency_s: 0.0001}"
    for _, path in found.devices:
        assert str(path) in "".join(line.strip() for line in lines)


def test_stand_ins_are_as_slow_as_they_are_made() -> None:
    gpus = Cluster("gpus", (Node((DEVICES["t4_16gb"],), NOMINAL),) * 2, NOMINAL)
    found = stand_ins(gpus, MEASURED, (1.5, 3.0), processors=2.0)
    slow = found.devices[1].kernels["fp32"][KernelKind.PRODUCT]
    assert slow.forward == Roofline(3e-6, 1e9 / 3, 2e9 / 3)
    assert slow.backward == Roofline(6e-6, 5e8 / 3, 1e9 / 3)
    # They sleep, and so there is always a processor; all are on this host.
    assert (found.processors, found.network, len(found.nodes)) == (inf, LINK, 1)
    assert found.shared_memory is None
    unslowed = stand_ins(gpus, MEASURED, None, processors=2.0)
    assert (unslowed.processors, unslowed.shared_memory) == (2.0, MEMORY)


@pytest.mark.parametrize(("zero", "is_faster"), [(0, True), (1, False), (3, False)])
def test_copies_that_torch_keeps_sum_through_shared_memory(zero: int, is_faster: bool) -> None:
    """A step is shorter by what the sum is; DeepSpeed's go through gloo."""
    profile, strategy = model([1e6] * 4), strategy_of({"graph": {"replicate": {"zero": zero}}})
    through_gloo = Cluster("cpu", (Node((CPU, CPU), LINK),), LINK)

    def step_s(cluster: Cluster) -> float:
        return resolve(strategy, cluster, profile, training(8)).predicted.step_time_s

    num_bytes = 4.0 * sum(parameter.elements for parameter in profile.parameters)
    by_gloo, by_memory = (all_reduce_time_s(num_bytes, 2, link) for link in (LINK, MEMORY))
    faster = step_s(through_gloo) - step_s(replace(through_gloo, shared_memory=MEMORY))
    assert faster == pytest.approx(is_faster * (by_gloo - by_memory), abs=1e-9)


def test_what_zero_does_beside_sending_is_as_measured() -> None:
    whole, forward = Roofline(1e-2, inf, 4e6), Roofline(1e-3, inf, 4e6)
    kernels = {
        str(KernelKind.PARTITION): Kernel(whole, whole),
        str(KernelKind.GATHER): Kernel(forward, Roofline(2e-3, inf, 2e6)),
    }
    slow = replace(CPU, kernels={"fp32": kernels})
    # 1 s for the bytes of a million elements, after what the sum takes and once the overhead.
    assert partitioned_sum_time_s(1e6, 0.5, [CPU, slow], "fp32") == pytest.approx(1.51)
    # The same and twice that, and three overheads: of three modules.
    expected = (pytest.approx(1.003), pytest.approx(2.006))
    assert zero3_gather_overhead_s(1e6, 3, [CPU, slow], "fp32") == expected
    # Where nobody measured, nothing is known of it.
    assert zero3_gather_overhead_s(1e6, 3, [CPU], "fp32") == (0.0, 0.0)
    assert zero3_gather_overhead_s(1e6, 3, [slow], "bf16") == (0.0, 0.0)


def test_parameters_are_gathered_by_module() -> None:
    paths = ("token.weight", "blocks.0.expand.weight", "blocks.0.expand.bias", "scale")
    assert modules_of(paths) == {"token", "blocks.0.expand", ""}


def test_the_file_is_for_people_to_read() -> None:
    written = yaml.safe_load(keep_calibration(MEASURED).read_text())
    assert written["kernels"]["fp32"]["product"]["forward"]["flops_s"] == 1e9
