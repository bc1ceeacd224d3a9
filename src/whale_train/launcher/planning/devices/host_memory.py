"""Check that hosts have the memory that a plan's ranks need, before any rank starts."""

from collections.abc import Sequence

from whale_train.errors import Fault
from whale_train.machine.hosts import Host
from whale_train.quantities import in_bytes
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.memory.malloc_headroom import needed_bytes
from whale_train.strategies.plan.plan import Plan


def refuse_small_hosts(
    plan: Plan,
    profile: ModelProfile,
    hosts: Sequence[Host],
    is_whole: bool,
    on_cpu: bool,
    faults: list[Fault],
) -> None:
    """Add a fault for each host with too little memory for its ranks.

    is_whole: whether initial weights are built whole before they are sharded: once on a host whose
        ranks this launcher starts, and by every rank where another launcher started the ranks.
    on_cpu: whether ranks compute in the host's memory, which then has to hold all memory of ranks.
    """
    size = weight_bytes(profile) if is_whole else 0
    for host in hosts:
        builders, memory = len(host.ranks) or 1, in_bytes(host.memory_bytes)
        if builders * size > host.memory_bytes:
            by = f" by each of its {builders} ranks" if builders > 1 else ""
            rule = f"has {in_bytes(size)} of weights, built whole on {host.name}{by} before they "
            rule += f"are cut, and there are {memory}"
            remedy = "use model.init=sharded, which builds them tensor by tensor"
            faults.append(Fault("model", profile.name, rule, remedy))
            continue
        needed = needed_bytes(plan, host.ranks or range(plan.world_size))
        if on_cpu and needed > host.memory_bytes:
            rule = f"needs {in_bytes(needed)} of {host.name}, whose memory its processes share: "
            rule += f"there are {memory}"
            remedy = "use fewer devices, or a strategy that partitions more"
            faults.append(Fault("hardware", plan.cluster, rule, remedy))


def weight_bytes(profile: ModelProfile) -> int:
    """Return the size of a model's initial parameters and buffers, in bytes. Weights that ranks
    store in 4 bits begin in fp32."""
    weights = (*profile.parameters, *profile.frozen)
    stored = sum(parameter.elements * parameter.bytes_per_element for parameter in weights)
    in_fp32 = sum(x.elements * (4 - x.bytes_per_element) for x in profile.quantised)
    return round(stored + in_fp32) + profile.buffer_bytes
