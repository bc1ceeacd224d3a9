"""Change a strategy, the training or the devices in one way each, to see what makes a plan of it.

A change of a strategy is made in the content of its file, so that the user can make it too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from whale_train.strategies.grammar.nodes import BALANCE, SCHEDULES
from whale_train.strategies.hardware.cluster import Cluster, Device, Node
from whale_train.strategies.plan.training import Training

Graph = Any  # a node, or a list of nodes, as a strategy file without faults has it
Kind = Literal["strategy", "training", "hardware"]
_BATCHES = (2, 4, 8)  # times the global batch
_PARTS = (1, 2, 4, 8)  # micro-batches of train.accumulate


@dataclass(frozen=True)
class Setting:
    """What a plan is made of, beside the model.

    written: the content of a strategy file.
    cluster: all devices there are.
    training: batch, precision and optimizer.
    """

    written: Mapping[str, Any]
    cluster: Cluster
    training: Training


@dataclass(frozen=True)
class Relief:
    """One change of a setting.

    kind: what it changes.
    change: the change in words.
    setting: the setting with the change.
    overrides: what makes the change on the command line, beside the strategy's own content; empty
        where no option does.
    """

    kind: Kind
    change: str
    setting: Setting
    overrides: tuple[str, ...] = ()


def reliefs(setting: Setting) -> Iterator[Relief]:
    """Yield every change that may make a plan of a setting without one, or a faster plan."""
    yield from strategy_reliefs(setting)
    yield from training_reliefs(setting)
    yield from _more_nodes(setting)


def strategy_reliefs(setting: Setting) -> Iterator[Relief]:
    """Yield the changes of the strategy itself, each of one node or of one key of the file."""
    content = setting.written
    seen = [dict(content)]
    for change, graph in _graphs(content["graph"]):
        changed = {**content, "graph": graph}
        if changed not in seen:
            seen.append(changed)
            yield Relief("strategy", change, replace(setting, written=changed))
    for balance in BALANCE:
        if balance != content.get("balance", "hardware"):
            changed = {**content, "balance": balance}
            yield Relief("strategy", f"balance: {balance}", replace(setting, written=changed))
    kinds = setting.cluster.kinds
    if len(kinds) > 1:
        for kind, count in kinds.items():
            changed = {**content, "devices": {kind: count}}
            change = f"devices: {{{kind}: {count}}}"
            yield Relief("strategy", change, replace(setting, written=changed))


def training_reliefs(setting: Setting) -> Iterator[Relief]:
    """Yield the changes of the training: micro-batches, precision, a larger global batch."""
    training = setting.training
    for parts in _PARTS:
        if parts == 1 < training.accumulate or parts > training.accumulate:
            key = f"train.accumulate={parts}"
            changed = replace(training, accumulate=parts)
            yield Relief("training", key, replace(setting, training=changed), (key,))
    computed = (set(device.flops) for device in setting.cluster.devices)
    for precision in sorted(set.intersection(*computed) - {training.precision}):
        key = f"train.precision={precision}"
        reduce_dtype = training.reduce_dtype
        if reduce_dtype != "fp32":
            reduce_dtype = precision
        changed = replace(training, precision=precision, reduce_dtype=reduce_dtype)
        yield Relief("training", key, replace(setting, training=changed), (key,))
    for times in _BATCHES:
        batch = training.global_batch * times
        key = f"train.global_batch={batch}"
        changed = replace(training, global_batch=batch)
        yield Relief("training", key, replace(setting, training=changed), (key,))


def _more_nodes(setting: Setting) -> Iterator[Relief]:
    for times in (2, 4):
        cluster = replace(setting.cluster, nodes=setting.cluster.nodes * times, fewer={})
        change = f"{times} times the nodes ({len(cluster.devices):,} devices)"
        yield Relief("hardware", change, replace(setting, cluster=cluster))


def with_memory(setting: Setting, times: float) -> Setting:
    """Return a setting whose devices have `times` the memory."""

    def of(device: Device) -> Device:
        return replace(device, memory_bytes=device.memory_bytes * times)

    return replace(setting, cluster=_with_devices(setting.cluster, of))


def with_network(setting: Setting, times: float) -> Setting:
    """Return a setting whose network between nodes has `times` the bandwidth."""
    network = setting.cluster.network
    faster = replace(network, bandwidth_bytes_s=network.bandwidth_bytes_s * times)
    return replace(setting, cluster=replace(setting.cluster, network=faster))


def with_batch(setting: Setting, times: float) -> Setting:
    """Return a setting with `times` the samples of a step."""
    batch = round(setting.training.global_batch * times)
    return replace(setting, training=replace(setting.training, global_batch=batch))


def _with_devices(cluster: Cluster, changed: Callable[[Device], Device]) -> Cluster:
    """Return a cluster with every device changed. Equal devices stay one object."""
    known = {id(device): changed(device) for device in cluster.devices}

    def of(node: Node) -> Node:
        return replace(node, devices=tuple(known[id(device)] for device in node.devices))

    return replace(cluster, nodes=tuple(map(of, cluster.nodes)), fewer={})


def _graphs(graph: Graph, *, beside: bool = False) -> Iterator[tuple[str, Graph]]:
    """Yield graphs that differ from `graph` in one node, each with the change in words. `beside` is
    True for a node in a list of nodes that share devices."""
    if isinstance(graph, list) and len(graph) > 1 and all(x == graph[0] for x in graph):
        for change, changed in _graphs(graph[0]):  # of equal stages, all are changed alike
            yield change, [changed] * len(graph)
        return
    if isinstance(graph, list):
        shared = any(_node(node)[0] == "replicate" for node in graph)
        for place, node in enumerate(graph):
            for change, changed in _graphs(node, beside=shared):
                yield change, [*graph[:place], changed, *graph[place + 1 :]]
        return
    primitive, body = _node(graph)
    changes = {
        "replicate": _of_copies,
        "split": _of_splits,
        "pipeline": _of_pipelines,
        "stage": _of_stages,
    }
    for change, changed in changes[primitive](body):
        yield f"{primitive}: {change}", {primitive: changed}
    if primitive == "replicate" or (primitive == "split" and not beside):
        for change, changed in _recomputing_more(body):
            yield f"{primitive}: {change}", {primitive: changed}
    inside = "stages" if primitive == "pipeline" else "of"
    if isinstance(body.get(inside), list | dict | str):
        for change, changed in _graphs(body[inside]):
            yield change, {primitive: {**body, inside: changed}}


def _node(given: Mapping[str, Any] | str) -> tuple[str, dict[str, Any]]:
    """Return the primitive of a node and the content of its body. A file may write `replicate` for
    `replicate: {}`."""
    if isinstance(given, str):
        return given, {}
    ((primitive, body),) = given.items()
    return primitive, dict(body or {})


def _of_copies(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes of a `replicate`: its number of copies, ZeRO, what is kept on the host."""
    if "degree" in body:
        yield "no degree", {key: value for key, value in body.items() if key != "degree"}
    zero = body.get("zero", 0)
    offload = body.get("offload") or {}
    without = {key: value for key, value in body.items() if key != "offload"}
    if offload:
        yield "nothing on the host", without
    for stage in range(4):
        if stage > zero or (stage < zero and not offload):
            yield f"zero: {stage}", {**body, "zero": stage}
        elif stage < zero:
            yield f"zero: {stage}, nothing on the host", {**without, "zero": stage}
    for on_host in ({"optimizer": "cpu"}, {"optimizer": "cpu", "parameters": "cpu"}):
        if on_host != offload:
            stage = max(zero, 3 if "parameters" in on_host else 2)
            state = " and ".join(on_host)
            said = f"zero: {stage}, {state} on the host"
            yield said, {**body, "zero": stage, "offload": on_host}


def _of_splits(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes of a `split`: its number of devices, the patterns given by hand."""
    for degree in (2, 4, 8):
        if degree != body.get("degree"):
            yield f"degree: {degree}", {**body, "degree": degree}
    if "degree" in body:
        yield "no degree", {key: value for key, value in body.items() if key != "degree"}
    if "patterns" in body:
        yield "no patterns", {key: value for key, value in body.items() if key != "patterns"}


def _of_pipelines(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes of a `pipeline`: micro-batches, schedule, number of stages, recomputing."""
    count = body.get("micro_batches")
    if isinstance(count, int):
        yield "no micro_batches", {k: v for k, v in body.items() if k != "micro_batches"}
        for number in (count // 2, count * 2, count * 4):
            if number:
                yield f"micro_batches: {number}", {**body, "micro_batches": number}
    for schedule in SCHEDULES:
        if schedule != body.get("schedule", "1f1b"):
            yield f"schedule: {schedule}", {**body, "schedule": schedule}
    stages = body.get("stages")
    if isinstance(stages, list) and all(stage == stages[0] for stage in stages):
        for times in (2, 4, 8):
            yield f"{len(stages) * times} stages", {**body, "stages": stages * times}
    if isinstance(stages, int):
        for number in (stages // 2, stages * 2):
            if number > 1:
                yield f"stages: {number}", {**body, "stages": number}
        stages = [{"stage": {}}] * stages
    if isinstance(stages, list):
        recomputing = [_recomputing(node) for node in stages]
        yield "recompute: full in every stage", {**body, "stages": recomputing}


def _recomputing_more(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the node with all blocks recomputed, and without recomputation."""
    if body.get("recompute") != "full":
        yield "recompute: full", {**body, "recompute": "full"}
    if body.get("recompute", "none") != "none":
        yield "recompute: none", {**body, "recompute": "none"}


def _recomputing(node: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return a stage of a pipeline that recomputes its forward in the backward."""
    primitive, body = _node(node)
    if primitive == "stage":
        return {"stage": {**body, "recompute": "full"}}
    return {"stage": {"recompute": "full", "of": {primitive: body}}}


def _of_stages(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes of a `stage`: the device and the modules it was given."""
    for key in ("device", "modules"):
        if key in body:
            yield f"no {key}", {name: value for name, value in body.items() if name != key}
