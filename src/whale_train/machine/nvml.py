"""List the GPUs of this host by its driver (NVML), without starting CUDA in this process.

The list has the GPUs that this process may use, in the order of `CUDA_VISIBLE_DEVICES` where it is
set, else of their PCI addresses.
"""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Any

from whale_train.strategies.hardware.gpu_facts import SWITCH, GpuFacts

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# CUDA has its own order of cards of different models. A process that starts CUDA asks for it.
_ASKS_CUDA = (
    "import torch\n"
    "for i in range(torch.cuda.device_count()):\n"
    "    print('GPU-' + str(torch.cuda.get_device_properties(i).uuid))\n"
)
_ASKING_S = 60.0


def visible_gpus(nvml: Any = None) -> tuple[GpuFacts, ...]:
    """Return the GPUs and MIG slices that CUDA would list in this process; none without a driver.
    `nvml` is the library; None imports pynvml."""
    nvml = nvml or importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        return _visible(list(_all(nvml)))
    finally:
        nvml.nvmlShutdown()


def _visible(gpus: list[GpuFacts]) -> tuple[GpuFacts, ...]:
    """Return the GPUs among `gpus` that the environment leaves visible, in its order."""
    asked = os.environ.get(_VISIBLE)
    if asked is None:
        return tuple(gpus)
    words = [word.strip() for word in asked.split(",")]
    if not all(word.isdigit() for word in words):
        return _by_uuid(gpus, words)
    by_address = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if not by_address and len({gpu.name for gpu in gpus}) > 1:
        return _by_uuid(gpus, _asked_of_cuda(gpus))
    # CUDA stops at the first index that no card has.
    return tuple(gpus[int(word)] for word in takewhile(lambda x: int(x) < len(gpus), words))


def _by_uuid(gpus: list[GpuFacts], words: list[str]) -> tuple[GpuFacts, ...]:
    """Return the GPUs whose UUIDs begin with `words`. As in CUDA, the first word that does not
    match exactly one GPU ends the list."""
    chosen = []
    for word in words:
        named = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)]
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)


def _asked_of_cuda(gpus: list[GpuFacts]) -> list[str]:
    """Return the UUIDs of the GPUs in CUDA's own order, or in the order of `gpus` where CUDA cannot
    be asked."""
    command = [sys.executable, "-c", _ASKS_CUDA]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            timeout=_ASKING_S,
            check=True,
        )
        return done.stdout.split()
    return [gpu.uuid for gpu in gpus]


def _all(nvml: Any) -> Iterator[GpuFacts]:
    """Yield every GPU of the host, or the MIG slices of a GPU that is divided."""
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        card = _card(nvml, handle)
        cut, _ = _asked(nvml, nvml.nvmlDeviceGetMigMode, handle) or (0, 0)
        if not cut:
            yield card
            continue
        for number in range(_asked(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            part = _asked(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
            if part is not None:
                yield _slice(nvml, part, card)


def _card(nvml: Any, handle: Any) -> GpuFacts:
    """Return the facts about the GPU of an NVML `handle`. A figure that the driver does not know is
    0."""

    def asked(name: str, *arguments: Any) -> int:
        return int(_asked(nvml, getattr(nvml, name), handle, *arguments) or 0)

    # The clock of DDR memory, which moves two bits a cycle and pin.
    clock_hz = 1e6 * asked("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM)
    return GpuFacts(
        name=nvml.nvmlDeviceGetName(handle),
        uuid=nvml.nvmlDeviceGetUUID(handle),
        bus=_bus(nvml.nvmlDeviceGetPciInfo(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        units=asked("nvmlDeviceGetNumGpuCores"),
        clock_hz=1e6 * asked("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_bytes_s=2 * clock_hz * asked("nvmlDeviceGetMemoryBusWidth") / 8,
        pcie_generation=asked("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_lanes=asked("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks=_nvlinks(nvml, handle),
    )


def _slice(nvml: Any, handle: Any, card: GpuFacts) -> GpuFacts:
    """Return the facts about a MIG slice of `card`. A slice reaches no other GPU over NVLink."""
    return replace(
        card,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        nvlinks={},
        part=nvml.nvmlDeviceGetAttributes(handle).gpuInstanceSliceCount / _SLICES,
    )


_SLICES = 7  # compute slices of any card that MIG can cut


def _nvlinks(nvml: Any, handle: Any) -> dict[str, int]:
    """Return the number of active NVLinks by peer: the PCI address of a GPU, or SWITCH."""
    num_links: dict[str, int] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        kind = _asked(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        peer = SWITCH
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
            peer = _bus(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))
        num_links[peer] = num_links.get(peer, 0) + 1
    return num_links


def _bus(pci: Any) -> str:
    """Return a PCI address as lower-case text with four digits of domain. The driver's own has
    eight."""
    text = pci.busId
    return (text.decode() if isinstance(text, bytes) else text).lower().removeprefix("0000")


def _asked(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the driver's answer, or None where the card or the driver does not support the
    question."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None
