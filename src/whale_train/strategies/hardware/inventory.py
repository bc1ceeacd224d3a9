"""The reader of a hardware inventory: from the mapping a user writes to a Cluster.

Three forms: `nodes:` with `network:` (any cluster), `kind: cpu` (equal CPU processes on one host)
and `kind: local` (the devices of this machine). Nothing here inspects the machine: its facts are
passed in. All faults are collected and none is raised.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import TypeVar

from whale_train.errors import Fault, nearest, shortened
from whale_train.strategies.hardware.catalogue import DEVICES, HOSTS, LINKS
from whale_train.strategies.hardware.cluster import (
    CPU_PROCESS,
    Cluster,
    Device,
    HostFigures,
    HostShare,
    Link,
    Node,
    NvmeFigures,
    SlurmRequest,
)

PRECISIONS = ("fp32", "bf16", "fp16", "fp8")

# YAML 1.1 reads 15.7e12 as text (it wants 15.7e+12), so numbers are also read from text.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?\d{1,18}")

MOST_DEVICES = 32_768  # the most in an inventory; a plan has a line for each

# The range of figures. No machine has figures outside it, and their quotients may overflow.
_SMALLEST, _LARGEST = 1e-6, 1e24

# Example values for missing keys.
_EXAMPLES = {
    "nodes": "[{devices: 8, device: a100_sxm_80gb, link: nvlink3}]",
    "network": "ethernet_50g",
    "devices": "8",
    "device": "a100_sxm_80gb",
    "link": "nvlink3",
    "name": "my_device",
    "flops": "{fp32: 15.7e12}",
    "memory_bytes": "32e9",
    "memory_bandwidth_bytes_s": "9e11",
    "bandwidth_bytes_s": "6.25e9",
    "latency_s": "1e-5",
    "bytes": "4e12",
    "read_bytes_s": "7e9",
    "write_bytes_s": "4e9",
}

_Entry = TypeVar("_Entry", Device, Link, HostFigures)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class MachineFacts:
    """Facts about this machine.

    cores: the number of CPU cores.
    memory_bytes: bytes of memory for ranks.
    gpus: the GPUs, in order.
    gpu_link: the link that joins the GPUs; None where unknown.
    """

    cores: int
    memory_bytes: int
    gpus: tuple[Device, ...]
    gpu_link: Link | None


@dataclass(frozen=True)
class _NodeEntry:
    """One item of `nodes`: `count` hosts of these `devices`."""

    count: int
    devices: tuple[Device, ...]
    link: Link
    host: HostFigures | None = None
    nvme: NvmeFigures | None = None
    slurm: SlurmRequest | None = None


def read_inventory(
    mapping: Mapping[str, object], name: str, faults: list[Fault], machine: MachineFacts
) -> Cluster | None:
    """Return the cluster that `mapping` (the config's `hardware`) describes, called `name`; None
    where there is a fault.

    Appends every fault of `mapping` to `faults`. CPU processes named from the catalogue divide
    `machine`'s memory equally. A cluster of one node needs no `network`; its link stands in for it.
    """
    new_faults: list[Fault] = []
    if "kind" in mapping:
        cluster = _short_form(mapping, name, machine, new_faults)
    else:
        cluster = _long_form(mapping, name, machine, new_faults)
    faults += new_faults
    return None if new_faults else cluster


def _short_form(
    mapping: Mapping[str, object], name: str, machine: MachineFacts, faults: list[Fault]
) -> Cluster | None:
    kind = mapping["kind"]
    if kind not in ("cpu", "local"):
        remedy = nearest(str(kind), ["cpu", "local"])
        faults.append(Fault("hardware.kind", str(kind), "is no kind of inventory", remedy))
        return None
    _check_keys(mapping, "hardware", f"kind={kind}", (), ("kind", "devices"), faults)
    wanted = mapping.get("devices", "auto")
    gpus = machine.gpus if kind == "local" else ()
    available = len(gpus) or machine.cores
    count = available if wanted == "auto" else _count(wanted, "hardware.devices", faults)
    if count is None:
        return None
    if kind == "local" and count > available:
        unit = "GPUs" if gpus else "cores"
        remedy = f"use 1 to {available}, or hardware=cpu hardware.devices={count}"
        rule = f"is more than the {available} {unit} of this machine"
        faults.append(Fault("hardware.devices", str(count), rule, remedy))
        return None
    if gpus:
        # An unknown link counts as the slowest in the catalogue that joins GPUs.
        link = machine.gpu_link or LINKS["pcie3_x16"]
        return Cluster(name, (Node(gpus[:count], link),), link)
    entry = _NodeEntry(1, (DEVICES[CPU_PROCESS],) * count, LINKS["shared_memory"])
    return _cluster(name, [entry], entry.link, machine)


def _long_form(
    mapping: Mapping[str, object], name: str, machine: MachineFacts, faults: list[Fault]
) -> Cluster | None:
    _check_keys(mapping, "hardware", "the inventory", ("nodes",), ("network", "kind"), faults)
    nodes = mapping.get("nodes", [])
    if isinstance(nodes, str) or not isinstance(nodes, Sequence):
        remedy = f"write nodes: {_EXAMPLES['nodes']}"
        faults.append(Fault("hardware.nodes", _text(nodes), "is not a list", remedy))
        return None
    if not nodes and "nodes" in mapping:
        remedy = f"name at least one node, for instance {_EXAMPLES['nodes']}"
        faults.append(Fault("hardware.nodes", "[]", "has no devices", remedy))
    entries = [
        _node_entry(node, f"hardware.nodes[{index}]", faults) for index, node in enumerate(nodes)
    ]
    network = None
    if "network" in mapping:
        network = _link(mapping["network"], "hardware.network", faults)
    elif sum(entry.count if entry else 1 for entry in entries) > 1:
        faults.append(_missing("hardware", "network"))
    complete = [entry for entry in entries if entry]
    if faults or not complete:
        return None
    total = sum(entry.count * len(entry.devices) for entry in complete)
    if total > MOST_DEVICES:
        faults.append(_too_many("hardware.nodes", total))
        return None
    return _cluster(name, complete, network or complete[0].link, machine)


def _node_entry(value: object, key: str, faults: list[Fault]) -> _NodeEntry | None:
    required, optional = ("devices", "device", "link"), ("count", "host", "nvme", "slurm")
    fields = {"count": 1, **_mapping(value, key, "a node", required, optional, faults)}
    count = _field(fields, key, "count", _count, faults)
    devices = _field(fields, key, "devices", _count, faults)
    kinds = _field(fields, key, "device", _devices, faults)
    link = _field(fields, key, "link", _link, faults)
    host = _field(fields, key, "host", _host, faults)
    nvme = _field(fields, key, "nvme", _nvme, faults)
    slurm = _field(fields, key, "slurm", _slurm, faults)
    if kinds and devices and len(kinds) not in (1, devices):
        rule = f"names {len(kinds)} devices, and devices is {devices}"
        faults.append(Fault(f"{key}.device", "", rule, "name one for all of them, or each"))
        return None
    if kinds and DEVICES[CPU_PROCESS] in kinds and "host" in fields:
        rule = "is of CPU processes, whose memory is the machine's"
        faults.append(Fault(f"{key}.host", _text(fields["host"]), rule, "leave it out"))
    if count is None or devices is None or kinds is None or link is None:
        return None
    return _NodeEntry(count, kinds * (devices // len(kinds)), link, host, nvme, slurm)


def _cluster(
    name: str, entries: Iterable[_NodeEntry], network: Link, machine: MachineFacts
) -> Cluster:
    """Return the cluster of `entries`, in order. The machine's memory is divided among the CPU
    processes named from the catalogue."""
    entries = list(entries)
    nominal = DEVICES[CPU_PROCESS]
    processes = sum(entry.count * entry.devices.count(nominal) for entry in entries)
    nodes: list[Node] = []
    for entry in entries:
        share = None
        if entry.host is not None:
            memory_bytes_s = entry.host.memory_bandwidth_bytes_s / len(entry.devices)
            share = HostShare(memory_bytes_s, entry.host.link.bandwidth_bytes_s)
        devices = []
        for device in entry.devices:
            own = device
            if own == nominal:
                own = replace(own, memory_bytes=machine.memory_bytes / processes)
            devices.append(own if share is None else replace(own, host=share))
        node = Node(tuple(devices), entry.link, entry.host, nvme=entry.nvme, slurm=entry.slurm)
        nodes += [node] * entry.count
    return Cluster(name, tuple(nodes), network)


def _devices(value: object, key: str, faults: list[Fault]) -> tuple[Device, ...] | None:
    """Return the devices that a node's `device` names: one that stands for all, or one for each
    entry of a list. None where one of them has a fault."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        device = _device(value, key, faults)
        return None if device is None else (device,)
    if not value:
        faults.append(Fault(key, "[]", "names no device", f"write {_EXAMPLES['device']}"))
        return None
    devices = [_device(entry, f"{key}[{number}]", faults) for number, entry in enumerate(value)]
    known = tuple(device for device in devices if device is not None)
    return known if len(known) == len(devices) else None


def _device(value: object, key: str, faults: list[Fault]) -> Device | None:
    return _named_or_inline(value, key, "device", DEVICES, _inline_device, faults)


def _link(value: object, key: str, faults: list[Fault]) -> Link | None:
    return _named_or_inline(value, key, "link", LINKS, _inline_link, faults)


def _host(value: object, key: str, faults: list[Fault]) -> HostFigures | None:
    return _named_or_inline(value, key, "host", HOSTS, _inline_host, faults)


def _named_or_inline(
    value: object,
    key: str,
    noun: str,
    catalogue: Mapping[str, _Entry],
    inline: Callable[[object, str, list[Fault]], _Entry | None],
    faults: list[Fault],
) -> _Entry | None:
    if isinstance(value, Mapping):
        return inline(value, key, faults)
    name = _text(value)
    if name not in catalogue:
        rule = f"is no {noun} of the catalogue"
        remedy = f"{nearest(name, catalogue)}; or give its figures as a mapping"
        faults.append(Fault(key, name, rule, remedy))
    return catalogue.get(name)


def _inline_device(value: object, key: str, faults: list[Fault]) -> Device | None:
    required = ("name", "flops", "memory_bytes", "memory_bandwidth_bytes_s")
    fields = _mapping(value, key, "a device", required, ("reserved_bytes",), faults)
    name = _field(fields, key, "name", _name, faults)
    reserved = _field({"reserved_bytes": 0, **fields}, key, "reserved_bytes", _not_negative, faults)
    flops = _field(fields, key, "flops", _flops, faults)
    memory = _field(fields, key, "memory_bytes", _positive, faults)
    bandwidth = _field(fields, key, "memory_bandwidth_bytes_s", _positive, faults)
    if reserved is not None and memory is not None and reserved >= memory:
        rule, remedy = "leaves no memory", f"use less than memory_bytes, {memory:g}"
        faults.append(Fault(f"{key}.reserved_bytes", _text(fields["reserved_bytes"]), rule, remedy))
    if name is None or flops is None or memory is None or bandwidth is None or reserved is None:
        return None
    return Device(name, flops, memory, bandwidth, reserved_bytes=reserved)


def _inline_host(value: object, key: str, faults: list[Fault]) -> HostFigures | None:
    required = ("memory_bytes", "memory_bandwidth_bytes_s", "link")
    fields = _mapping(value, key, "a host", required, ("name",), faults)
    memory = _field(fields, key, "memory_bytes", _positive, faults)
    bandwidth = _field(fields, key, "memory_bandwidth_bytes_s", _positive, faults)
    link = _field(fields, key, "link", _link, faults)
    name = _field(fields, key, "name", _name, faults)
    if memory is None or bandwidth is None or link is None:
        return None
    return HostFigures(name or "host", memory, bandwidth, link)


def _nvme(value: object, key: str, faults: list[Fault]) -> NvmeFigures | None:
    required = ("bytes", "read_bytes_s", "write_bytes_s")
    fields = _mapping(value, key, "a host's disks", required, (), faults)
    figures = [_field(fields, key, name, _positive, faults) for name in required]
    if None in figures:
        return None
    return NvmeFigures(*(figure for figure in figures if figure is not None))


def _slurm(value: object, key: str, faults: list[Fault]) -> SlurmRequest | None:
    names = tuple(option.name for option in dataclass_fields(SlurmRequest))
    given = _mapping(value, key, "a node's request to Slurm", (), names, faults)
    cores = _field(given, key, "cpus_per_task", _count, faults)
    words = {n: _field(given, key, n, _word, faults) for n in names if n != "cpus_per_task"}
    return SlurmRequest(**words, cpus_per_task=cores)


def _word(value: object, key: str, faults: list[Fault]) -> str | None:
    """Return an option's value as sbatch has it: text, or a number."""
    is_word = isinstance(value, str | int) and not isinstance(value, bool)
    if is_word and str(value).strip() and "\n" not in str(value):
        return str(value)
    rule, remedy = "is no value of an option of sbatch", "use text, or leave it out"
    faults.append(Fault(key, _text(value), rule, remedy))
    return None


def _flops(value: object, key: str, faults: list[Fault]) -> dict[str, float] | None:
    fields = _mapping(value, key, "flops", (), PRECISIONS, faults)
    if value == {}:
        faults.append(Fault(key, "{}", "has no precision", f"write flops: {_EXAMPLES['flops']}"))
    figures = {p: _field(fields, key, p, _positive, faults) for p in PRECISIONS}
    if figures["fp8"] is not None and figures["bf16"] is None:
        rule = "has no bf16 beside it, in which all but some products run"
        faults.append(Fault(f"{key}.fp8", str(fields["fp8"]), rule, "add bf16, or leave fp8 out"))
    return {p: figure for p, figure in figures.items() if figure is not None} or None


def _inline_link(value: object, key: str, faults: list[Fault]) -> Link | None:
    required = ("bandwidth_bytes_s", "latency_s")
    fields = _mapping(value, key, "a link", required, ("name",), faults)
    bandwidth = _field(fields, key, "bandwidth_bytes_s", _positive, faults)
    latency = _field(fields, key, "latency_s", _not_negative, faults)
    name = _field(fields, key, "name", _name, faults)
    if bandwidth is None or latency is None:
        return None
    return Link(name or f"{bandwidth / 1e9:g} GB/s", bandwidth, latency)


def _field(
    fields: Mapping[str, object],
    key: str,
    name: str,
    read: Callable[[object, str, list[Fault]], _Value | None],
    faults: list[Fault],
) -> _Value | None:
    """Return the field `name`, converted by `read`; None where it is missing or wrong."""
    return read(fields[name], f"{key}.{name}", faults) if name in fields else None


def _mapping(
    value: object,
    key: str,
    noun: str,
    required: Sequence[str],
    optional: Sequence[str],
    faults: list[Fault],
) -> Mapping[str, object]:
    """Return `value` with its keys checked. Return an empty mapping, after adding a fault, if it is
    no mapping."""
    if not isinstance(value, Mapping):
        keys = ", ".join((*required, *optional))
        remedy = f"write a mapping with the keys {keys}"
        faults.append(Fault(key, _text(value), "is not a mapping", remedy))
        return {}
    _check_keys(value, key, noun, required, optional, faults)
    return value


def _check_keys(
    mapping: Mapping[str, object],
    key: str,
    noun: str,
    required: Sequence[str],
    optional: Sequence[str],
    faults: list[Fault],
) -> None:
    known = (*required, *optional)
    for name, value in mapping.items():
        if name not in known:
            remedy = nearest(str(name), known)
            faults.append(Fault(f"{key}.{name}", _text(value), f"is no key of {noun}", remedy))
    faults += [_missing(key, name) for name in required if name not in mapping]


def _missing(key: str, name: str) -> Fault:
    return Fault(
        f"{key}.{name}", "", "is missing", f"add it, for instance {name}: {_EXAMPLES[name]}"
    )


def _name(value: object, key: str, faults: list[Fault]) -> str | None:
    if isinstance(value, str) and value:
        return value
    faults.append(Fault(key, _text(value), "is not a name", f"use text, as {_EXAMPLES['name']}"))
    return None


def _count(value: object, key: str, faults: list[Fault]) -> int | None:
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer and not (isinstance(value, str) and _INTEGER.fullmatch(value)):
        faults.append(Fault(key, _text(value), "is not a whole number", "use 1 or more"))
        return None
    number = int(str(value))
    if number < 1:
        faults.append(Fault(key, _text(value), "is not positive", "use 1 or more"))
        return None
    if number > MOST_DEVICES:
        faults.append(_too_many(key, number))
        return None
    return number


def _too_many(key: str, number: int) -> Fault:
    rule = f"is more than the {MOST_DEVICES:,} devices that are planned for"
    return Fault(key, str(number), rule, f"use at most {MOST_DEVICES}")


def _positive(value: object, key: str, faults: list[Fault]) -> float | None:
    number = _number(value, key, faults)
    if number is None or number >= _SMALLEST:
        return number
    rule = "is not positive" if number <= 0 else f"is below {_SMALLEST:g}"
    remedy = "use a number above 0" if number <= 0 else f"use {_SMALLEST:g} or more"
    faults.append(Fault(key, _text(value), rule, remedy))
    return None


def _not_negative(value: object, key: str, faults: list[Fault]) -> float | None:
    number = _number(value, key, faults)
    if number is None or number >= 0:
        return number
    faults.append(Fault(key, _text(value), "is below 0", "use 0 or more"))
    return None


def _number(value: object, key: str, faults: list[Fault]) -> float | None:
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if numeric or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        number = float(str(value))
        if math.isfinite(number) and number <= _LARGEST:
            return number
        if math.isfinite(number) and number > 0:
            rule, remedy = f"is above {_LARGEST:g}", f"use {_LARGEST:g} or less"
            faults.append(Fault(key, shortened(_text(value)), rule, remedy))
            return None
    shown = shortened(_text(value))
    faults.append(Fault(key, shown, "is not a number", "write it as 32e9 or 15.7e12"))
    return None


def _text(value: object) -> str:
    """Return a value approximately as the user wrote it."""
    return "null" if value is None else str(value)
