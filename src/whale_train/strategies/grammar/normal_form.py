"""Reduce a strategy to its normal form (`form.py`), and refuse strategies that cannot be
executed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from whale_train.errors import Fault
from whale_train.strategies.grammar.degrees import (
    OpenStage,
    settled,
    settled_by_kind,
    too_many_stages,
)
from whale_train.strategies.grammar.form import Form
from whale_train.strategies.grammar.nodes import (
    Node,
    Pipeline,
    Replicate,
    Split,
    Stage,
    Strategy,
)


def read_form(
    strategy: Strategy,
    devices: int | Mapping[str, int],
    per_node: int,
    hardware: str,
    faults: list[Fault],
) -> Form | None:
    """Return the form of a strategy over `devices` devices, or None after adding to `faults`.

    devices: number of devices, or the number of each kind.
    per_node: devices of each node (0: nodes differ in size).
    hardware: name of the hardware, for messages.
    """
    before = len(faults)
    outer, inner = _outer(strategy.graph, faults)
    pipeline = inner[0] if inner and isinstance(inner[0], Pipeline) else None
    total = devices if isinstance(devices, int) else sum(devices.values())
    if pipeline and isinstance(pipeline.stages, int) and pipeline.stages > total:
        faults.append(too_many_stages(pipeline, total, hardware))
        return None
    open_stages: list[OpenStage | None]
    if not inner:
        open_stages = [OpenStage(outer[-1].path, 1, 1, None, None)]
    elif pipeline is None:
        open_stages = [_stage(inner, faults)]
    elif isinstance(pipeline.stages, int):
        one = OpenStage(f"{pipeline.path}.stages", None, 1, None, None)
        open_stages = [one for _ in range(pipeline.stages)]
    else:
        open_stages = [_stage((node,), faults) for node in pipeline.stages]
    around = next((x.recompute for x in reversed(outer) if x.recompute is not None), None)
    sends = next((x for x in reversed(outer) if x.offload_activations is not None), None)
    stages = [
        replace(stage, recompute=stage.recompute or around, sends=stage.sends or sends)
        for stage in open_stages
        if stage is not None
    ]
    copies = (node for s in stages for node in (s.copy, s.body) if node)
    keeper = _keeper([*outer, *copies], pipeline, faults)
    if len(faults) > before:
        return None
    kinds = {} if isinstance(devices, int) else devices
    if any(stage.device for stage in stages):
        form = settled_by_kind(outer, stages, kinds, per_node, hardware, faults)
    else:
        form = settled(outer, stages, total, per_node, hardware, faults)
    if form is None:
        return None
    if pipeline is None:  # copies of a single stage are replicas of the whole
        (stage,) = form.stages
        both = form.copies * stage.copies
        filled = _filled_node(outer, stages[0])
        form = replace(form, copies=both, stages=(replace(stage, copies=1),), filled=filled)
    form = replace(form, pipeline=pipeline, keeper=keeper)
    _refuse_without_effect(form, keeper, faults)
    return form if len(faults) == before else None


def _outer(
    nodes: tuple[Node, ...], faults: list[Fault]
) -> tuple[list[Replicate], tuple[Node, ...]]:
    """Return the replicates around everything, and the nodes inside them (none: the model)."""
    outer: list[Replicate] = []
    while len(nodes) == 1:
        (node,) = nodes
        if not isinstance(node, Replicate):
            break
        outer.append(node)
        _refuse_modules(node, faults)
        nodes = node.of
    return outer, nodes


def _filled_node(outer: Sequence[Replicate], stage: OpenStage) -> str | None:
    """Return the path of the node whose open degree takes the devices of a strategy with one stage,
    or None."""
    if stage.body is not None:
        return stage.body.path if stage.shards is None else None
    return next((node.path for node in outer if node.degree is None), None)


def _stage(nodes: tuple[Node, ...], faults: list[Fault]) -> OpenStage | None:
    """Return one stage, or None after adding to `faults`.

    A stage is (stage of) (replicate of) a split, or a replicate beside splits of modules. Each of
    these is optional.
    """
    path, around = nodes[0].path, Stage("")
    if isinstance(nodes[0], Stage):
        around, nodes = nodes[0], nodes[0].of
    copies: int | None = 1
    copy: Replicate | None = None
    recompute, sends = around.recompute, None
    while len(nodes) == 1:
        (inner,) = nodes
        if not isinstance(inner, Replicate):
            break
        _refuse_modules(inner, faults)
        both = copies is not None and inner.degree is not None
        copies = copies * inner.degree if both and copies and inner.degree else None
        copy, nodes = inner, inner.of
        recompute = copy.recompute or recompute
        sends = copy if copy.offload_activations is not None else sends
    split: Split | None = None
    body: Replicate | None = None
    more: tuple[Split, ...] = ()
    shards: int | None = 1
    sized: str | None = None
    match nodes:
        case ():
            pass
        case (Split(of=()) as split,):
            shards, sized = split.degree, split.path
            recompute = split.recompute or recompute
        case (Split(of=of) as inside,) if inside.shares_sequence or _shares_sequence(of):
            rule = "divides positions and weights over the same devices, which is not executed"
            remedy = "use one of the two, or each in a pipeline stage of its own"
            faults.append(Fault(f"{inside.path}.of", "", rule, remedy))
            return None
        case (Split() as inside,):
            rule = "cuts again what a split has cut"
            faults.append(Fault(f"{inside.path}.of", "", rule, "multiply the degrees into one"))
            return None
        case (Replicate() as body, Split() as split, *others) if _are_splits(others):
            more = tuple(node for node in others if isinstance(node, Split))
            recompute = body.recompute or recompute
            sends = body if body.offload_activations is not None else sends
            sized_by = next((node for node in (split, *more) if node.degree), split)
            if not all(_is_beside_copies(body, x, sized_by, path, faults) for x in (split, *more)):
                return None
            shards, sized = (
                (sized_by.degree, sized_by.path) if sized_by.degree else (body.degree, body.path)
            )
            if shards and body.degree and body.degree != shards:
                copies = copies and copies * (body.degree // shards)
        case _:
            faults.append(_colocated(nodes))
            return None
    return OpenStage(
        path, copies, shards, split, copy, around.modules, recompute, body, around.device, sized,
        more, sends,
    )  # fmt: skip


def _are_splits(nodes: Sequence[Node]) -> bool:
    """Return True if all nodes are splits."""
    return all(isinstance(node, Split) for node in nodes)


def _shares_sequence(nodes: Sequence[Node]) -> bool:
    """Return True if one of `nodes` is a split of positions."""
    return any(isinstance(node, Split) and node.shares_sequence for node in nodes)


def _is_beside_copies(
    body: Replicate, split: Split, sized_by: Replicate | Split, path: str, faults: list[Fault]
) -> bool:
    """Return True if a split beside `body` can be executed on the number of devices that `sized_by`
    gives. If it cannot, add a fault."""
    if body.of or split.of:
        rule = "is not a replicate of all beside splits of modules, over the same devices"
        remedy = "use [{replicate: {}}, {split: {modules: head}}]"
        faults.append(Fault(path.rpartition("[")[0], "", rule, remedy))
        return False
    key, value = f"{split.path}.degree", str(split.degree)
    if sized_by.degree and split.degree and sized_by.degree != split.degree:
        rule = (
            f"differs from {sized_by.path}.degree={sized_by.degree}, "
            "though splits of a list share their "
        )
        faults.append(Fault(key, value, f"{rule}devices", "give both the same, or auto"))
        return False
    if body.degree and split.degree and body.degree % split.degree:
        rule = f"does not divide {body.path}.degree={body.degree}, though nodes of a list share "
        divisors = " or ".join(str(number) for number in _divisors(body.degree))
        remedy = f"use {divisors}" if divisors else "give the copies more devices"
        faults.append(Fault(key, value, f"{rule}their devices", remedy))
        return False
    return True


def _divisors(number: int) -> list[int]:
    """Return the degrees that a split may have beside `number` replicas."""
    return [x for x in range(2, number + 1) if number % x == 0]


def _colocated(nodes: tuple[Node, ...]) -> Fault:
    """Return the fault of nodes that share devices in an unsupported way."""
    path = nodes[0].path.rpartition("[")[0]
    rule = "has parts that share devices, which are executed as a replicate, then splits of modules"
    remedy = "use strategy=hybrid_split_dp, or one node"
    return Fault(path, f"{len(nodes)} nodes", rule, remedy)


def _refuse_modules(node: Replicate, faults: list[Fault]) -> None:
    """Add a fault for a replicate that names modules, since nothing then covers the rest of the
    model."""
    if node.modules != ("*",):
        rule = "names a part of the model, and nothing in the strategy covers the rest"
        remedy = 'use "*", or a list with a node for the rest'
        faults.append(Fault(f"{node.path}.modules", ", ".join(node.modules), rule, remedy))


def _keeper(
    copies: list[Replicate], pipeline: Pipeline | None, faults: list[Fault]
) -> Replicate | None:
    """Return the replicate with the ZeRO and offload settings of all replicas; None without
    replicates.

    All replicates must have equal settings, since they share one set of engines: different ones are
    a fault. In a pipeline, a ZeRO stage above 1 is a fault.
    """
    ways = [(c.zero, c.offload_optimizer, c.offload_parameters) for c in copies]
    asked = [c for c, way in zip(copies, ways, strict=True) if way != (0, "none", "none")]
    first = asked[0] if asked else (copies[0] if copies else None)
    for other in asked[1:]:
        if ways[copies.index(other)] != ways[copies.index(asked[0])]:
            rule = f"differs from {asked[0].path}.zero={asked[0].zero}: all copies keep alike"
            remedy = "give both the same"
            faults.append(Fault(f"{other.path}.zero", str(other.zero), rule, remedy))
    if first is None:
        return None
    if first.zero > 1 and pipeline is not None:
        does = {2: "reduces gradients with all copies at every backward",
                3: "gathers parameters with all copies at every forward"}[first.zero]  # fmt: skip
        rule = f"{does}, and in a pipeline copies take different micro-batches at different times"
        remedy = "use 1 (a stage's optimizer state is what is largest), or no pipeline"
        faults.append(Fault(f"{first.path}.zero", str(first.zero), rule, remedy))
    return first


def _refuse_without_effect(form: Form, keeper: Replicate | None, faults: list[Fault]) -> None:
    """Add a fault for a split or a ZeRO stage without effect, and for a split head outside the last
    stage."""
    devices = form.copies * form.width
    for stage in form.stages[:-1]:
        if stage.body and any("head" in split.modules for split in stage.splits):
            rule = "splits the head in a stage that is not the last, where the loss is"
            faults.append(Fault(stage.path, "", rule, "move the list to the last stage"))
    for stage in form.stages:
        if stage.split and stage.shards == 1:
            remedy = "use strategy=single, or more devices"
            if devices > 1:
                remedy = "use a degree of at least 2, or no split"
            rule = "has nothing to divide over 1 device"
            faults.append(Fault(stage.split.path, "", rule, remedy))
    copied = (form.copies * s.copies * (s.shards if s.copies_weights else 1) for s in form.stages)
    if keeper and keeper.zero and max(copied) == 1 and not keeper.offloads:
        rule = "partitions over the copies, and 1 device has only one"
        remedy = "use strategy=single, or more devices"
        if devices > 1:
            rule = "partitions over the copies, and there is only one"
            remedy = "use 0, or more devices"
        faults.append(Fault(f"{keeper.path}.zero", str(keeper.zero), rule, remedy))
