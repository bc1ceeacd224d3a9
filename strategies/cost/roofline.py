"""How long work takes on a device: rooflines of kinds of operations.

A device that was calibrated (`mode=calibrate`) has rooflines of its own for every kind; of any
other they are the catalogue's peaks times what such devices reach of them. Transfers are
`collectives.py`'s.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from whale_train.strategies.cost.op_work import BY_FLOPS, KernelKind, Work
from whale_train.strategies.hardware.cluster import Device, HostShare, Kernel, Roofline

_VIEW_OVERHEAD_S = 0.0  # hidden behind the device's queue
# Attention of devices of which nothing was published: those with bf16 units have FlashAttention-2,
# taken for the lower end of what it reaches on A100; older ones attend as FlashAttention did, which
# reached 25 to 40% there (Dao 2023, arXiv 2307.08691).
_FLASH, _OLDER = 0.5, 0.3


@dataclass(frozen=True)
class Times:
    """Seconds of a piece of work: forward, and the two parts of its backward."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight

    def scaled(self, factor: float) -> "Times":
        return Times(
            factor * self.forward, factor * self.backward_input, factor * self.backward_weight
        )

    def __add__(self, other: "Times") -> "Times":
        return Times(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )


def work_times(works: Mapping[Work, int], samples: float, device: Device, precision: str) -> Times:
    """Return the seconds of so many of each of `works` for `samples` samples."""
    forward = of_input = of_weight = 0.0
    kernels = {kind: kernel_of(device, precision, kind) for kind in KernelKind}
    for work, count in works.items():
        kernel = kernels[work.kind]
        flops, moved = work.flops * samples, work.forward.at(samples)
        if flops or moved or work.kind is KernelKind.VIEW:
            forward += count * kernel.forward.seconds(flops, moved)
        parts = work.input_gradient + work.weight_gradient
        if not parts:
            continue
        back = work.backward.at(samples) if work.backward is not None else moved
        each = count * kernel.backward.seconds(flops, back)
        if work.kind in BY_FLOPS and work.kind is not KernelKind.ATTENTION:
            each /= 2  # a backward has two products, of which there may be one
            of_input += each * work.input_gradient
            of_weight += each * work.weight_gradient
        elif work.input_gradient:
            of_input += each
        else:
            of_weight += each
    return Times(forward, of_input, of_weight)


def kernel_of(device: Device, precision: str, kind: KernelKind) -> Kernel:
    """Return the rooflines of `kind` on `device`: measured, or from its peaks. KeyError where it
    has no unit for `precision`."""
    measured = device.kernels.get(precision, {}).get(kind)
    if measured is not None:
        return measured
    reached = device.reached
    part = _attention(device) if kind is KernelKind.ATTENTION else reached.products
    rate = part * flops_rate(device, precision)
    narrower = 1.0 if precision == "fp32" else 0.5
    bandwidth = reached.bandwidth * device.memory_bandwidth_bytes_s / narrower
    overhead = _VIEW_OVERHEAD_S if kind is KernelKind.VIEW else reached.overhead_s
    forward = Roofline(overhead, rate, bandwidth)
    if kind in BY_FLOPS:  # two products where the forward has one
        return Kernel(forward, Roofline(2 * overhead, rate / 2, bandwidth / 2))
    return Kernel(forward, forward)


def _attention(device: Device) -> float:
    if device.reached.attention is not None:
        return device.reached.attention
    return _FLASH if "bf16" in device.flops else _OLDER


def flops_rate(device: Device, precision: str) -> float:
    """Peak FLOP/s of `device` at `precision`; KeyError where it has no unit for it."""
    return device.flops[precision]


def whole_times(flops: float, device: Device, precision: str) -> Times:
    """Return the seconds of a model whose operations nobody knows: `flops` of products."""
    kernel = kernel_of(device, precision, KernelKind.PRODUCT)
    half = kernel.backward.seconds(flops, 0.0) / 2
    return Times(kernel.forward.seconds(flops, 0.0), half, half)


def accumulation_time_s(elements: float, parameters: int, device: Device, precision: str) -> float:
    """Return the seconds of adding a backward's gradients to those of earlier ones: so many
    `elements` of so many `parameters`, in fp32, two read and one written. (Autograd keeps those of
    the first backward as they are made.)"""
    roofline = kernel_of(device, precision, KernelKind.POINTWISE).forward
    width = 4 if precision == "fp32" else 8  # traffic of 16-bit values is counted as if of fp32
    return parameters * roofline.overhead_s + 3 * width * elements / roofline.bytes_s


def zeros_time_s(elements: float, device: Device, precision: str) -> float:
    """Return the seconds of the zeros in the gradient of a table, of so many `elements`, to which a
    lookup's backward adds its rows, in fp32."""
    return 4 * elements / kernel_of(device, precision, KernelKind.LOOKUP).backward.bytes_s


def update_time_s(elements: float, states: int, device: Device) -> float:
    """Return the seconds of an optimizer's update: every fp32 state and weight read and written,
    the gradient read for it and once before for the norm."""
    measured = [
        kinds[KernelKind.UPDATE] for kinds in device.kernels.values() if KernelKind.UPDATE in kinds
    ]
    reached = device.reached
    bandwidth = reached.bandwidth * device.memory_bandwidth_bytes_s
    roofline = measured[0].forward if measured else Roofline(reached.overhead_s, inf, bandwidth)
    return roofline.seconds(0.0, 4 * elements * (2 * states + 4))


# Nominal, of a host nobody describes: what its memory gives to each of its devices' optimizers, and
# the PCI Express link (3.0, 16 lanes) that gradients and parameters take to and from it.
_HOST = HostShare(memory_bytes_s=15e9, link_bytes_s=12e9)
_OF_HOST_MEMORY = 0.8  # what streams reach of a host's bandwidth, nominal


def fetch_time_s(num_bytes: float, devices: Iterable[Device], on_cpu: bool) -> float:
    """Return the seconds in which what each of `devices` keeps on its host and needs arrives at the
    slowest."""
    if on_cpu:
        return 0.0
    hosts = {id(device): _host_of(device) for device in devices}
    return num_bytes / min(host.link_bytes_s for host in hosts.values())


def offloaded_update_time_s(
    elements: float, states: int, device: Device, on_cpu: bool, moves: bool = True
) -> float:
    """Return the seconds of an update of state kept on the host: gradients down, the update there,
    parameters up; or the update alone, where neither `moves` then."""
    if on_cpu:
        return update_time_s(elements, states, device)
    host = _host_of(device)
    moved = 2 * 4 * elements / host.link_bytes_s if moves else 0.0
    return moved + 4 * elements * (2 * states + 4) / host.memory_bytes_s


def _host_of(device: Device) -> HostShare:
    host = device.host
    if host is None:
        return _HOST
    return HostShare(_OF_HOST_MEMORY * host.memory_bytes_s, host.link_bytes_s)
