"""What is shown together of plans that are equal to one device, and in which file.

Five files ask the same of jobs, along the same axes: model, strategy, optimizer, devices, clipping,
micro-batches of a step, precision. A full run has all their cases. Else each axis meets the
strategies in the file whose subject it is, and no other file crosses the two again:

- test_same_mathematics: every strategy meets every optimizer of PyTorch's, devices of unlike speed,
  and clipping. Every model meets copies that divide their state and a split head.
- test_accumulation: every strategy meets micro-batches; partitioned copies and a split head meet
  two of them, and three.
- test_lamb: every strategy meets LAMB, and clipping and devices of unlike speed where there are
  cases of these. What LAMB does to a parameter is the same in any model.
- test_lars: as test_lamb.
- test_precision: every strategy meets fp16; clipping and micro-batches occur beside it. bf16 meets
  a split head and a state on the host in test_same_mathematics, the rest in test_verify.
- test_parallel_strategies: every nesting occurs that no other contains. Each kind of transformer
  (decoder, encoder, experts) meets each kind of node, and both ways to divide a model meet every
  optimizer. Other architectures are divided alike; test_split_models has some of them.

That no model meets every strategy hides little. What is done to a model is said by the kinds of
node: its parameters are partitioned, its head or all of it is split, it is cut into stages. Plain
copies leave it as it is, and have whichever models come. Strategies of one kind differ in what
they do with gradients and an optimizer's state, whatever the model.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.distributed.cases import Case
from tests.pairs import covering

Row = TypeVar("Row")

_FILES = Path(__file__).resolve().parents[2] / "conf" / "strategy"
_NODES = {
    "partitioned": r"zero: [123]",
    "split head": r"modules: head",
    "split": r"split: *\{(?!modules)",
    "pipeline": r"pipeline:",
}
_OVERRIDES = {
    "clip": "train.grad_clip=",
    "accumulate": "train.accumulate=",
    "precision": "train.precision=",
    "graph": "strategy.graph=",
}


@dataclass(frozen=True)
class Shown:
    """The axes of which every value meets every strategy, meets every kind of node, or occurs."""

    with_strategies: tuple[str, ...] = ()
    with_nodes: tuple[str, ...] = ()
    once: tuple[str, ...] = ()


SHOWN = {
    "test_same_mathematics": Shown(
        ("optimizer", "speeds", "clip"), ("model",), ("model", "shares", "others")
    ),
    "test_accumulation": Shown(
        (), ("accumulate",), ("accumulate", "model", "optimizer", "clip", "others")
    ),
    "test_lamb": Shown(("speeds", "clip")),
    "test_lars": Shown(("speeds", "clip")),
    "test_precision": Shown((), (), ("model", "clip", "accumulate")),
}


def fewest(rows: Sequence[Row], shown: Callable[[Row], Iterable[Hashable]]) -> list[Row]:
    """Return what `covering` chooses, without the rows that those chosen later made needless."""
    chosen = covering(rows, shown)
    needed = covering(chosen[::-1], shown)
    return [row for row in chosen if row in needed]


def shown_by(file: str) -> Callable[[Case], set[Hashable]]:
    """Return what tells `covering` what a case of one of the first four files shows."""
    axes = SHOWN[file]

    def of(case: Case) -> set[Hashable]:
        nodes = nodes_of(_graph(case))
        strategy = (case.strategy, nodes)
        met = [(axis, _value(case, axis)) for axis in axes.with_strategies]
        return {
            strategy,
            *((strategy, axis, value) for axis, value in met if value),
            *((node, axis, _value(case, axis)) for node in nodes for axis in axes.with_nodes),
            *((axis, _value(case, axis)) for axis in axes.once),
        }

    return of


def nodes_of(graph: str) -> frozenset[str]:
    """Return the kinds of node in a strategy's graph, besides plain copies."""
    return frozenset(node for node, pattern in _NODES.items() if re.search(pattern, graph))


def _graph(case: Case) -> str:
    """Return the graph of the case's strategy: its own, or that of the strategy's file."""
    (*_, graph) = _given(case, "graph") or ((_FILES / f"{case.strategy}.yaml").read_text(),)
    return graph


def _given(case: Case, axis: str) -> tuple[str, ...]:
    return tuple(x for x in case.extra if x.startswith(_OVERRIDES[axis]))


def _value(case: Case, axis: str) -> Hashable:
    """Return where on an axis the case is; nothing where it has nothing of it."""
    if axis in _OVERRIDES:
        return _given(case, axis)
    found: dict[str, Hashable] = {
        # Neither of them has a graph, and no node looks at why.
        "model": "own_unexported" if case.model == "own_branching" else case.model,
        "optimizer": case.optimizer,
        "speeds": bool(case.speeds),
        "shares": (case.devices, case.speeds),
        "others": tuple(x for x in case.extra if not x.startswith(tuple(_OVERRIDES.values()))),
    }
    return found[axis]


# --- Nestings ------------------------------------------------------------------------------------

# Nestings of which another has all nodes, and more of them, unlike ones, or more of a schedule.
_CONTAINED = {
    "hybrid": "replicate2_hybrid",
    "split2": "split3_uneven",
    "pipeline2": "pipeline4",
    "gpipe": "interleaved",
    "split_in_one_stage": "split3_split2",
    "split2_pipeline2": "replicate2_pipeline2_split2",
    "widths_1_2": "replicate3_split2",
    "zero1_pipeline": "zero1_offload_pipeline",
    "zero1_split2": "zero3_split2",
    "zero2_split2": "zero3_split2",
    "pipeline_hybrid": "pipeline_hybrid_uneven",
}
_ARCHITECTURES = {
    "qwen3": "decoder",
    "bert": "encoder",
    "t5": "encoder",
    "moe_gpt": "experts",
}
# What only one model shows of a nesting: a cut of the sequence; statistics of a batch in copies of
# shards; experts in unlike parts; an encoder's values that pass more than one stage.
_TOGETHER = {
    ("qwen3", "split2_sequence"),
    ("resnet", "replicate2_split2"),
    ("moe_gpt", "split3_uneven"),
    ("t5", "pipeline4"),
}


def shown_by_nesting(
    model: str, strategy: str, optimizer: str, extra: tuple[str, ...], graph: str, refusal: str
) -> set[Hashable]:
    """Return what a case of test_parallel_strategies shows; of a refused one, what is said."""
    if refusal:
        return {refusal}
    together = {(model, strategy)} & _TOGETHER
    if model not in _ARCHITECTURES:
        return {*together, strategy} if together else set()
    nodes = nodes_of(graph)
    return {
        model,
        extra,
        *together,
        *({strategy} - _CONTAINED.keys()),
        *((_ARCHITECTURES[model], node) for node in nodes),
        *((optimizer, node) for node in nodes & {"split", "pipeline"}),
    }
