"""The catalogue against figures derived some other way: units x clock, lanes x rate."""

import math

import pytest

from whale_train.strategies.hardware.catalogue import DEVICES, LINKS
from whale_train.strategies.hardware.cluster import CPU_PROCESS

# (fp32 units, boost clock in Hz) of the whitepapers: each unit does a multiply-add a cycle.
FP32_UNITS = {
    "p100_pcie_16gb": (3584, 1303e6),
    "v100_pcie_16gb": (5120, 1380e6),
    "v100_pcie_32gb": (5120, 1380e6),
    "v100_sxm2_16gb": (5120, 1530e6),
    "v100_sxm2_32gb": (5120, 1530e6),
    "t4_16gb": (2560, 1590e6),
    "rtx_3090_24gb": (10496, 1695e6),
    "rtx_4090_24gb": (16384, 2520e6),
    "rtx_5090_32gb": (21760, 2407e6),
    "rtx_a6000_48gb": (10752, 1800e6),
    "a10_24gb": (9216, 1695e6),
    "a30_24gb": (3584, 1440e6),
    "a100_pcie_40gb": (6912, 1410e6),
    "a100_pcie_80gb": (6912, 1410e6),
    "a100_sxm_40gb": (6912, 1410e6),
    "a100_sxm_80gb": (6912, 1410e6),
    "l40s_48gb": (18176, 2520e6),
    "l4_24gb": (7424, 2040e6),
    "h100_pcie_80gb": (14592, 1755e6),
    "h100_sxm_80gb": (16896, 1980e6),
    "h100_nvl_94gb": (16896, 1785e6),
    "gh200_96gb": (16896, 1980e6),
    "h200_sxm_141gb": (16896, 1980e6),
    "b200_180gb": (18944, 1965e6),
}

# Dense fp16 against fp32 of the same clock, by architecture: P100 packs two in a unit; tensor
# cores with fp32 accumulation do 8x (V100, T4), 16x (A100, A30), 4x (A10, L4, L40S, RTX A6000), 2x
# (GeForce), 16x (H100) and 32x (B200) at lower clocks than the units'.
FP16_TO_FP32 = {
    "p100": 2,
    "v100": 8,
    "t4": 8,
    "rtx_3": 2,
    "rtx_4": 2,
    "rtx_5": 2,
    "rtx_a6000": 4,
    "a10_": 4,
    "a30": 16,
    "a100": 16,
    "l4_": 4,
    "l40s": 4,
    "h100_sxm": 15,
    "h100_pcie": 15,
    "h100_nvl": 14,
    "gh200": 15,
    "b200": 30,
    "h200": 15,
}

GPUS = sorted(set(DEVICES) - {CPU_PROCESS})


@pytest.mark.parametrize("name", GPUS)
def test_fp32_is_two_operations_per_unit_and_cycle(name: str) -> None:
    units, clock_hz = FP32_UNITS[name]
    assert DEVICES[name].flops["fp32"] == pytest.approx(2 * units * clock_hz, rel=0.02)


@pytest.mark.parametrize("name", GPUS)
def test_fp16_is_the_dense_tensor_rate(name: str) -> None:
    (ratio,) = (value for prefix, value in FP16_TO_FP32.items() if name.startswith(prefix))
    flops = DEVICES[name].flops
    # Tensor cores may run at another clock than the printed boost: up to 4% off.
    assert flops["fp16"] / flops["fp32"] == pytest.approx(ratio, rel=0.04)


def test_bf16_from_ampere_on_and_as_fast_as_fp16() -> None:
    older = {name for name in GPUS if name.startswith(("p100", "v100", "t4"))}
    assert {name for name in GPUS if "bf16" not in DEVICES[name].flops} == older
    assert all(
        DEVICES[name].flops["bf16"] == DEVICES[name].flops["fp16"] for name in set(GPUS) - older
    )


def test_fp8_from_ada_on_and_twice_as_fast_as_fp16() -> None:
    newer = {x for x in GPUS if x.startswith(("rtx_4", "rtx_5", "l4", "h", "gh", "b2"))}
    assert {name for name in GPUS if "fp8" in DEVICES[name].flops} == newer
    for name in newer:
        flops = DEVICES[name].flops
        # L40S's datasheet prints 733 beside 362.
        assert flops["fp8"] / flops["fp16"] == pytest.approx(2, rel=0.015)


@pytest.mark.parametrize("name", GPUS)
def test_memory_is_what_the_name_says(name: str) -> None:
    gigabytes = int(name.rsplit("_", 1)[1].removesuffix("gb"))
    assert DEVICES[name].memory_bytes == gigabytes * 1e9


# (bus width in bits, rate of a pin in bit/s).
@pytest.mark.parametrize(
    ("name", "bus_bits", "pin_bit_s"),
    [
        ("p100_pcie_16gb", 4096, 1.43e9),
        ("v100_sxm2_32gb", 4096, 1.752e9),
        ("t4_16gb", 256, 10e9),
        ("rtx_3090_24gb", 384, 19.5e9),
        ("rtx_4090_24gb", 384, 21e9),
        ("a10_24gb", 384, 12.5e9),
        ("a100_sxm_40gb", 5120, 2.43e9),
        ("a100_sxm_80gb", 5120, 3.186e9),
        ("l4_24gb", 192, 12.5e9),
        ("l40s_48gb", 384, 18e9),
        ("h100_sxm_80gb", 5120, 5.23e9),
    ],
)
def test_memory_bandwidth_is_width_times_rate(name: str, bus_bits: int, pin_bit_s: float) -> None:
    expected = bus_bits * pin_bit_s / 8
    assert DEVICES[name].memory_bandwidth_bytes_s == pytest.approx(expected, rel=0.01)


# NVLink as printed, both directions together.
@pytest.mark.parametrize(("name", "both"), [("nvlink2", 300), ("nvlink3", 600), ("nvlink4", 900)])
def test_nvlink_is_half_the_printed_sum(name: str, both: int) -> None:
    assert LINKS[name].bandwidth_bytes_s == both * 1e9 / 2


@pytest.mark.parametrize(("generation", "transfers_s"), [(3, 8e9), (4, 16e9), (5, 32e9)])
def test_pcie_is_sixteen_lanes(generation: int, transfers_s: float) -> None:
    expected = 16 * transfers_s * 128 / 130 / 8
    assert LINKS[f"pcie{generation}_x16"].bandwidth_bytes_s == pytest.approx(expected, rel=1e-3)


def test_networks_are_line_rates_in_bytes() -> None:
    printed = {
        "ethernet_1g": 0.125e9,
        "ethernet_10g": 1.25e9,
        "ethernet_25g": 3.125e9,
        "ethernet_50g": 6.25e9,
        "ethernet_100g": 12.5e9,
        "infiniband_hdr200": 25e9,
        "infiniband_ndr400": 50e9,
    }
    assert {name: LINKS[name].bandwidth_bytes_s for name in printed} == printed


def test_entries_carry_the_name_they_are_found_by() -> None:
    assert all(device.name == name for name, device in DEVICES.items())
    assert all(link.name == name for name, link in LINKS.items())
    assert all(math.isfinite(link.latency_s) and link.latency_s > 0 for link in LINKS.values())


def test_the_catalogue_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        DEVICES["mine"] = DEVICES["t4_16gb"]  # type: ignore[index]
