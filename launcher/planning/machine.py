"""What this machine has: cores, memory, GPUs. Asked of the system, without starting CUDA here."""

import os
import subprocess

from whale_train.errors import Fault, nearest
from whale_train.limits import cores, memory_bytes
from whale_train.strategies.hardware.catalogue import DEVICES
from whale_train.strategies.hardware.cluster import Device
from whale_train.strategies.hardware.inventory import MachineFacts

# A GPU's name as its driver gives it, by what it contains, and its name in the catalogue. The
# first that fits; memory tells editions apart.
_GPU_NAMES = (
    ("P100-PCIE", "p100_pcie_16gb"),
    ("V100-PCIE", "v100_pcie_16gb"),
    ("V100-SXM2-32GB", "v100_sxm2_32gb"),
    ("V100-SXM2", "v100_sxm2_16gb"),
    ("Tesla T4", "t4_16gb"),
    ("RTX 3090", "rtx_3090_24gb"),
    ("RTX 4090", "rtx_4090_24gb"),
    ("A100-PCIE-40GB", "a100_pcie_40gb"),
    ("A100-SXM4-40GB", "a100_sxm_40gb"),
    ("A100-SXM4-80GB", "a100_sxm_80gb"),
    ("NVIDIA A10", "a10_24gb"),
    ("L40S", "l40s_48gb"),
    ("NVIDIA L4", "l4_24gb"),
    ("H100 PCIe", "h100_pcie_80gb"),
    ("H100", "h100_sxm_80gb"),
    ("H200", "h200_sxm_141gb"),
)


def machine_facts(faults: list[Fault]) -> MachineFacts:
    """This machine. A GPU the catalogue does not know is a fault: its figures are needed."""
    names = _gpu_names()
    gpus = [device for name in names if (device := _catalogued(name, faults))]
    return MachineFacts(cores(), memory_bytes(), tuple(gpus), None)


def threads_asked() -> int | None:
    """Return the threads of every process on a CPU, where the environment says how many (as ranks
    read it)."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else None


def _gpu_names() -> list[str]:
    """Names of the GPUs CUDA would see, by the driver's own tool; none where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    names = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    chosen = [part for part in visible.split(",") if part.strip().isdigit()]
    return [names[int(part)] for part in chosen if int(part) < len(names)]


def _catalogued(name: str, faults: list[Fault]) -> Device | None:
    for part, catalogued in _GPU_NAMES:
        if part in name:
            return DEVICES[catalogued]
    rule = f"has a GPU the catalogue does not know ({name})"
    remedy = f"write an inventory with its figures; {nearest(name, DEVICES)}"
    faults.append(Fault("hardware", "local", rule, remedy))
    return None
