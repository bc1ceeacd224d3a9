"""NVML's answers on machines of many kinds: names and memory as drivers report them, units, clocks
and links as on the cards' datasheets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class Card:
    """`links`: what each NVLink leads to, a number of the card it joins or "switch". `slices` are
    (name of the slice's UUID, MiB, compute slices) of a card that is cut."""

    name: str
    mib: int
    capability: tuple[int, int]
    units: int
    sm_mhz: int
    memory_mhz: int
    bus_width: int
    pcie: tuple[int, int] = (4, 16)
    links: tuple[object, ...] = ()
    slices: tuple[tuple[str, int, int], ...] = ()
    silent: frozenset[str] = field(default_factory=frozenset)  # functions that it does not answer


P100 = Card("Tesla P100-PCIE-16GB", 16384, (6, 0), 3584, 1328, 715, 4096, (3, 16))
P100_SXM = Card("Tesla P100-SXM2-16GB", 16384, (6, 0), 3584, 1480, 715, 4096, (3, 16))
V100_16 = Card("Tesla V100-SXM2-16GB", 16384, (7, 0), 5120, 1530, 877, 4096, (3, 16))
V100_32 = Card("Tesla V100-SXM2-32GB", 32768, (7, 0), 5120, 1530, 877, 4096, (3, 16))
V100_PCIE_16 = Card("Tesla V100-PCIE-16GB", 16384, (7, 0), 5120, 1380, 877, 4096, (3, 16))
V100_PCIE_32 = Card("Tesla V100-PCIE-32GB", 32768, (7, 0), 5120, 1380, 877, 4096, (3, 16))
T4 = Card("Tesla T4", 15360, (7, 5), 2560, 1590, 5001, 256, (3, 16))
RTX_8000 = Card("Quadro RTX 8000", 49152, (7, 5), 4608, 2100, 7001, 384, (3, 16))
A10 = Card("NVIDIA A10", 23028, (8, 6), 9216, 1695, 6251, 384)
A10G = Card("NVIDIA A10G", 23028, (8, 6), 9216, 1710, 6251, 384)
A30 = Card("NVIDIA A30", 24576, (8, 0), 3584, 1440, 1215, 3072)
A100_40 = Card("NVIDIA A100-SXM4-40GB", 40960, (8, 0), 6912, 1410, 1215, 5120)
A100_80 = Card("NVIDIA A100-SXM4-80GB", 81920, (8, 0), 6912, 1410, 1593, 5120)
A100_PCIE_40 = Card("NVIDIA A100-PCIE-40GB", 40960, (8, 0), 6912, 1410, 1215, 5120)
A100_PCIE_80 = Card("NVIDIA A100 80GB PCIe", 81920, (8, 0), 6912, 1410, 1512, 5120)
RTX_3090 = Card("NVIDIA GeForce RTX 3090", 24576, (8, 6), 10496, 2100, 9751, 384)
RTX_4090 = Card("NVIDIA GeForce RTX 4090", 24564, (8, 9), 16384, 3105, 10501, 384)
RTX_5090 = Card("NVIDIA GeForce RTX 5090", 32607, (12, 0), 21760, 3090, 14001, 512, (5, 16))
A6000 = Card("NVIDIA RTX A6000", 49140, (8, 6), 10752, 2100, 8001, 384)
L4 = Card("NVIDIA L4", 23034, (8, 9), 7424, 2040, 6251, 192)
L40S = Card("NVIDIA L40S", 46068, (8, 9), 18176, 2520, 9001, 384)
H100 = Card("NVIDIA H100 80GB HBM3", 81559, (9, 0), 16896, 1980, 2619, 5120, (5, 16))
H100_PCIE = Card("NVIDIA H100 PCIe", 81559, (9, 0), 14592, 1755, 1593, 5120, (5, 16))
H100_NVL = Card("NVIDIA H100 NVL", 95830, (9, 0), 16896, 1785, 2619, 6016, (5, 16))
H200 = Card("NVIDIA H200", 143771, (9, 0), 16896, 1980, 3201, 6016, (5, 16))
GH200 = Card("NVIDIA GH200 480GB", 97871, (9, 0), 16896, 1980, 2619, 6144, (5, 16))
B200 = Card("NVIDIA B200", 183359, (10, 0), 18944, 1965, 3996, 8192, (5, 16))


class NvmlError(Exception):
    pass


class Nvml:
    """NVML on a machine with `cards`, in the order of their addresses."""

    NVMLError = NvmlError
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self, cards: Sequence[Card], has_driver: bool = True) -> None:
        self._cards, self._has_driver = cards, has_driver
        self.shut_down = 0

    def nvmlInit(self) -> None:
        if not self._has_driver:
            raise NvmlError("NVML Shared Library Not Found")

    def nvmlShutdown(self) -> None:
        self.shut_down += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the function of a card, or of a slice of one, which is (card, number)."""

        def ask(handle: Any, *arguments: int) -> Any:
            index, number = handle if isinstance(handle, tuple) else (handle, None)
            card = self._cards[index]
            if name in card.silent:
                raise NvmlError("Not Supported")
            return _answer(card, index, number, name, arguments)

        return ask


def _answer(
    card: Card, index: int, number: int | None, name: str, arguments: tuple[int, ...]
) -> Any:
    (first,) = arguments or (0,)
    link = card.links[first] if name.startswith("nvmlDeviceGetNvLinkR") else None
    mib = card.mib if number is None else card.slices[number][1]
    uuid = f"GPU-{index:08x}-aaaa" if number is None else f"MIG-{card.slices[number][0]}"
    answers: dict[str, Callable[[], Any]] = {
        "nvmlDeviceGetName": lambda: card.name,
        "nvmlDeviceGetUUID": lambda: uuid,
        "nvmlDeviceGetPciInfo": lambda: SimpleNamespace(busId=address(index).encode()),
        "nvmlDeviceGetMemoryInfo": lambda: SimpleNamespace(total=mib * 2**20),
        "nvmlDeviceGetCudaComputeCapability": lambda: card.capability,
        "nvmlDeviceGetNumGpuCores": lambda: card.units,
        "nvmlDeviceGetMaxClockInfo": lambda: card.sm_mhz if first == 1 else card.memory_mhz,
        "nvmlDeviceGetMemoryBusWidth": lambda: card.bus_width,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda: card.pcie[0],
        "nvmlDeviceGetMaxPcieLinkWidth": lambda: card.pcie[1],
        "nvmlDeviceGetNvLinkState": lambda: first < len(card.links),
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda: 2 if link == "switch" else 0,
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda: SimpleNamespace(busId=address(int(str(link)))),
        "nvmlDeviceGetMigMode": lambda: (len(card.slices) > 0, 0),
        "nvmlDeviceGetMaxMigDeviceCount": lambda: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": lambda: _slice(card, index, first),
        "nvmlDeviceGetAttributes": lambda: SimpleNamespace(
            gpuInstanceSliceCount=card.slices[number or 0][2]
        ),
    }
    return answers[name]()


def _slice(card: Card, index: int, number: int) -> tuple[int, int]:
    if number >= len(card.slices):
        raise NvmlError("Not Found")
    return index, number


def address(index: int) -> str:
    return f"00000000:{index + 1:02X}:00.0"
