"""GPUs as their driver reports them, and the matching devices and links of a cluster.

A card of the catalogue is identified by its name and memory. Any other card gets figures computed
from its properties, units x clock, like those of the catalogue (`tests/unit/test_catalogue.py`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from whale_train.strategies.hardware.catalogue import DEVICES, LINKS, RESERVED_BYTES
from whale_train.strategies.hardware.cluster import Device, Link

SWITCH = "switch"  # the peer of an NVLink that does not lead to a GPU


@dataclass(frozen=True)
class GpuFacts:
    """A GPU, or a MIG slice of one.

    name: the driver's name of the card.
    uuid: the driver's identifier.
    bus: the PCI address.
    memory_bytes: bytes of its memory.
    capability: CUDA's compute capability.
    units: the number of fp32 units of the card; 0 where unknown.
    clock_hz: the highest clock of the units; 0 where unknown.
    memory_bytes_s: the peak bytes/s of the card's memory; 0 where unknown.
    pcie_generation: the generation of the PCIe link; 0 where unknown.
    pcie_lanes: the lanes of the PCIe link; 0 where unknown.
    nvlinks: the number of active NVLinks, by the bus of their peer, or SWITCH.
    part: the fraction of its card that a slice has; 1 for a full card.
    """

    name: str
    uuid: str
    bus: str
    memory_bytes: int
    capability: tuple[int, int]
    units: int = 0
    clock_hz: float = 0.0
    memory_bytes_s: float = 0.0
    pcie_generation: int = 0
    pcie_lanes: int = 0
    nvlinks: Mapping[str, int] = field(default_factory=dict)
    part: float = 1.0


# The driver's name of a card, and its editions in the catalogue, which differ in memory.
_CARDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"Tesla P100-PCIE-16GB", ("p100_pcie_16gb",)),
    (r"Tesla V100S?-PCIE-\d+GB", ("v100_pcie_16gb", "v100_pcie_32gb")),
    (r"Tesla V100-SXM[23]-\d+GB(-LS)?", ("v100_sxm2_16gb", "v100_sxm2_32gb")),
    (r"Tesla T4", ("t4_16gb",)),
    (r"A10", ("a10_24gb",)),
    (r"A30", ("a30_24gb",)),
    (r"A100-PCIE-40GB|A100 80GB PCIe", ("a100_pcie_40gb", "a100_pcie_80gb")),
    (r"A100-SXM4-\d+GB", ("a100_sxm_40gb", "a100_sxm_80gb")),
    (r"RTX A6000", ("rtx_a6000_48gb",)),
    (r"GeForce RTX 3090", ("rtx_3090_24gb",)),
    (r"GeForce RTX 4090", ("rtx_4090_24gb",)),
    (r"GeForce RTX 5090", ("rtx_5090_32gb",)),
    (r"L4", ("l4_24gb",)),
    (r"L40S", ("l40s_48gb",)),
    (r"H100 PCIe", ("h100_pcie_80gb",)),
    (r"H100 NVL", ("h100_nvl_94gb",)),
    (r"H100 80GB HBM3", ("h100_sxm_80gb",)),
    (r"H200", ("h200_sxm_141gb",)),
    (r"GH200 480GB", ("gh200_96gb",)),
    (r"B200", ("b200_180gb",)),
)
# Range of the driver's bytes / the catalogue's: printed sizes are in powers of ten, sizes of chips
# in powers of two, and error correction takes a sixteenth of some.
_MEMORY = (0.97, 1.10)


def device_of(gpu: GpuFacts) -> Device:
    """Return the catalogue's device for a GPU, or a device with figures computed from its
    properties where the catalogue has none."""
    for name in _editions(gpu) if gpu.part == 1 else ():
        low, high = (bound * DEVICES[name].memory_bytes for bound in _MEMORY)
        if low <= gpu.memory_bytes <= high:
            return DEVICES[name]
    return _by_properties(gpu)


def is_catalogued(device: Device) -> bool:
    """Return True if the figures of a device are those of the catalogue."""
    return DEVICES.get(device.name) == device


def _editions(gpu: GpuFacts) -> tuple[str, ...]:
    plain = gpu.name.removeprefix("NVIDIA ")
    return next((names for pattern, names in _CARDS if re.fullmatch(pattern, plain)), ())


@dataclass(frozen=True)
class _Architecture:
    """Figures of a streaming multiprocessor.

    units: its fp32 units.
    tensor: FLOP per cycle of its tensor cores in 16 bits, dense and accumulated in fp32; 0 without
        tensor cores.
    has_bf16: True if the tensor cores compute in bf16.
    has_fp8: True if they compute in fp8, at twice the rate of 16 bits.
    is_halved: True if GeForce cards have half of `tensor`.
    packed: without tensor cores, True if a unit computes two fp16 values at once. If not, fp16 is
        not worthwhile.
    """

    units: int
    tensor: int
    has_bf16: bool = False
    has_fp8: bool = False
    is_halved: bool = False
    packed: bool = False


# By compute capability, from NVIDIA's architecture whitepapers: Pascal GP100 and GP104, Volta,
# Turing, Ampere GA100 and GA102, Ada, Hopper, Blackwell data centre and RTX.
_ARCHITECTURES: Mapping[tuple[int, int], _Architecture] = {
    (5, 0): _Architecture(128, 0),
    (6, 0): _Architecture(64, 0, packed=True),
    (6, 1): _Architecture(128, 0),
    (7, 0): _Architecture(64, 1024),
    (7, 5): _Architecture(64, 1024, is_halved=True),
    (8, 0): _Architecture(64, 2048, has_bf16=True),
    (8, 6): _Architecture(128, 1024, has_bf16=True, is_halved=True),
    (8, 9): _Architecture(128, 1024, has_bf16=True, has_fp8=True, is_halved=True),
    (9, 0): _Architecture(128, 4096, has_bf16=True, has_fp8=True),
    (10, 0): _Architecture(128, 8192, has_bf16=True, has_fp8=True),
    (12, 0): _Architecture(128, 1024, has_bf16=True, has_fp8=True, is_halved=True),
}


def _by_properties(gpu: GpuFacts) -> Device:
    """Return a device with peaks computed from units and clocks.

    An unknown property defaults to a small card's, since a plan needs some figure. Measuring
    (`mode=calibrate`) replaces these figures.
    """
    known = [capability for capability in _ARCHITECTURES if capability <= gpu.capability]
    of = _ARCHITECTURES[max(known, default=min(_ARCHITECTURES))]
    units = (gpu.units or 2048) * gpu.part
    clock = gpu.clock_hz or 1.5e9
    flops = {"fp32": 2 * units * clock}
    tensor = of.tensor * (0.5 if of.is_halved and "GeForce" in gpu.name else 1.0)
    if tensor:
        flops["fp16"] = units / of.units * tensor * clock
    elif of.packed:
        flops["fp16"] = 2 * flops["fp32"]
    if of.has_bf16:
        flops["bf16"] = flops["fp16"]
    if of.has_fp8:
        flops["fp8"] = 2 * flops["fp16"]
    memory_bytes_s = (gpu.memory_bytes_s or 3e11) * gpu.part
    memory = float(gpu.memory_bytes)
    return Device(_slug(gpu), flops, memory, memory_bytes_s, reserved_bytes=RESERVED_BYTES)


def _slug(gpu: GpuFacts) -> str:
    """Return a name for a GPU in the style of the catalogue: `quadro_rtx_8000_48gb`."""
    plain = re.sub(r"^(NVIDIA|Tesla) |\b\d+ ?GB\b|GeForce ", "", gpu.name)
    plain = re.sub(r"\W+", "_", re.sub(r"^Tesla ", "", plain)).strip("_").lower()
    return f"{plain}{'_slice' if gpu.part < 1 else ''}_{round(gpu.memory_bytes / 2**30)}gb"


# --- Links ---------------------------------------------------------------------------------------

# Bytes/s of one NVLink in one direction, by the compute capability that introduced it: whitepapers
# of P100, V100, A100, H100 and GB200, and of GA102, whose bridge of four links has 112.5 GB/s in
# both directions together.
_NVLINK_BYTES_S: Mapping[tuple[int, int], float] = {
    (6, 0): 20e9,
    (7, 0): 25e9,
    (8, 0): 25e9,
    (8, 6): 112.5e9 / 8,
    (9, 0): 25e9,
    (10, 0): 50e9,
}
_PCIE = {3: "pcie3_x16", 4: "pcie4_x16", 5: "pcie5_x16"}


def link_of(gpus: Sequence[GpuFacts]) -> Link:
    """Return the link that joins the GPUs of a host.

    It is NVLink if NVLinks connect all GPUs, directly or through other GPUs: a collective's ring
    can use such a path like a switch, but not GPUs that are only bridged in pairs. Otherwise it is
    the slowest PCIe link of the GPUs.
    """
    if not _are_joined(gpus):
        return min((_pcie(gpu) for gpu in gpus), key=lambda link: link.bandwidth_bytes_s)
    rate = min(sum(gpu.nvlinks.values()) * _nvlink_bytes_s(gpu) for gpu in gpus)
    named = [link for link in LINKS.values() if link.name.startswith("nvlink")]
    made = Link(f"nvlink_{rate / 1e9:g}_gb_s", rate, named[0].latency_s)
    return next((link for link in named if link.bandwidth_bytes_s == rate), made)


def _nvlink_bytes_s(gpu: GpuFacts) -> float:
    known = [capability for capability in _NVLINK_BYTES_S if capability <= gpu.capability]
    return _NVLINK_BYTES_S[max(known, default=(6, 0))]


def _are_joined(gpus: Sequence[GpuFacts]) -> bool:
    """Return True if there are several GPUs and NVLinks connect all of them."""
    cards = {gpu.bus: gpu for gpu in gpus}
    if len(cards) < max(2, len(gpus)):  # slices of a card have no NVLink
        return False
    switched = {bus for bus, gpu in cards.items() if SWITCH in gpu.nvlinks}
    reached, waiting = set[str](), [gpus[0].bus]
    while waiting:
        bus = waiting.pop()
        if bus in reached:
            continue
        reached.add(bus)
        waiting += [peer for peer in cards[bus].nvlinks if peer in cards]
        waiting += switched if bus in switched else ()
    return len(reached) == len(cards)


def _pcie(gpu: GpuFacts) -> Link:
    """Return a card's PCIe link. An unknown generation, or one outside the catalogue, counts as the
    nearest one in the catalogue."""
    link = LINKS[_PCIE[min(max(gpu.pcie_generation, 3), 5)]]
    if gpu.pcie_lanes in (0, 16):
        return link
    name = link.name.replace("_x16", f"_x{gpu.pcie_lanes}")
    return Link(name, link.bandwidth_bytes_s * gpu.pcie_lanes / 16, link.latency_s)
