"""What is kept on hosts instead of devices, of whose memory an inventory says nothing."""

from collections.abc import Iterable, Iterator

from whale_train.strategies.cluster import Cluster
from whale_train.strategies.grammar import Replicate
from whale_train.strategies.memory import precision_bytes
from whale_train.strategies.operations import ModelProfile
from whale_train.strategies.plan import Decision
from whale_train.strategies.sharing import Training


def offload_decisions(
    node: Replicate | None,
    paths: Iterable[str],
    profile: ModelProfile,
    cluster: Cluster,
    training: Training,
) -> Iterator[Decision]:
    """How much the hosts keep of the parameters at `paths`, if `node` says so; a CPU process's
    memory is the host's, and counted as its own."""
    if node is None or cluster.on_cpu:
        return
    whats = [w for w in ("optimizer", "parameters") if getattr(node, f"offload_{w}") == "cpu"]
    elements = sum(profile.parameter_by_path[path].elements for path in paths)
    total = elements * host_bytes(node, training)
    hosts = len(cluster.nodes)
    if whats:
        each = f", {_bytes(total / hosts)} on each of {hosts}" if hosts > 1 else ""
        reason = f"{' and '.join(whats)} on the hosts: {_bytes(total)} in all{each}, of whose "
        reason += f"memory hardware={cluster.name} says nothing"
        yield Decision(f"{node.path}.offload", "cpu", "", reason)


def host_bytes(node: Replicate, training: Training) -> float:
    """Of a parameter whose copies are partitioned: fp32 values for the optimizer, its states and,
    from ZeRO 2 on, the gradient; and the weight."""
    found = 0.0
    if node.offload_optimizer == "cpu":
        found += 4 * (1 + training.optimizer_states) + (4 if node.zero >= 2 else 0)
    if node.offload_parameters == "cpu":
        found += precision_bytes(training.precision, node.zero, apart=True).weights
    return found


def _bytes(num_bytes: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 1e3:.1f} kB"
