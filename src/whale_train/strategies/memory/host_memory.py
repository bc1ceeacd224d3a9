"""State that is offloaded to hosts, and the check that it fits their memory."""

from collections.abc import Callable, Collection, Iterator, Sequence
from math import inf

from whale_train.errors import Fault, PlanError
from whale_train.quantities import in_bytes
from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.memory.engine_memory import precision_bytes
from whale_train.strategies.plan.plan import Decision
from whale_train.strategies.plan.training import Training


def kept_on_hosts(
    path: str | None, of_ranks: Callable[[], Sequence[float]], cluster: Cluster
) -> Sequence[float]:
    """Return the bytes that each host of `cluster` holds for its ranks; () where nothing is
    offloaded, and on CPUs, where host memory is the rank's own memory.

    path: path of the key that says what is offloaded; None: nothing is.
    of_ranks: returns the offloaded bytes of every rank.

    Raises PlanError where a host would hold
    more than its memory.
    """
    if path is None or cluster.on_cpu:
        return ()
    host_loads = [0.0] * len(cluster.nodes)
    for number, num_bytes in zip(cluster.node_of, of_ranks(), strict=True):
        host_loads[number] += num_bytes
    short = [
        num_bytes - (inf if host_node.host is None else host_node.host.memory_bytes)
        for num_bytes, host_node in zip(host_loads, cluster.nodes, strict=True)
    ]
    worst = max(range(len(short)), key=short.__getitem__)
    if short[worst] > 0:
        rule = f"keeps {in_bytes(host_loads[worst])} on host {worst} of hardware={cluster.name}, "
        rule += f"{in_bytes(short[worst])} more than its memory"
        remedy = "use more hosts, or an optimizer with less state"
        raise PlanError([Fault(path, "", rule, remedy)])
    return host_loads


def offload_decisions(
    path: str | None, contents: Sequence[str], bytes_by_host: Sequence[float], cluster: Cluster
) -> Iterator[Decision]:
    """Yield the note of the bytes that hosts hold, `bytes_by_host` as `kept_on_hosts` has them.
    `contents` says of what."""
    if path is None or not bytes_by_host:
        return
    reason = f"{' and '.join(contents)} on the hosts: {in_bytes(sum(bytes_by_host))} in all"
    if len(bytes_by_host) > 1:
        most = "at most " if max(bytes_by_host) > min(bytes_by_host) else ""
        reason += f", {most}{in_bytes(max(bytes_by_host))} on each of {len(bytes_by_host)}"
    if any(host_node.host is None for host_node in cluster.nodes):
        reason += f", of whose memory hardware={cluster.name} says nothing"
    yield Decision(path, "cpu", "", reason)


def offloaded(node: Replicate) -> Sequence[str]:
    """Return the names of the state that `node` keeps in the hosts' memory: `optimizer`,
    `parameters`, both or none."""
    return [w for w in ("optimizer", "parameters") if getattr(node, f"offload_{w}") == "cpu"]


def host_bytes(zero: int, there: Collection[str], training: Training) -> float:
    """Return the bytes on the host for one element of a parameter. `there` holds the names of the
    offloaded state, as returned by `offloaded`.

    An offloaded optimizer has an fp32 value, its states and, from ZeRO 2 on, the gradient, which
    ZeRO 3 has twice: as it is accumulated, and for the update (DeepSpeed 0.19.8).
    Offloaded parameters have the weight. Without ZeRO (`zero` 0), offloaded parameters are
    streamed: the gradient is on the host as well and, unless training is in fp32, a 16-bit value
    beside the fp32 one.
    """
    num_bytes, streamed = 0.0, not zero and "parameters" in there
    if "optimizer" in there:
        num_bytes += 4 * (1 + training.optimizer_states) + (4 if zero >= 2 or streamed else 0)
        num_bytes += 4 if zero == 3 else 0
    if streamed:
        return num_bytes + (0.0 if training.precision == "fp32" else 2.0)
    if "parameters" in there:
        num_bytes += precision_bytes(training.precision, zero, apart=True).weights
    return num_bytes
