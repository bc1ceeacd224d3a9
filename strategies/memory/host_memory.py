"""What is kept on hosts instead of devices, and whether these have the memory for it."""

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
    node: Replicate | None, of_ranks: Callable[[], Sequence[float]], cluster: Cluster
) -> Sequence[float]:
    """Return the bytes that every host of `cluster` keeps of its ranks, if `node` offloads anything
    of theirs: so many `of_ranks`. A CPU process's memory is the host's, and counted as its own.
    Raises PlanError where it is more than some host has."""
    if node is None or cluster.on_cpu or not offloaded(node):
        return ()
    kept = [0.0] * len(cluster.nodes)
    for number, num_bytes in zip(cluster.node_of, of_ranks(), strict=True):
        kept[number] += num_bytes
    short = [
        num_bytes - (inf if there.host is None else there.host.memory_bytes)
        for num_bytes, there in zip(kept, cluster.nodes, strict=True)
    ]
    worst = max(range(len(short)), key=short.__getitem__)
    if short[worst] > 0:
        rule = f"keeps {in_bytes(kept[worst])} on host {worst} of hardware={cluster.name}, "
        rule += f"{in_bytes(short[worst])} more than its memory"
        remedy = "use more hosts, or an optimizer with less state"
        raise PlanError([Fault(f"{node.path}.offload", "", rule, remedy)])
    return kept


def offload_decisions(
    node: Replicate | None, kept: Sequence[float], cluster: Cluster
) -> Iterator[Decision]:
    """Yield how much the hosts keep, as `kept_on_hosts` has it."""
    if node is None or not kept:
        return
    reason = f"{' and '.join(offloaded(node))} on the hosts: {in_bytes(sum(kept))} in all"
    if len(kept) > 1:
        most = "at most " if max(kept) > min(kept) else ""
        reason += f", {most}{in_bytes(max(kept))} on each of {len(kept)}"
    if any(there.host is None for there in cluster.nodes):
        reason += f", of whose memory hardware={cluster.name} says nothing"
    yield Decision(f"{node.path}.offload", "cpu", "", reason)


def offloaded(node: Replicate) -> Sequence[str]:
    """Return what of parameters and optimizer is on the hosts."""
    return [w for w in ("optimizer", "parameters") if getattr(node, f"offload_{w}") == "cpu"]


def host_bytes(zero: int, there: Collection[str], training: Training) -> float:
    """Return the bytes on the host of a parameter whose copies are partitioned, if its `optimizer`
    is `there`: fp32 values for that, its states and, from ZeRO 2 on, the gradient; and if its
    `parameters` are, the weight. Without ZeRO it is streamed, and has the gradient there, and
    beside its fp32 values those of 16 bits, if it is read so."""
    found, streamed = 0.0, not zero and "parameters" in there
    if "optimizer" in there:
        found += 4 * (1 + training.optimizer_states) + (4 if zero >= 2 or streamed else 0)
    if streamed:
        return found + (0.0 if training.precision == "fp32" else 2.0)
    if "parameters" in there:
        found += precision_bytes(training.precision, zero, apart=True).weights
    return found
