"""What GPUs a host is found to have, by what its driver says of them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.unit import nvml_machines as machines
from tests.unit.nvml_machines import Card, Nvml

from whale_train.machine import nvml
from whale_train.machine.nvml import visible_gpus
from whale_train.strategies.hardware.catalogue import DEVICES
from whale_train.strategies.hardware.gpu_facts import device_of, is_catalogued, link_of


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def linked(card: Card, *leads_to: object) -> Card:
    return replace(card, links=leads_to)


def switched(card: Card, count: int, links: int) -> list[Card]:
    return [linked(card, *["switch"] * links)] * count


# A DGX-1's eight cards, each with six links to four others.
_CUBE = {
    0: (1, 2, 3, 3, 4, 4),
    1: (0, 2, 2, 3, 5, 5),
    2: (0, 1, 1, 3, 6, 6),
    3: (0, 0, 1, 2, 7, 7),
}
DGX_1 = [
    linked(machines.V100_32, *(peer if i < 4 else (peer + 4) % 8 for peer in _CUBE[i % 4]))
    for i in range(8)
]
BRIDGED = [linked(machines.RTX_3090, *[peer] * 4) for peer in (1, 0, 3, 2)]

# machine: its cards, what they are, what joins them
MACHINES: dict[str, tuple[Sequence[Card], str, str]] = {
    "P100 PCIe": ([machines.P100] * 8, "p100_pcie_16gb", "pcie3_x16"),
    "V100 PCIe 16": ([machines.V100_PCIE_16] * 4, "v100_pcie_16gb", "pcie3_x16"),
    "V100 PCIe 32": ([machines.V100_PCIE_32] * 2, "v100_pcie_32gb", "pcie3_x16"),
    "V100 SXM2 16": (
        [linked(machines.V100_16, *[1 - i] * 6) for i in range(2)],
        *("v100_sxm2_16gb", "nvlink2"),
    ),
    "DGX-1": (DGX_1, "v100_sxm2_32gb", "nvlink2"),
    "T4": ([machines.T4] * 4, "t4_16gb", "pcie3_x16"),
    "A10": ([machines.A10] * 2, "a10_24gb", "pcie4_x16"),
    "A30": ([machines.A30], "a30_24gb", "pcie4_x16"),
    "A100 40 SXM": (switched(machines.A100_40, 8, 12), "a100_sxm_40gb", "nvlink3"),
    "A100 80 SXM": (switched(machines.A100_80, 8, 12), "a100_sxm_80gb", "nvlink3"),
    "A100 40 PCIe": ([machines.A100_PCIE_40] * 2, "a100_pcie_40gb", "pcie4_x16"),
    "A100 80 PCIe": ([machines.A100_PCIE_80] * 2, "a100_pcie_80gb", "pcie4_x16"),
    "RTX 3090 in bridged pairs": (BRIDGED, "rtx_3090_24gb", "pcie4_x16"),
    "RTX 3090 bridged": (BRIDGED[:2], "rtx_3090_24gb", "nvlink_56.25_gb_s"),
    "RTX 4090": ([machines.RTX_4090] * 2, "rtx_4090_24gb", "pcie4_x16"),
    "RTX 5090": ([machines.RTX_5090], "rtx_5090_32gb", "pcie5_x16"),
    "RTX A6000": ([machines.A6000] * 4, "rtx_a6000_48gb", "pcie4_x16"),
    "L4": ([machines.L4] * 8, "l4_24gb", "pcie4_x16"),
    "L40S": ([machines.L40S] * 4, "l40s_48gb", "pcie4_x16"),
    "H100 SXM": (switched(machines.H100, 8, 18), "h100_sxm_80gb", "nvlink4"),
    "H100 PCIe": ([machines.H100_PCIE] * 4, "h100_pcie_80gb", "pcie5_x16"),
    "H100 NVL": (
        [linked(machines.H100_NVL, *[1 - i] * 12) for i in range(2)],
        *("h100_nvl_94gb", "nvlink3"),
    ),
    "H200": (switched(machines.H200, 8, 18), "h200_sxm_141gb", "nvlink4"),
    "GH200": ([machines.GH200], "gh200_96gb", "pcie5_x16"),
    "B200": (switched(machines.B200, 8, 18), "b200_180gb", "nvlink5"),
    "half the lanes": ([replace(machines.T4, pcie=(3, 8))], "t4_16gb", "pcie3_x8"),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_card_is_known_by_its_name_and_memory(machine: str) -> None:
    cards, name, link = MACHINES[machine]
    gpus = visible_gpus(Nvml(cards))
    assert [device_of(gpu) for gpu in gpus] == [DEVICES[name]] * len(cards)
    assert link_of(gpus).name == link


@pytest.mark.parametrize("machine", MACHINES)
def test_properties_make_the_catalogue_s_figures(machine: str) -> None:
    """What a card nobody knows is planned with, of cards that are known: GeForce drivers say a
    clock that cards hardly reach."""
    (card, *_), name, _ = MACHINES[machine]
    (gpu,) = visible_gpus(Nvml([replace(card, name=f"{card.name} of tomorrow")]))
    found, known = device_of(gpu), DEVICES[name]
    assert not is_catalogued(found)
    high = 1.35 if "GeForce" in card.name else 1.19
    assert found.flops.keys() == known.flops.keys()
    for precision, flops in known.flops.items():
        assert 0.98 < found.flops[precision] / flops < high, precision
    assert found.memory_bandwidth_bytes_s == pytest.approx(known.memory_bandwidth_bytes_s, rel=0.03)
    assert found.memory_bytes == card.mib * 2**20


@pytest.mark.parametrize(
    ("card", "name", "flops"),
    [
        (machines.RTX_8000, "quadro_rtx_8000_48gb", {"fp32": 19.4e12, "fp16": 154.8e12}),
        (machines.P100_SXM, "p100_sxm2_16gb", {"fp32": 10.6e12, "fp16": 21.2e12}),
        (
            replace(machines.H200, name="NVIDIA H200 NVL", capability=(9, 0)),
            *(
                "h200_nvl_140gb",
                {"fp32": 66.9e12, "fp16": 1070.5e12, "bf16": 1070.5e12, "fp8": 2141e12},
            ),
        ),
        (
            replace(machines.A100_80, name="NVIDIA A100-SXM-64GB", mib=65536),
            *("a100_sxm_64gb", {"fp32": 19.5e12, "fp16": 311.9e12, "bf16": 311.9e12}),
        ),
        (
            replace(machines.B200, name="NVIDIA R900", capability=(13, 0)),
            *("r900_179gb", {"fp32": 74.5e12, "fp16": 297.8e12, "bf16": 297.8e12, "fp8": 595.6e12}),
        ),
    ],
)
def test_another_card_has_the_figures_of_its_properties(
    card: Card, name: str, flops: dict[str, float]
) -> None:
    (gpu,) = visible_gpus(Nvml([card]))
    found = device_of(gpu)
    assert found.name == name
    assert found.flops == pytest.approx(flops, rel=0.005)


def test_a_driver_that_says_little_leaves_figures_to_plan_with() -> None:
    silent = frozenset(
        f"nvmlDeviceGet{what}"
        for what in (
            *("NumGpuCores", "MemoryBusWidth", "MaxClockInfo", "MaxPcieLinkGeneration"),
            *("MaxPcieLinkWidth", "NvLinkState", "MigMode"),
        )
    )
    old = replace(machines.RTX_8000, silent=silent)
    gpus = visible_gpus(Nvml([old, old]))
    assert min(device_of(gpus[0]).flops.values()) > 0
    assert device_of(gpus[0]).memory_bandwidth_bytes_s > 0
    assert link_of(gpus).name == "pcie3_x16"


def test_memory_tells_editions_apart() -> None:
    """An A100 of a size that was never sold as such is not one of another."""
    gpu = visible_gpus(Nvml([replace(machines.V100_32, mib=16384)]))[0]
    assert device_of(gpu).name == "v100_sxm2_16gb"


SLICED = replace(
    machines.A100_40,
    slices=(("aa", 19968, 3), ("bb", 9856, 2), ("cc", 4864, 1)),
    links=("switch",) * 12,
)


def test_slices_of_a_card_are_devices_of_their_own() -> None:
    gpus = visible_gpus(Nvml([SLICED, linked(machines.A100_40, *["switch"] * 12)]))
    assert [gpu.uuid for gpu in gpus] == ["MIG-aa", "MIG-bb", "MIG-cc", "GPU-00000001-aaaa"]
    devices = [device_of(gpu) for gpu in gpus]
    assert [device.name for device in devices] == [
        *("a100_sxm4_slice_20gb", "a100_sxm4_slice_10gb", "a100_sxm4_slice_5gb", "a100_sxm_40gb")
    ]
    whole = DEVICES["a100_sxm_40gb"]
    for device, part in zip(devices, (3 / 7, 2 / 7, 1 / 7), strict=False):
        assert device.flops["bf16"] == pytest.approx(part * whole.flops["bf16"], rel=0.01)
    assert devices[0].memory_bytes == 19968 * 2**20
    assert link_of(gpus[:2]).name == "pcie4_x16"


def test_a_host_without_a_driver_has_none() -> None:
    assert visible_gpus(Nvml([machines.T4], has_driver=False)) == ()


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        ("1,0", [1, 0]),
        ("", []),
        ("2", [2]),
        ("0,9,1", [0]),  # CUDA stops at the first that is not there
        ("GPU-00000002", [2]),
        ("GPU-00000002-aaaa,GPU-00000000", [2, 0]),
        ("GPU-0", []),  # of several
        ("none", []),
    ],
)
def test_the_environment_chooses(
    visible: str, found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    library = Nvml([machines.T4] * 3)
    uuids = [gpu.uuid for gpu in visible_gpus(library)]
    assert uuids == [f"GPU-{index:08x}-aaaa" for index in found]
    assert library.shut_down == 1


def test_a_slice_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bb")
    assert [gpu.uuid for gpu in visible_gpus(Nvml([SLICED]))] == ["MIG-bb"]


def test_cuda_numbers_unlike_cards_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest first, unless it is told to go by their addresses."""
    mixed = Nvml([machines.P100, machines.V100_PCIE_16])
    asked: list[int] = []

    def of_cuda(gpus: list[object]) -> list[str]:
        asked.append(len(gpus))
        return ["GPU-00000001-aaaa", "GPU-00000000-aaaa"]

    monkeypatch.setattr(nvml, "_asked_of_cuda", of_cuda)
    assert len(visible_gpus(mixed)) == 2  # all of them: nobody gave a number
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [gpu.name for gpu in visible_gpus(mixed)] == [
        *("Tesla V100-PCIE-16GB", "Tesla P100-PCIE-16GB")
    ]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [gpu.name for gpu in visible_gpus(mixed)] == [
        *("Tesla P100-PCIE-16GB", "Tesla V100-PCIE-16GB")
    ]
    assert asked == [2]
