"""Devices, links and hosts by name, which an inventory may use without giving their figures.

Figures are vendors' peaks. FLOP/s are dense (half the figure printed "with sparsity"). `fp32` is
the rate of the ordinary units, never of TF32, which rounds its inputs to 10 bits of mantissa.
`fp16` and `bf16` are the rates of the tensor cores with fp32 accumulation, as in training. A
precision without units of its own is absent. The rates of `fp8`, and the fractions of the peaks
that are reached, are listed separately. Memory is the printed size in powers of ten, the smaller
reading. Bandwidth of a link is in bytes/s in one direction: vendors print the sum of both
directions for NVLink.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from whale_train.strategies.hardware.cluster import CPU_PROCESS, Device, HostFigures, Link, Reached

_PEAKS = (
    # NVIDIA Tesla P100 GPU Accelerator (PCIe) datasheet. No tensor cores: fp16 runs on the fp32
    # units at twice their rate.
    Device("p100_pcie_16gb", {"fp32": 9.3e12, "fp16": 18.7e12}, 16e9, 732e9),
    # NVIDIA V100 Tensor Core GPU datasheet, PCIe and SXM2 columns. Volta has no bf16.
    Device("v100_pcie_16gb", {"fp32": 14e12, "fp16": 112e12}, 16e9, 900e9),
    Device("v100_pcie_32gb", {"fp32": 14e12, "fp16": 112e12}, 32e9, 900e9),
    Device("v100_sxm2_16gb", {"fp32": 15.7e12, "fp16": 125e12}, 16e9, 900e9),
    Device("v100_sxm2_32gb", {"fp32": 15.7e12, "fp16": 125e12}, 32e9, 900e9),
    # NVIDIA T4 Tensor Core GPU product brief. Turing has no bf16.
    Device("t4_16gb", {"fp32": 8.1e12, "fp16": 65e12}, 16e9, 320e9),
    # NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A. fp16 with fp16 accumulation
    # would be twice as fast.
    Device("rtx_3090_24gb", {"fp32": 35.6e12, "fp16": 71e12, "bf16": 71e12}, 24e9, 936e9),
    # NVIDIA Ada GPU Architecture whitepaper, appendix A. As above for fp16 accumulation.
    Device("rtx_4090_24gb", {"fp32": 82.6e12, "fp16": 165.2e12, "bf16": 165.2e12}, 24e9, 1008e9),
    # NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A. As above.
    Device("rtx_5090_32gb", {"fp32": 104.8e12, "fp16": 209.5e12, "bf16": 209.5e12}, 32e9, 1792e9),
    # NVIDIA RTX A6000 datasheet (309.7 TFLOPS with sparsity).
    Device("rtx_a6000_48gb", {"fp32": 38.7e12, "fp16": 154.8e12, "bf16": 154.8e12}, 48e9, 768e9),
    # NVIDIA A10 Tensor Core GPU datasheet.
    Device("a10_24gb", {"fp32": 31.2e12, "fp16": 125e12, "bf16": 125e12}, 24e9, 600e9),
    # NVIDIA A30 Tensor Core GPU datasheet.
    Device("a30_24gb", {"fp32": 10.3e12, "fp16": 165e12, "bf16": 165e12}, 24e9, 933e9),
    # NVIDIA A100 Tensor Core GPU datasheet, 40 GB and 80 GB editions.
    Device("a100_pcie_40gb", {"fp32": 19.5e12, "fp16": 312e12, "bf16": 312e12}, 40e9, 1555e9),
    Device("a100_pcie_80gb", {"fp32": 19.5e12, "fp16": 312e12, "bf16": 312e12}, 80e9, 1935e9),
    Device("a100_sxm_40gb", {"fp32": 19.5e12, "fp16": 312e12, "bf16": 312e12}, 40e9, 1555e9),
    Device("a100_sxm_80gb", {"fp32": 19.5e12, "fp16": 312e12, "bf16": 312e12}, 80e9, 2039e9),
    # NVIDIA L4 Tensor Core GPU datasheet (242 TFLOPS with sparsity).
    Device("l4_24gb", {"fp32": 30.3e12, "fp16": 121e12, "bf16": 121e12}, 24e9, 300e9),
    # NVIDIA L40S datasheet.
    Device("l40s_48gb", {"fp32": 91.6e12, "fp16": 362e12, "bf16": 362e12}, 48e9, 864e9),
    # NVIDIA H100 Tensor Core GPU datasheet, PCIe and SXM columns (1,513 and 1,979 TFLOPS with
    # sparsity).
    Device("h100_pcie_80gb", {"fp32": 51e12, "fp16": 756e12, "bf16": 756e12}, 80e9, 2e12),
    Device("h100_sxm_80gb", {"fp32": 67e12, "fp16": 989e12, "bf16": 989e12}, 80e9, 3.35e12),
    # NVIDIA H100 NVL datasheet (1,671 TFLOPS with sparsity).
    Device("h100_nvl_94gb", {"fp32": 60e12, "fp16": 835e12, "bf16": 835e12}, 94e9, 3.9e12),
    # NVIDIA GH200 Grace Hopper Superchip datasheet: its GPU, of 96 GB HBM3.
    Device("gh200_96gb", {"fp32": 67e12, "fp16": 990e12, "bf16": 990e12}, 96e9, 4e12),
    # NVIDIA H200 Tensor Core GPU datasheet: an H100 SXM with more and faster memory.
    Device("h200_sxm_141gb", {"fp32": 67e12, "fp16": 989e12, "bf16": 989e12}, 141e9, 4.8e12),
    # NVIDIA DGX B200 datasheet, an eighth of it (36 PFLOPS of 16 bits with sparsity in all).
    Device("b200_180gb", {"fp32": 75e12, "fp16": 2.25e15, "bf16": 2.25e15}, 180e9, 8e12),
    # Nominal, not measured and from no datasheet: one process on one core of an unknown CPU. One
    # AVX2 core with two fused multiply-add units does 32 FLOP a cycle, about 1e11 a second near
    # 3 GHz; 16-bit types are computed as fp32; 25.6e9 is one channel of DDR4-3200. Processes of
    # one machine are equal, so shares do not depend on these; a predicted step time does, and is
    # no better than they are. The memory is 0 because it is the machine's, shared among its
    # processes: the inventory's reader fills it in.
    Device(CPU_PROCESS, {"fp32": 1e11, "fp16": 1e11, "bf16": 1e11}, 0.0, 25.6e9),
)

# The rates of tensor cores for factors of 8 bits with fp32 accumulation, from the same sources:
# 485, 1,466, 3,026, 3,958, 3,341 and 3,958 TFLOPS with sparsity for L4, L40S, H100 PCIe, SXM and
# NVL, and GH200 and H200; 72 PFLOPS with sparsity for a DGX B200.
_FP8 = {
    "rtx_4090_24gb": 330.3e12,
    "rtx_5090_32gb": 419e12,
    "l4_24gb": 242e12,
    "l40s_48gb": 733e12,
    "h100_pcie_80gb": 1.513e15,
    "h100_sxm_80gb": 1.979e15,
    "h100_nvl_94gb": 1.67e15,
    "gh200_96gb": 1.979e15,
    "h200_sxm_141gb": 1.979e15,
    "b200_180gb": 4.5e15,
}

# Measured fractions of the peaks. Products: the largest rates that Stas Bekman's "Machine Learning
# Engineering" lists as "Maximum Achievable Matmul FLOPS" (bf16, torch 2.5 to 2.7; the H200's is the
# H100's), and for V100, 83 of 112 TFLOP/s (Markidis et al. 2018, arXiv 1803.04014) with 790 of
# 900 GB/s copied (paranumal.com, "Rough-n-Ready Roofline: NVIDIA V100 edition", 2018). Attention:
# FlashAttention-2 reaches 50 to 73% on A100 (Dao 2023, arXiv 2307.08691), and 35% on H100 (Shah et
# al. 2024, arXiv 2407.08608).
_REACHED = {
    "v100": Reached(products=0.74, bandwidth=0.88),
    "a100_pcie": Reached(products=0.81, attention=0.6),
    "a100_sxm": Reached(products=0.87, attention=0.6),
    "h100": Reached(products=0.80, attention=0.35),
    "h200": Reached(products=0.80, attention=0.35),
    "gh200": Reached(products=0.84, attention=0.35),
    "b200": Reached(products=0.78, attention=0.35),
    # Nominal like its peaks: products come near the peak of ordinary units.
    CPU_PROCESS: Reached(0.85, 0.85, 0.8, 5e-6),
}

# Nominal: half of it for CUDA's context with torch's kernels, half for NCCL's buffers of some
# communicators (their size goes with the channels that the links are worth) and the workspace of
# cuBLAS (8 MiB, and 32 MiB on Hopper: torch's CUBLAS_WORKSPACE_CONFIG).
RESERVED_BYTES = 1e9


def _completed(device: Device) -> Device:
    reached = next((x for kind, x in _REACHED.items() if device.name.startswith(kind)), Reached())
    reserved = 0.0 if device.name == CPU_PROCESS else RESERVED_BYTES
    flops = device.flops
    if device.name in _FP8:
        flops = {**flops, "fp8": _FP8[device.name]}
    return replace(device, flops=flops, reached=reached, reserved_bytes=reserved)


_DEVICES = tuple(map(_completed, _PEAKS))

# No datasheet gives the latency of one step of a collective. These are nominal, from NCCL's own
# tuning model for a ring step of its Simple protocol (hwLatencies for NVLINK, PCI, NET).
_NVLINK_LATENCY_S = 3.4e-6
_PCIE_LATENCY_S = 5.7e-6
_NETWORK_LATENCY_S = 14e-6

_LINKS = (
    # NVLink: links x bytes/s a link and direction, from the same datasheets and whitepapers.
    Link("nvlink2", 6 * 25e9, _NVLINK_LATENCY_S),  # V100 SXM2
    Link("nvlink3", 12 * 25e9, _NVLINK_LATENCY_S),  # A100 SXM
    Link("nvlink4", 18 * 25e9, _NVLINK_LATENCY_S),  # H100 SXM, H200
    Link("nvlink5", 18 * 50e9, _NVLINK_LATENCY_S),  # B200
    # PCI Express base specification: 16 lanes x 8, 16, 32 GT/s, 128 of 130 bits payload.
    Link("pcie3_x16", 15.75e9, _PCIE_LATENCY_S),
    Link("pcie4_x16", 31.5e9, _PCIE_LATENCY_S),
    Link("pcie5_x16", 63e9, _PCIE_LATENCY_S),
    # Line rate / 8 (IEEE 802.3; InfiniBand HDR and NDR, 4 lanes). TCP reaches a little less.
    Link("ethernet_1g", 1e9 / 8, _NETWORK_LATENCY_S),
    Link("ethernet_10g", 10e9 / 8, _NETWORK_LATENCY_S),
    Link("ethernet_25g", 25e9 / 8, _NETWORK_LATENCY_S),
    Link("ethernet_50g", 50e9 / 8, _NETWORK_LATENCY_S),
    Link("ethernet_100g", 100e9 / 8, _NETWORK_LATENCY_S),
    Link("infiniband_hdr200", 200e9 / 8, _NETWORK_LATENCY_S),
    Link("infiniband_ndr400", 400e9 / 8, _NETWORK_LATENCY_S),
    # Nominal, not measured and from no datasheet: processes of one host over gloo. Well below a
    # core's memory bandwidth, because every byte is copied several times and summed; the latency
    # stands for waking a process that may be waiting for a core.
    Link("shared_memory", 1e9, 5e-5),
)

_BY_NAME = {link.name: link for link in _LINKS}

_HOSTS = (
    # NVIDIA DGX A100 640GB datasheet; two AMD EPYC 7742, of 8 channels of DDR4-3200 each.
    HostFigures("dgx_a100", 2e12, 2 * 204.8e9, _BY_NAME["pcie4_x16"]),
    # NVIDIA DGX H100/H200 datasheet; two Intel Xeon Platinum 8480C, of 8 channels of DDR5-4800
    # each.
    HostFigures("dgx_h200", 2e12, 2 * 307.2e9, _BY_NAME["pcie5_x16"]),
)

DEVICES: Mapping[str, Device] = MappingProxyType({device.name: device for device in _DEVICES})
LINKS: Mapping[str, Link] = MappingProxyType(_BY_NAME)
HOSTS: Mapping[str, HostFigures] = MappingProxyType({host.name: host for host in _HOSTS})
