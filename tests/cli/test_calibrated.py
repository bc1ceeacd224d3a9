"""Plans for CPU processes with what was measured of them, as a user meets them."""

from pathlib import Path

import pytest
import yaml
from tests.cli.command import whale_train

from whale_train.machine.limits import cores
from whale_train.strategies.cost.op_work import KernelKind
from whale_train.strategies.hardware.calibration import Calibration
from whale_train.strategies.hardware.cluster import Kernel, Link, Roofline

CORES = cores()


def predicted(
    folder: Path, measured: int, asked: tuple[str, ...], environment: dict[str, str] | None = None
) -> str:
    """What a plan says of its step's time, where processes of `measured` threads were measured."""
    roofline = Roofline(1e-6, 1e9, 1e9)
    kernels = {"fp32": dict.fromkeys(map(str, KernelKind), Kernel(roofline, roofline))}
    link = Link("measured", 1e9, 1e-5, 0.5)
    calibration = Calibration("cpu_process", measured, 2, kernels, link, link)
    text = yaml.safe_dump(calibration.to_mapping(), sort_keys=False)
    (folder / f"{calibration.name}.yaml").write_text(text)
    where = {"WHALE_TRAIN_CALIBRATIONS": str(folder), **(environment or {})}
    answer = whale_train(["mode=plan", "hardware=cpu", *asked], folder, where)
    assert answer.status == 0, answer
    (line,) = (line for line in answer.stdout.splitlines() if line.startswith("  predicted "))
    return line.rpartition(",")[2].strip()


@pytest.mark.skipif(CORES == 1, reason="a process has one thread however many there are")
def test_a_process_alone_has_all_threads(tmp_path: Path) -> None:
    devices = f"hardware.devices={CORES}"
    assert predicted(tmp_path, CORES, ("strategy=single", devices)) == "as measured"
    assert predicted(tmp_path, CORES, ("strategy=dp", devices)) == "by the catalogue"
    threads = ("launcher.threads=1", devices)
    assert predicted(tmp_path, CORES, ("strategy=single", *threads)) == "by the catalogue"


def test_the_environment_says_how_many_threads_there_are(tmp_path: Path) -> None:
    asked, environment = ("strategy=dp", "hardware.devices=2"), {"OMP_NUM_THREADS": "7"}
    assert predicted(tmp_path, 7, asked) == "by the catalogue"
    assert predicted(tmp_path, 7, asked, environment) == "as measured"
