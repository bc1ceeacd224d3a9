"""A flat strategy bound to a model: nodes of the grammar become TaskGraphs.

Flat is one replicate of the whole model, or a replicate beside a split of the head over the same
devices. Owns which part of the model each node holds and on how many devices. Which device does
how much is `resolve.py`'s; nested strategies are `forms.py`'s and `staged.py`'s.
"""

from dataclasses import dataclass

from whale_train.errors import Fault
from whale_train.strategies.cut import CutRefused, HeadCut, cut_head
from whale_train.strategies.grammar import Node, Replicate, Split, Strategy
from whale_train.strategies.head import Head, find_heads, matching
from whale_train.strategies.operations import ModelProfile


@dataclass(frozen=True)
class BoundTaskGraph:
    """A part of the model under one primitive; `node` is where the strategy says so."""

    name: str
    node: Replicate | Split
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    flops: float


@dataclass(frozen=True)
class StrategyGraph:
    """TaskGraphs in forward order, all on the same `degree` devices (colocated).

    `cut` says how the exported graph falls into them; None when the model runs as it is.
    """

    task_graphs: tuple[BoundTaskGraph, ...]
    degree: int
    head: Head | None = None
    cut: HeadCut | None = None


def bind(
    strategy: Strategy, profile: ModelProfile, devices: int, hardware: str, faults: list[Fault]
) -> StrategyGraph | None:
    """Bind to `profile` over `devices` devices; None when `faults` grew."""
    degree = shared_degree(strategy, devices, hardware, faults)
    if degree is None:
        return None
    match strategy.graph:
        case (Replicate() as node,):
            return _whole(node, profile, degree, faults)
        case (Replicate() as body, Split() as top):
            return _head_split(body, top, profile, degree, faults)
    raise AssertionError(strategy.graph)


def shared_degree(
    strategy: Strategy, devices: int, hardware: str, faults: list[Fault]
) -> int | None:
    """How many of `devices` devices the nodes share; None when `faults` grew. All that can be
    said against a strategy before there is a model."""
    before = len(faults)
    degree = _common_degree(strategy.graph, devices, hardware, faults)
    match strategy.graph:
        case (Replicate() as node,):
            if node.modules != ("*",):
                rule = "names a part of the model, and nothing in the strategy covers the rest"
                remedy = 'use "*", or a list with a node for the rest'
                faults.append(Fault(f"{node.path}.modules", _quoted(node.modules), rule, remedy))
        case (Replicate() as body, Split() as top):
            if body.modules != ("*",):
                rule = "must cover what the split leaves"
                faults.append(Fault(f"{body.path}.modules", _quoted(body.modules), rule, 'use "*"'))
            if degree == 1:
                rule, remedy = "has nothing to divide over 1 device", "use strategy=single, or more"
                faults.append(Fault(top.path, "", rule, f"{remedy} devices"))
        case _:
            raise AssertionError(strategy.graph)
    return degree if len(faults) == before else None


def legal_degrees(devices: int) -> str:
    """The divisors of `devices`, as a sentence's end: `1, 2, 4, 8 or 16`."""
    divisors = [str(d) for d in range(1, devices + 1) if devices % d == 0]
    return " or ".join([", ".join(divisors[:-1]), divisors[-1]]) if divisors[1:] else divisors[0]


def _common_degree(
    graph: tuple[Node, ...], devices: int, hardware: str, faults: list[Fault]
) -> int:
    """The degree colocated nodes agree on: all devices unless one says otherwise."""
    asked = [(n.path, n.degree) for n in graph if isinstance(n, Replicate | Split) and n.degree]
    for path, degree in asked:
        if degree and devices % degree:
            rule = f"does not divide the {devices} devices of hardware={hardware}"
            remedy = f"use {legal_degrees(devices)}"
            faults.append(Fault(f"{path}.degree", str(degree), rule, remedy))
    if len({degree for _, degree in asked}) > 1:
        (first, a), (second, b) = asked[:2]
        rule = f"differs from {first}.degree={a}, though nodes of a list share their devices"
        faults.append(Fault(f"{second}.degree", str(b), rule, "give both the same, or auto"))
    return asked[0][1] or devices if asked else devices


def _whole(
    node: Replicate, profile: ModelProfile, degree: int, faults: list[Fault]
) -> StrategyGraph | None:
    if node.zero and profile.perhaps_unused:
        rule = (
            "needs to know which parameters get no gradient, and whether "
            f"{profile.perhaps_unused[0]} does depends on the values {profile.name} looks at"
        )
        faults.append(Fault(f"{node.path}.zero", str(node.zero), rule, "use strategy=dp"))
        return None
    parameters = tuple(p.path for p in profile.parameters)
    flops = profile.forward_flops
    return StrategyGraph((BoundTaskGraph("model", node, ("*",), parameters, flops),), degree)


def _head_split(
    body: Replicate, top: Split, profile: ModelProfile, degree: int, faults: list[Fault]
) -> StrategyGraph | None:
    key = f"{top.path}.modules"
    value = _quoted(top.modules)
    if profile.graph is None:
        rule = f"needs the model's graph, and {profile.name} cannot be exported"
        remedy = "use strategy=dp or a zero strategy, which run the model as it is"
        faults.append(Fault(key, value, f"{rule} ({profile.export_error})", remedy))
        return None
    heads = find_heads(profile)
    chosen = matching(heads, top.modules)
    if not chosen:
        if heads:
            rule = f"names no output projection of {profile.name}"
            remedy = f"use head, or one of: {', '.join(h.module or '(the model)' for h in heads)}"
        else:
            rule = f"finds no output projection in {profile.name}"
            remedy = "use strategy=dp or a zero strategy"
        faults.append(Fault(key, value, rule, remedy))
        return None
    head = chosen[0]
    if head.classes < degree:
        rule = f"has {head.classes} classes, too few to give each of {degree} devices one"
        faults.append(Fault(key, value, rule, "use strategy=dp, or fewer devices"))
        return None
    try:
        cut = cut_head(profile, head)
    except CutRefused as refusal:
        rule = f"is {head.module or 'the output'}, which cannot be split from the rest: {refusal}"
        remedy = "use strategy=dp or a zero strategy"
        faults.append(Fault(key, value, rule, remedy))
        return None
    return StrategyGraph(
        (
            BoundTaskGraph("backbone", body, ("*",), cut.backbone_parameters, cut.backbone_flops),
            BoundTaskGraph("head", top, (head.module,), tuple(cut.shards), cut.head_flops),
        ),
        degree,
        head,
        cut,
    )


def _quoted(modules: tuple[str, ...]) -> str:
    return modules[0] if len(modules) == 1 else f"[{', '.join(modules)}]"
