"""Decide `offload: {optimizer: auto, parameters: auto}`: what replicas keep on their hosts.

The alternatives are few, so each is resolved, and the fastest that fits is taken. Owns which
alternatives there are; `resolve.py` resolves them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from whale_train.errors import PlanError
from whale_train.quantities import in_bytes, in_seconds
from whale_train.strategies.grammar.nodes import (
    Node,
    Pipeline,
    Replicate,
    Strategy,
    every_node,
)
from whale_train.strategies.grammar.offload import WHERE_POSSIBLE
from whale_train.strategies.plan.plan import Decision, Plan
from whale_train.strategies.resolver.evaluated import EvaluatedStrategy
from whale_train.strategies.stage_memory.within_memory import ShortOfMemoryError

_PLACES = ("none", "cpu", "nvme")


@dataclass(frozen=True)
class Alternative:
    """A strategy without an open offload of optimizer or parameters.

    strategy: the strategy.
    text: what it offloads and its ZeRO stage, for people.
    """

    strategy: Strategy
    text: str


def alternatives(strategy: Strategy) -> Sequence[Alternative]:
    """Return the ways to decide the open offloads of `strategy`, the one that offloads least first;
    () where none is open.

    Replicas keep the ZeRO stage that the strategy gives them, and have stage 3 for parameters and
    for files. Those at stage 0 get 1, 2 or 3 for an optimizer in memory. Files are an alternative
    where the strategy names a folder for them.
    """
    nodes = [x for x in every_node(strategy.graph) if isinstance(x, Replicate) and x.is_open]
    if not nodes:
        return ()
    by_graph: dict[tuple[Node, ...], Alternative] = {}
    for parameters, optimizer, zero in product(_PLACES, _PLACES, (1, 2, 3)):
        graph = tuple(_decided(node, optimizer, parameters, zero) for node in strategy.graph)
        if not all(_is_possible(x) for x in every_node(graph)):
            continue
        ways = {_text(x) for x in every_node(graph) if isinstance(x, Replicate)}
        text = " and ".join(sorted(ways))
        by_graph.setdefault(graph, Alternative(replace(strategy, graph=graph), text))
    return tuple(by_graph.values())


def fastest(
    strategy: Strategy,
    ways: Sequence[Alternative],
    consider: Callable[[Strategy], EvaluatedStrategy],
) -> EvaluatedStrategy:
    """Return the fastest of the alternatives `ways` of `strategy` that fits, with a decision.

    consider: resolves a strategy as far as its step.

    The first one is taken at once if it fits and leaves nothing else open. Raises PlanError where
    none can run: the ShortOfMemoryError of the one that is least short, if there is one.
    """
    node = next(x for x in every_node(strategy.graph) if isinstance(x, Replicate) and x.is_open)
    fitting: list[tuple[Alternative, EvaluatedStrategy]] = []
    errors: list[tuple[Alternative, PlanError]] = []
    for way in ways:
        try:
            fitting.append((way, consider(way.strategy)))
        except PlanError as error:
            errors.append((way, error))
            continue
        if way is ways[0] and not _leaves_open(strategy):
            break
    work = sum(x.work for x in _short(errors)) + sum(x.work for _, x in fitting)
    if not fitting:
        short = _short(errors)
        raise min(short, key=lambda x: x.short_bytes) if short else errors[0][1]
    chosen, best = min(fitting, key=lambda x: x[1].step.spans.seconds)
    reasons = [f"{in_seconds(best.step.spans.seconds)} a step"]
    reasons += [
        f"{in_seconds(x.step.spans.seconds)} with {way.text}"
        for way, x in fitting
        if way is not chosen
    ]
    reasons += [
        f"{way.text} is {in_bytes(error.short_bytes)} short"
        for way, error in errors
        if isinstance(error, ShortOfMemoryError)
    ]
    rejected = "" if chosen is ways[0] else ways[0].text
    decision = Decision(f"{node.path}.offload", chosen.text, rejected, "; ".join(reasons))

    def plan() -> Plan:
        made = best.plan()
        return replace(made, decisions=(decision, *made.decisions))

    return replace(best, plan=plan, work=work)


def _short(errors: Sequence[tuple[Alternative, PlanError]]) -> list[ShortOfMemoryError]:
    """Return the errors that are a lack of memory."""
    return [error for _, error in errors if isinstance(error, ShortOfMemoryError)]


def _leaves_open(strategy: Strategy) -> bool:
    """Return True if blocks of `strategy` may be recomputed, or their activations offloaded, where
    that is faster than to offload state."""
    for node in every_node(strategy.graph):
        recompute = None if isinstance(node, Pipeline) else node.recompute
        if recompute is not None and recompute.is_open:
            return True
        if isinstance(node, Replicate) and node.offload_activations in (
            "auto",
            WHERE_POSSIBLE,
        ):
            return True
    return False


def _decided(node: Node, optimizer: str, parameters: str, zero: int) -> Node:
    """Return `node` with the open offloads in it decided, and ZeRO stage `zero` for replicas that
    offload their optimizer and have none."""
    if isinstance(node, Pipeline):
        if isinstance(node.stages, int):
            return node
        inside = tuple(_decided(x, optimizer, parameters, zero) for x in node.stages)
        return replace(node, stages=inside)
    inside = tuple(_decided(x, optimizer, parameters, zero) for x in node.of)
    if not isinstance(node, Replicate) or not node.is_open:
        return replace(node, of=inside)
    own = optimizer if node.offload_optimizer == "auto" else node.offload_optimizer
    other = parameters if node.offload_parameters == "auto" else node.offload_parameters
    stage = node.zero
    if other != "none" or own == "nvme":
        stage = 3
    elif own == "cpu" and not stage:
        stage = zero
    folder = node.offload_path if "nvme" in (own, other) else None
    return replace(
        node,
        of=inside,
        zero=stage,
        offload_optimizer=own,
        offload_parameters=other,
        offload_path=folder,
    )


def _is_possible(node: Node) -> bool:
    """Return False for replicas whose state would be in files without a folder, or whose parameters
    alone would be in files, which are written from the optimizer's values."""
    if not isinstance(node, Replicate):
        return True
    places = (node.offload_optimizer, node.offload_parameters)
    if "nvme" in places and node.offload_path is None:
        return False
    return places != ("none", "nvme")


def _text(node: Replicate) -> str:
    """Return the state that `node` offloads and its ZeRO stage, for people."""
    states = ("optimizer", "parameters")
    parts = []
    for place, text in (("cpu", "on the host"), ("nvme", "in files")):
        there = [state for state in states if getattr(node, f"offload_{state}") == place]
        parts += [f"{' and '.join(there)} {text}"] if there else []
    return f"{', '.join(parts)}, zero: {node.zero}" if parts else "none"
