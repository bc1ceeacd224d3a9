"""Resolve the degrees of a strategy's nodes: every `auto` becomes a number that the devices allow.

Left-over devices become replicas of an outer replicate. A degree that does not divide the devices
is refused, with the degrees that do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

from whale_train.errors import Fault, nearest
from whale_train.strategies.grammar.form import Form, StageForm
from whale_train.strategies.grammar.nodes import Pipeline, Replicate, Split
from whale_train.strategies.grammar.recompute import NOTHING, Recompute


@dataclass(frozen=True)
class OpenStage:
    """A stage whose degrees may still be open.

    path: path of the stage's key in the strategy.
    copies: copies of the stage (None: open).
    shards: devices of a copy's shard group (None: open).
    split: the split of the stage, if it has one.
    copy: the innermost replicate inside the stage, if it has one.
    modules: modules that the stage must hold (None: a balanced cut decides).
    recompute: what it computes again in the backward (None: what a replicate around it says).
    body: the replicate beside `split`, if it has one.
    device: kind of the devices that hold the stage (None: any).
    sized: path of the node that gives the size of the shard group.
    more: further splits beside `body`.
    sends: the replicate that says whether what the stage's blocks save is on the host (None: what
        a replicate around it says).
    """

    path: str
    copies: int | None
    shards: int | None
    split: Split | None
    copy: Replicate | None
    modules: tuple[str, ...] | None = None
    recompute: Recompute | None = None
    body: Replicate | None = None
    device: str | None = None
    sized: str | None = None
    more: tuple[Split, ...] = ()
    sends: Replicate | None = None

    @property
    def width(self) -> int | None:
        """Return the devices of the stage in one replica of the pipeline; None while they are
        open."""
        if self.copies is None or self.shards is None:
            return None
        return self.copies * self.shards


def settled(
    outer: list[Replicate],
    stages: list[OpenStage],
    devices: int,
    per_node: int,
    hardware: str,
    faults: list[Fault],
) -> Form | None:
    """Return the form with all degrees as numbers, or None after adding to `faults`. The form has
    neither pipeline nor keeper yet.

    outer: replicates around everything.
    stages: stages of one replica.
    devices: number of devices, all of which are used.
    per_node: devices of each node (0: nodes differ in size).
    hardware: name of the hardware, for messages.
    """
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


def settled_by_kind(
    outer: list[Replicate],
    stages: list[OpenStage],
    kinds: Mapping[str, int],
    per_node: int,
    hardware: str,
    faults: list[Fault],
) -> Form | None:
    """Return the form with all degrees as numbers, where stages name the kind of their devices, or
    None after adding to `faults`. The devices of each kind are divided among its stages, and
    every replica has equally many of a kind.

    outer: replicates around everything.
    stages: stages of one replica, each of which must name its kind of device.
    kinds: number of devices of each kind, all of which must have a stage.
    per_node: devices of each node (0: nodes differ in size).
    hardware: name of the hardware, for messages.
    """
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
    by_number: dict[int, StageForm] = {}
    copies: dict[str, int] = {}
    for kind, count in kinds.items():
        numbers = [i for i, stage in enumerate(stages) if stage.device == kind]
        form = settled(outer, [stages[i] for i in numbers], count, per_node, hardware, faults)
        if form is None:
            return None
        copies[kind] = form.copies
        by_number |= dict(zip(numbers, form.stages, strict=True))
    if len(set(copies.values())) > 1:
        copies_by_kind = " and ".join(f"{n} of {kind}" for kind, n in copies.items())
        rule = f"makes unlike numbers of copies: {copies_by_kind}"
        remedy = "give stages degrees that divide the devices of every kind equally often"
        faults.append(Fault(stages[0].path.rpartition("[")[0], "", rule, remedy))
        return None
    number = next(iter(copies.values()))
    asked = prod(node.degree or 1 for node in outer)
    is_open = any(node.degree is None for node in outer)
    stage_forms = tuple(by_number[i] for i in range(len(stages)))
    return Form(number, stage_forms, None, None, 1 if is_open else number // asked)


def _as_numbers(stages: Iterable[OpenStage]) -> tuple[StageForm, ...]:
    """Return the stages with their degrees as numbers; an open degree becomes 1."""
    return tuple(
        StageForm(
            *(s.path, s.copies or 1, s.shards or 1, s.split, s.body, s.modules),
            s.recompute or NOTHING,
            device=s.device,
            more=s.more,
            offload=(s.sends.offload_activations or "none") if s.sends else "none",
            offload_path=f"{s.sends.path}.offload.activations" if s.sends else "",
        )
        for s in stages
    )


def _narrowest(
    stages: list[OpenStage], devices: int, per_node: int, faults: list[Fault]
) -> list[OpenStage]:
    """Return the stages with their open degrees filled, where the degree of the outer replicate is
    open as well.

    A single split fills a node, if there are several; the open degrees of other stages become 1.
    Returns an empty list after adding to `faults`: a single split without nodes to fill is
    undecided.
    """
    if len(stages) == 1 and stages[0].split and stages[0].shards is None:
        if per_node > 1 and devices % per_node == 0 and devices > per_node:
            return [replace(stages[0], shards=per_node, copies=stages[0].copies or 1)]
        rule = "is auto, and so is the replicate around it: nothing says which takes the devices"
        remedy = "give one of them a number"
        faults.append(Fault(f"{stages[0].split.path}.degree", "auto", rule, remedy))
        return []
    return [replace(s, copies=s.copies or 1, shards=s.shards or 1) for s in stages]


def _filled(
    stages: list[OpenStage], devices: int, hardware: str, faults: list[Fault]
) -> list[OpenStage]:
    """Return the stages with their open degrees filled, so that they use all `devices`.

    Open stages divide the remaining devices evenly. Within a stage, the split takes all it can.
    Returns an empty list after adding to `faults`.
    """
    fixed = sum(stage.width or 0 for stage in stages)
    open_count = sum(stage.width is None for stage in stages)
    left = devices - fixed
    per_stage, over = divmod(left, open_count)
    if per_stage < 1 or over:
        rule = f"leaves {left} of {devices} devices of hardware={hardware} to share"
        rule += f" among {open_count} stages" if open_count > 1 else " with one stage"
        remedy = f"use a multiple of {open_count} devices more than {fixed}"
        if len(stages) == open_count:
            remedy = f"use {legal_degrees(devices)} stages"
        faults.append(Fault(stages[0].path.rpartition("[")[0] or stages[0].path, "", rule, remedy))
        return []
    filled = []
    for stage in stages:
        if stage.width is None:
            known = stage.copies or stage.shards or 1
            if stage.copies is None and stage.shards is None:
                known = 1
            if per_stage % known:
                rule = f"does not divide the {per_stage} devices of its stage"
                path = f"{stage.path}"
                faults.append(Fault(path, str(known), rule, f"use {legal_degrees(per_stage)}"))
                return []
            if stage.shards is None:
                stage = replace(
                    stage, copies=stage.copies or 1, shards=per_stage // (stage.copies or 1)
                )
            else:
                stage = replace(stage, copies=per_stage // stage.shards)
        filled.append(stage)
    return filled


def too_many_stages(pipeline: Pipeline, devices: int, hardware: str) -> Fault:
    """Return the fault of a pipeline with more stages than there are devices."""
    rule = f"leaves {devices} of {devices} devices of hardware={hardware} to share"
    rule += f" among {pipeline.stages} stages"
    return Fault(f"{pipeline.path}.stages", "", rule, f"use {legal_degrees(devices)} stages")


def _not_dividing(key: str, number: int, devices: int, hardware: str) -> Fault:
    """Return the fault of a degree, or of a number of devices, that does not divide all devices."""
    rule = f"does not divide the {devices} devices of hardware={hardware}"
    value = str(number) if key.endswith(".degree") else f"{number} devices"
    return Fault(key, value, rule, f"use {legal_degrees(devices)}")


def legal_degrees(devices: int) -> str:
    """Return the divisors of `devices` as the end of a sentence: `1, 2, 4, 8 or 16`."""
    divisors = [str(d) for d in range(1, devices + 1) if devices % d == 0]
    return " or ".join([", ".join(divisors[:-1]), divisors[-1]]) if divisors[1:] else divisors[0]
