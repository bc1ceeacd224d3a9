"""Check an installation's packages, devices, compilers and folders.

Each check names the remedy for a missing item and the feature that needs the item.
"""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from whale_train.kernel_cache import kernel_cache
from whale_train.launcher.planning.architectures import refused_architectures
from whale_train.launcher.planning.devices.calibrations import calibrations_folder
from whale_train.launcher.planning.nvme_tools import LIBAIO, missing_for_files
from whale_train.machine.limits import cores, memory_bytes
from whale_train.machine.nvml import visible_gpus
from whale_train.quantities import in_bytes
from whale_train.user_cache import user_cache

_PACKAGE = "whale-train"
_SMALL_SHM = 1 << 30  # bytes; a container's default is 64 MiB
_DEVELOPERS = ("dev", "docs")  # extras that no run needs
# The features of each extra of the package. An extra without an entry is reported by its name.
_FEATURES = {
    "hf": "models and datasets of Hugging Face, data=text_files",
    "images": "data=image_folder, images in data=webdataset",
    "peft": "model.adapters",
    "bits": "optimizer=adamw8bit",
    "nf4": "model.quantize=nf4",
    "ray": "launcher=ray",
    "remote": "checkpoint.to",
    "optuna": "hydra/sweeper=optuna",
    "metrics": "metrics of torchmetrics",
    "trackers": "trackers=[mlflow, wandb, trackio]",
}


@dataclass(frozen=True)
class Check:
    """One line of the report: an item of the installation, and its condition.

    part: the section of the report.
    name: the item, such as a package or a program.
    found: the version, path or description of the item; '' where it is missing.
    is_needed: whether every run needs the item.
    remedy: the repair for a missing or unfit item; '' where the item is fine.
    """

    part: str
    name: str
    found: str
    is_needed: bool = False
    remedy: str = ""

    @property
    def is_broken(self) -> bool:
        """Return whether runs fail because of this item."""
        return self.is_needed and bool(self.remedy)


def all_checks() -> list[Check]:
    """Return all checks of this installation and machine, section by section."""
    checks = (packages(), features(), devices(), compilers(), folders())
    return [check for part in checks for check in part]


def packages() -> Iterator[Check]:
    """Yield a check for Python and for each package that every run needs."""
    python = f"{platform.python_version()} in {sys.prefix}"
    yield Check("packages", "python", python, is_needed=True)
    yield Check("packages", _PACKAGE, version(_PACKAGE), is_needed=True)
    for requirement in _requirements():
        if requirement.marker is None:
            installed, remedy = _package(requirement)
            yield Check("packages", requirement.name, installed, is_needed=True, remedy=remedy)


def features() -> Iterator[Check]:
    """Yield a check for the features of each extra that the package's metadata lists, but for
    developers' extras."""
    for extra in metadata(_PACKAGE).get_all("Provides-Extra") or ():
        if extra in _DEVELOPERS:
            continue
        purpose = _FEATURES.get(extra, f"{_PACKAGE}[{extra}]")
        of_extra = [
            requirement
            for requirement in _requirements()
            if requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
        ]
        installed = []
        remedies = []
        for requirement in of_extra:
            has, remedy = _package(requirement)
            installed += [f"{requirement.name} {has}"] if has else []
            remedies += [remedy] if remedy else []
        if of_extra:
            yield Check("features", purpose, ", ".join(installed), remedy="; ".join(remedies))


def _requirements() -> list[Requirement]:
    return [Requirement(text) for text in requires(_PACKAGE) or ()]


def _package(requirement: Requirement) -> tuple[str, str]:
    """Return a package's installed version and the remedy.

    The version is '' for a missing package. The remedy is '' for a version within range.
    """
    remedy = f"pip install '{requirement.name}{requirement.specifier}'"
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return "", remedy
    fits = requirement.specifier.contains(installed, prereleases=True)
    return installed, "" if fits else remedy


def devices() -> Iterator[Check]:
    """Yield a check for each GPU that the driver shows, and one for the processor."""
    gpus = visible_gpus()
    for number, gpu in enumerate(gpus):
        card = f"{gpu.name}, {in_bytes(gpu.memory_bytes)}"
        refused = "; ".join(f"{x.rule}; {x.remedy}" for x in refused_architectures([gpu]))
        yield Check("devices", f"GPU {number}", card, remedy=refused)
    if not gpus:
        yield Check("devices", "GPU", "none: ranks are CPU processes over gloo")
    size = f"{cores()} cores, {in_bytes(memory_bytes())} of memory"
    yield Check("devices", "processor", size)


def compilers() -> Iterator[Check]:
    """Yield a check for each program that compiles kernels at the kernels' first use."""
    for program, purpose in (
        ("g++", "offload: {optimizer: cpu}, train.compile"),
        ("ninja", "offload: {optimizer: cpu}"),
    ):
        path = shutil.which(program)
        remedy = "" if path else f"install {program}, for {purpose}"
        yield Check("compilers", program, path or "", remedy=remedy)
    missing = missing_for_files()
    package = LIBAIO if missing == "libaio" else missing
    remedy = f"install {package}, for offload: {{optimizer: nvme}}" if missing else ""
    yield Check("compilers", "libaio", "" if missing else "found", remedy=remedy)


def folders() -> Iterator[Check]:
    """Yield a check for each folder that runs write to, and one for shared memory."""
    for name, folder, is_needed in (
        ("runs", Path("runs"), True),
        ("temporary files", Path(tempfile.gettempdir()), True),
        ("kept profiles", user_cache("profiles"), False),
        ("kept tokens", user_cache("tokens"), False),
        ("calibrations", calibrations_folder(), False),
        ("compiled kernels", kernel_cache(), False),
    ):
        remedy = "" if _is_writable(folder) else "make it writable for this user"
        yield Check("folders", name, str(folder.absolute()), is_needed, remedy)
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        remedy = "give the container more, as docker run --shm-size=8g" if free < _SMALL_SHM else ""
        room = f"{shared}, {in_bytes(free)} free"
        yield Check("folders", "memory that ranks share", room, remedy=remedy)


def _is_writable(folder: Path) -> bool:
    """Return whether a file can be created in a folder. For a missing folder, return whether the
    folder can be created."""
    nearest = next(x for x in (folder.absolute(), *folder.absolute().parents) if x.exists())
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
