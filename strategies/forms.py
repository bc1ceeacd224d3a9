"""The one form of every strategy: copies of a pipeline of stages, each copies of shard groups.

Whatever the nesting, it comes down to that: a replicate around a pipeline is its copies, a
replicate inside a stage the stage's, a split the shard group of one copy, and a strategy without a
pipeline has one stage. `read_form` says which node asked for what, settles every `auto` degree and
refuses what does not fit the devices.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from whale_train.errors import Fault, nearest
from whale_train.strategies.grammar import (
    Node,
    Pipeline,
    Replicate,
    Split,
    Stage,
    Strategy,
    every_node,
)


@dataclass(frozen=True)
class StageForm:
    """One stage: `copies` of a group of `shards` devices, of the kind `device` (None: whichever
    come next). `modules` are those it must hold (None: a balanced cut decides). `body` is the
    replicate beside a `split` of the head: each member of the group then holds what the split
    leaves, for its part of the samples."""

    path: str
    copies: int
    shards: int
    split: Split | None = None
    body: Replicate | None = None
    modules: tuple[str, ...] | None = None
    recompute: str = "none"
    device: str | None = None

    @property
    def width(self) -> int:
        """Devices of one copy of the pipeline that hold this stage."""
        return self.copies * self.shards


@dataclass(frozen=True)
class Form:
    """`copies` of a pipeline of `stages`; a strategy without a pipeline has one stage.

    `keeper` says how copies keep what they have in common (ZeRO, offload); `added` is the part of
    `copies` nobody asked for, and `filled` the path of the node whose `auto` degree took all
    devices of a strategy without a pipeline.
    """

    copies: int
    stages: tuple[StageForm, ...]
    pipeline: Pipeline | None
    keeper: Replicate | None
    added: int = 1
    filled: str | None = None

    @property
    def width(self) -> int:
        """Devices of one copy."""
        return sum(stage.width for stage in self.stages)

    @property
    def members(self) -> int:
        """How many share the samples of a micro-batch: those beside a split head, or one."""
        return max((stage.shards for stage in self.stages if stage.body), default=1)


@dataclass(frozen=True)
class _Open:
    """A stage whose degrees may still be open (None)."""

    path: str
    copies: int | None
    shards: int | None
    split: Split | None
    copy: Replicate | None
    modules: tuple[str, ...] | None = None
    recompute: str = "none"
    body: Replicate | None = None
    device: str | None = None
    sized: str | None = None  # the path of the node that says how wide its shard group is

    @property
    def width(self) -> int | None:
        if self.copies is None or self.shards is None:
            return None
        return self.copies * self.shards


def needs_graph(strategy: Strategy) -> bool:
    """Return whether ranks run the model's exported graph: all but copies of the whole model do,
    which run it as it is."""
    return not all(isinstance(node, Replicate) for node in every_node(strategy.graph))


def read_form(
    strategy: Strategy,
    devices: int | Mapping[str, int],
    per_node: int,
    hardware: str,
    faults: list[Fault],
) -> Form | None:
    """The form of a strategy over `devices` devices (so many, or so many of each kind) in nodes of
    `per_node` (0: of unlike size); None when `faults` grew."""
    before = len(faults)
    outer, inner = _outer(strategy.graph, faults)
    pipeline = inner[0] if inner and isinstance(inner[0], Pipeline) else None
    listed: list[_Open | None]
    if not inner:
        listed = [_Open(outer[-1].path, 1, 1, None, None)]
    elif pipeline is None:
        listed = [_stage(inner, faults)]
    elif isinstance(pipeline.stages, int):
        one = _Open(f"{pipeline.path}.stages", None, 1, None, None)
        listed = [one for _ in range(pipeline.stages)]
    else:
        listed = [_stage((node,), faults) for node in pipeline.stages]
    stages = [stage for stage in listed if stage is not None]
    copies = (node for s in stages for node in (s.copy, s.body) if node)
    keeper = _keeper([*outer, *copies], pipeline, faults)
    if len(faults) > before:
        return None
    kinds = {} if isinstance(devices, int) else devices
    total = devices if isinstance(devices, int) else sum(devices.values())
    if any(stage.device for stage in stages):
        form = _settled_by_kind(outer, stages, kinds, per_node, hardware, faults)
    else:
        form = _settled(outer, stages, total, per_node, hardware, faults)
    if form is None:
        return None
    if pipeline is None:  # copies of the whole are copies of the whole, whoever asked for them
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
    """The replicates around everything, and what they copy; nothing where that is the model."""
    outer: list[Replicate] = []
    while len(nodes) == 1:
        (node,) = nodes
        if not isinstance(node, Replicate):
            break
        outer.append(node)
        _refuse_modules(node, faults)
        nodes = node.of
    return outer, nodes


def _filled_node(outer: Sequence[Replicate], stage: _Open) -> str | None:
    """Return the path of the node of a lone stage whose open degree takes the devices."""
    if stage.body is not None:
        return stage.body.path if stage.shards is None else None
    return next((node.path for node in outer if node.degree is None), None)


def _stage(nodes: tuple[Node, ...], faults: list[Fault]) -> _Open | None:
    """One stage: (stage of) (replicate of) split, or a replicate beside a split of the head; each
    of which may be missing."""
    path, around = nodes[0].path, Stage("")
    if isinstance(nodes[0], Stage):
        around, nodes = nodes[0], nodes[0].of
    copies: int | None = 1
    copy: Replicate | None = None
    while len(nodes) == 1:
        (inner,) = nodes
        if not isinstance(inner, Replicate):
            break
        _refuse_modules(inner, faults)
        both = copies is not None and inner.degree is not None
        copies = copies * inner.degree if both and copies and inner.degree else None
        copy, nodes = inner, inner.of
    split: Split | None = None
    body: Replicate | None = None
    shards: int | None = 1
    sized: str | None = None
    match nodes:
        case ():
            pass
        case (Split(of=()) as split,):
            shards, sized = split.degree, split.path
        case (Split() as inside,):
            rule = "cuts again what a split has cut"
            faults.append(Fault(f"{inside.path}.of", "", rule, "multiply the degrees into one"))
            return None
        case (Replicate() as body, Split() as split):
            said = next((node for node in (body, split) if node.degree), body)
            shards, sized = said.degree, said.path
            if not _is_head_beside_copies(body, split, path, faults):
                return None
        case _:
            faults.append(_colocated(nodes))
            return None
    return _Open(
        path, copies, shards, split, copy, around.modules, around.recompute, body, around.device,
        sized,
    )  # fmt: skip


def _is_head_beside_copies(body: Replicate, split: Split, path: str, faults: list[Fault]) -> bool:
    """Whether the list is one that is executed inside another node; else a fault says why not."""
    if body.of or split.of:
        rule = "is not a replicate of all beside a split of the head, over the same devices"
        remedy = "use [{replicate: {}}, {split: {modules: head}}]"
        faults.append(Fault(path.rpartition("[")[0], "", rule, remedy))
        return False
    if body.modules != ("*",):
        named = ", ".join(body.modules)
        rule = "must cover what the split leaves"
        faults.append(Fault(f"{body.path}.modules", named, rule, 'use "*"'))
        return False
    if body.degree and split.degree and body.degree != split.degree:
        rule = f"differs from {body.path}.degree={body.degree}, though nodes of a list share their "
        key, value = f"{split.path}.degree", str(split.degree)
        faults.append(Fault(key, value, f"{rule}devices", "give both the same, or auto"))
        return False
    return True


def _colocated(nodes: tuple[Node, ...]) -> Fault:
    path = nodes[0].path.rpartition("[")[0]
    rule = "has parts that share devices, which are executed as a replicate and a split of the head"
    remedy = "use strategy=hybrid_split_dp, or one node"
    return Fault(path, f"{len(nodes)} nodes", rule, remedy)


def _refuse_modules(node: Replicate, faults: list[Fault]) -> None:
    if node.modules != ("*",):
        rule = "names a part of the model, and nothing beside it covers the rest"
        remedy = 'use "*"; parts are the stages of a pipeline, or nodes of a list at the top'
        faults.append(Fault(f"{node.path}.modules", ", ".join(node.modules), rule, remedy))


def _keeper(
    copies: list[Replicate], pipeline: Pipeline | None, faults: list[Fault]
) -> Replicate | None:
    """The replicate that says how copies keep what they have in common: one set of engines has
    one way."""
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


def _settled(
    outer: list[Replicate],
    stages: list[_Open],
    devices: int,
    per_node: int,
    hardware: str,
    faults: list[Fault],
) -> Form | None:
    """All degrees as numbers."""
    asked = prod(node.degree or 1 for node in outer)
    is_open = any(node.degree is None for node in outer)
    outermost = outer[0].path if outer else stages[0].path
    widths = [stage.width for stage in stages]
    if devices % asked:
        faults.append(_not_dividing(f"{outermost}.degree", asked, devices, hardware))
        return None
    if any(width is None for width in widths):
        if is_open:
            stages = _narrowest(stages, devices // asked, per_node, faults)
        else:
            stages = _filled(stages, devices // asked, hardware, faults)
        if not stages:
            return None
    total = sum(stage.width or 0 for stage in stages)
    if devices % (asked * total):
        sized = stages[0].sized if len(stages) == 1 and asked == stages[0].copies == 1 else None
        key = f"{sized}.degree" if sized else outermost
        faults.append(_not_dividing(key, asked * total, devices, hardware))
        return None
    copies = devices // total
    added = 1 if is_open else copies // asked
    return Form(copies, _as_numbers(stages), None, None, added)


def _settled_by_kind(
    outer: list[Replicate],
    stages: list[_Open],
    kinds: Mapping[str, int],
    per_node: int,
    hardware: str,
    faults: list[Fault],
) -> Form | None:
    """The same where stages say which kind of device holds them: each kind's devices are shared
    among its stages, and every copy has as many of a kind."""
    before = len(faults)
    for stage in stages:
        if stage.device is None:
            rule = "names no device, and other stages of its pipeline do"
            faults.append(Fault(f"{stage.path}.device", "auto", rule, "name it for all, or none"))
        elif stage.device not in kinds:
            rule, remedy = f"is no device of hardware={hardware}", nearest(stage.device, kinds)
            faults.append(Fault(f"{stage.path}.device", stage.device, rule, remedy))
    held = {stage.device for stage in stages}
    for kind, count in kinds.items():
        if kind not in held and len(faults) == before:
            rule = f"leaves the {count} x {kind} of hardware={hardware} without a stage"
            path = stages[0].path.rpartition("[")[0]
            faults.append(Fault(path, "", rule, f"give a stage device: {kind}"))
    if len(faults) > before:
        return None
    settled: dict[int, StageForm] = {}
    copies: dict[str, int] = {}
    for kind, count in kinds.items():
        numbers = [i for i, stage in enumerate(stages) if stage.device == kind]
        form = _settled(outer, [stages[i] for i in numbers], count, per_node, hardware, faults)
        if form is None:
            return None
        copies[kind] = form.copies
        settled |= dict(zip(numbers, form.stages, strict=True))
    if len(set(copies.values())) > 1:
        each = " and ".join(f"{n} of {kind}" for kind, n in copies.items())
        rule = f"makes unlike numbers of copies: {each}"
        remedy = "give stages degrees that divide the devices of every kind equally often"
        faults.append(Fault(stages[0].path.rpartition("[")[0], "", rule, remedy))
        return None
    number = next(iter(copies.values()))
    asked = prod(node.degree or 1 for node in outer)
    is_open = any(node.degree is None for node in outer)
    listed = tuple(settled[i] for i in range(len(stages)))
    return Form(number, listed, None, None, 1 if is_open else number // asked)


def _as_numbers(stages: Iterable[_Open]) -> tuple[StageForm, ...]:
    return tuple(
        StageForm(
            *(s.path, s.copies or 1, s.shards or 1, s.split, s.body, s.modules, s.recompute),
            device=s.device,
        )
        for s in stages
    )


def _narrowest(
    stages: list[_Open], devices: int, per_node: int, faults: list[Fault]
) -> list[_Open]:
    """Open degrees inside open copies: a lone split fills a node, a stage takes one device."""
    if len(stages) == 1 and stages[0].split and stages[0].shards is None:
        if per_node > 1 and devices % per_node == 0 and devices > per_node:
            return [replace(stages[0], shards=per_node, copies=stages[0].copies or 1)]
        rule = "is auto, and so is the replicate around it: nothing says which takes the devices"
        remedy = "give one of them a number"
        faults.append(Fault(f"{stages[0].split.path}.degree", "auto", rule, remedy))
        return []
    return [replace(s, copies=s.copies or 1, shards=s.shards or 1) for s in stages]


def _filled(stages: list[_Open], devices: int, hardware: str, faults: list[Fault]) -> list[_Open]:
    """Open stages share what the others leave, evenly; in a stage the split takes all it can."""
    fixed = sum(stage.width or 0 for stage in stages)
    open_count = sum(stage.width is None for stage in stages)
    left = devices - fixed
    each, over = divmod(left, open_count)
    if each < 1 or over:
        rule = f"leaves {left} of {devices} devices of hardware={hardware} to share"
        rule += f" among {open_count} stages" if open_count > 1 else " with one stage"
        remedy = f"use a multiple of {open_count} devices more than {fixed}"
        if len(stages) == open_count:
            remedy = f"use {legal_degrees(devices)} stages"
        faults.append(Fault(stages[0].path.rpartition("[")[0] or stages[0].path, "", rule, remedy))
        return []
    found = []
    for stage in stages:
        if stage.width is None:
            known = stage.copies or stage.shards or 1
            if stage.copies is None and stage.shards is None:
                known = 1
            if each % known:
                rule = f"does not divide the {each} devices of its stage"
                path = f"{stage.path}"
                faults.append(Fault(path, str(known), rule, f"use {legal_degrees(each)}"))
                return []
            if stage.shards is None:
                stage = replace(stage, copies=stage.copies or 1, shards=each // (stage.copies or 1))
            else:
                stage = replace(stage, copies=each // stage.shards)
        found.append(stage)
    return found


def _refuse_without_effect(form: Form, keeper: Replicate | None, faults: list[Fault]) -> None:
    for stage in form.stages[:-1]:
        if stage.body:
            rule = "splits the head in a stage that is not the last, where the loss is"
            faults.append(Fault(stage.path, "", rule, "move the list to the last stage"))
    for stage in form.stages:
        if stage.split and stage.shards == 1:
            rule, remedy = "has nothing to divide over 1 device", "use a degree of at least 2"
            faults.append(Fault(stage.split.path, "", rule, f"{remedy}, or no split"))
    copied = (form.copies * s.copies * (s.shards if s.body else 1) for s in form.stages)
    if keeper and keeper.zero and max(copied) == 1:
        rule = "partitions over the copies, and there is only one"
        remedy = "use 0, or more devices"
        faults.append(Fault(f"{keeper.path}.zero", str(keeper.zero), rule, remedy))


def _not_dividing(key: str, number: int, devices: int, hardware: str) -> Fault:
    rule = f"does not divide the {devices} devices of hardware={hardware}"
    value = str(number) if key.endswith(".degree") else f"{number} devices"
    return Fault(key, value, rule, f"use {legal_degrees(devices)}")


def legal_degrees(devices: int) -> str:
    """Return the divisors of `devices`, as a sentence's end: `1, 2, 4, 8 or 16`."""
    divisors = [str(d) for d in range(1, devices + 1) if devices % d == 0]
    return " or ".join([", ".join(divisors[:-1]), divisors[-1]]) if divisors[1:] else divisors[0]
