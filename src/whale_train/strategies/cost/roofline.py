"""Seconds of work on a device, from the rooflines of kinds of operations.

A calibrated device (`mode=calibrate`) has measured rooflines for every kind. For any other device
they are the catalogue's peaks times the fraction that such devices reach. `collectives.py` owns
transfers.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from whale_train.strategies.cost.op_work import BY_FLOPS, KernelKind, Work
from whale_train.strategies.hardware.cluster import Device, HostShare, Kernel, Roofline

_VIEW_OVERHEAD_S = 0.0  # hidden behind the device's queue
# Fractions of the peak FLOP/s that attention reaches on devices without published figures. Devices
# with bf16 units have FlashAttention-2, at the lower end of its range on A100. Older ones have
# FlashAttention, which reached 25 to 40% there (Dao 2023, arXiv 2307.08691).
_FLASH, _OLDER = 0.5, 0.3
_KIND_IN_16_BITS = {KernelKind.SCALED: KernelKind.PRODUCT}
# Kernels that round one factor (runtime/kernels/scaled_products.py), counted in its source.
_ROUNDING_KERNELS = 15


@dataclass(frozen=True)
class Times:
    """Seconds of a piece of work.

    forward: seconds of the forward.
    backward_input: seconds of the backward's gradients of inputs.
    backward_weight: seconds of the backward's gradients of weights.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    @property
    def total(self) -> float:
        """Return the seconds of the forward and the backward together."""
        return self.forward + self.backward_input + self.backward_weight

    def scaled(self, factor: float) -> "Times":
        """Return the times, each multiplied by `factor`."""
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
    """Return the seconds of `works` for `samples` samples on `device` at `precision`. `works` maps
    each work to its number of occurrences."""
    forward = of_input = of_weight = 0.0
    kernels = {kind: kernel_of(device, precision, kind) for kind in KernelKind}
    for work, count in works.items():
        kernel = kernels[work.kind]
        flops, moved = work.flops * samples, work.forward.at(samples)
        if flops or moved or work.kind is KernelKind.VIEW:
            forward += count * kernel.forward.seconds(flops, moved)
        if work.kind is KernelKind.SCALED:
            pointwise = kernels[KernelKind.POINTWISE].forward
            rounding_s = count * _rounding_s(pointwise, work.rounded.at(samples))
            forward += rounding_s
        parts = work.input_gradient + work.weight_gradient
        if not parts:
            continue
        back = work.backward.at(samples) if work.backward is not None else moved
        if work.kind is KernelKind.SCALED:  # the gradient of the input is a product as the forward
            if work.input_gradient:
                of_input += count * kernel.forward.seconds(flops, back) + rounding_s
            if work.weight_gradient:
                product = kernels[KernelKind.PRODUCT].backward
                of_weight += count * product.seconds(flops, back) / 2
            continue
        backward_s = count * kernel.backward.seconds(flops, back)
        if work.kind in BY_FLOPS and work.kind is not KernelKind.ATTENTION:
            backward_s /= 2  # a backward has up to two products, of equal cost
            of_input += backward_s * work.input_gradient
            of_weight += backward_s * work.weight_gradient
        elif work.input_gradient:
            of_input += backward_s
        else:
            of_weight += backward_s
    return Times(forward, of_input, of_weight)


def kernel_of(device: Device, precision: str, kind: KernelKind) -> Kernel:
    """Return the rooflines of `kind` on `device` at `precision`: as measured, else from the
    device's peaks. Raises KeyError where nothing was measured and the device does not support
    `precision`.

    In fp8 all but products with rounded factors run in bf16. Those reach the same part of their
    peak as products in bf16 do.
    """
    if precision == "fp8":
        kernel = kernel_of(device, "bf16", _KIND_IN_16_BITS.get(kind, kind))
        if kind is not KernelKind.SCALED:
            return kernel
        faster = flops_rate(device, "fp8") / flops_rate(device, "bf16")
        return kernel.faster(faster)
    measured = device.measured(precision).get(kind)
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


def _rounding_s(pointwise: Roofline, num_bytes: float) -> float:
    """Return the seconds to round a product's two factors, of `num_bytes` in fp32, to 8 bits: one
    pass finds the largest value of each row, one writes the codes."""
    return 2 * _ROUNDING_KERNELS * pointwise.overhead_s + 2 * num_bytes / pointwise.bytes_s


def _attention(device: Device) -> float:
    if device.reached.attention is not None:
        return device.reached.attention
    return _FLASH if "bf16" in device.flops else _OLDER


def flops_rate(device: Device, precision: str) -> float:
    """Return the peak FLOP/s of `device` at `precision`. Raises KeyError where the device does not
    support `precision`."""
    return device.flops[precision]


def whole_times(flops: float, device: Device, precision: str) -> Times:
    """Return the seconds of a model whose operations are unknown. Its forward counts as matrix
    products of `flops` FLOP."""
    kernel = kernel_of(device, precision, KernelKind.PRODUCT)
    half = kernel.backward.seconds(flops, 0.0) / 2
    return Times(kernel.forward.seconds(flops, 0.0), half, half)


def accumulation_time_s(elements: float, parameters: int, device: Device, precision: str) -> float:
    """Return the seconds to add the gradients of a backward to those of earlier ones.

    The gradients are fp32, `elements` of them in `parameters` tensors. Each is read from two places
    and written to one. (Autograd keeps the gradients of the first backward without a copy.)
    """
    roofline = kernel_of(device, precision, KernelKind.POINTWISE).forward
    width = 4 if precision == "fp32" else 8  # traffic of 16-bit values is counted as fp32
    return parameters * roofline.overhead_s + 3 * width * elements / roofline.bytes_s


def zeros_time_s(elements: float, device: Device, precision: str) -> float:
    """Return the seconds to zero the fp32 gradient of a table of `elements`, to which a lookup's
    backward adds rows."""
    return 4 * elements / kernel_of(device, precision, KernelKind.LOOKUP).backward.bytes_s


def update_time_s(elements: float, states: float, device: Device) -> float:
    """Return the seconds of an optimizer's update of `elements` weights with `states` fp32 states
    each.

    Every state and weight is read and written. The gradient is read twice, for the norm and for the
    update.
    """
    measured = [
        kinds[KernelKind.UPDATE] for kinds in device.kernels.values() if KernelKind.UPDATE in kinds
    ]
    reached = device.reached
    bandwidth = reached.bandwidth * device.memory_bandwidth_bytes_s
    roofline = measured[0].forward if measured else Roofline(reached.overhead_s, inf, bandwidth)
    return roofline.seconds(0.0, 4 * elements * (2 * states + 4))


# Nominal, for a host without a description: the memory bandwidth for the optimizer of each of its
# devices, and the PCI Express link (3.0, 16 lanes) for gradients and parameters.
_HOST = HostShare(memory_bytes_s=15e9, link_bytes_s=12e9)
_OF_HOST_MEMORY = 0.8  # fraction of a host's memory bandwidth that streams reach, nominal


def fetch_time_s(num_bytes: float, devices: Iterable[Device], on_cpu: bool) -> float:
    """Return the seconds to fetch `num_bytes` from each host to its device, for the slowest of
    `devices`; 0 on CPUs, where host and device share their memory."""
    if on_cpu:
        return 0.0
    hosts = {id(device): _host_of(device) for device in devices}
    return num_bytes / min(host.link_bytes_s for host in hosts.values())


def offloaded_update_time_s(
    elements: float, states: float, device: Device, on_cpu: bool, moves: bool = True
) -> float:
    """Return the seconds of an update of optimizer state on the host.

    Gradients go to the host, the host updates, and parameters come back. If `moves` is False,
    neither crosses the link at this time, and only the update counts. On CPUs it is
    `update_time_s`.
    """
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
