"""The parts of a stage that are split while the rest of the stage is replicated: the experts of a
mixture, other modules, or an output head. They are found in the stage's slice of the model."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from whale_train.errors import Fault, PlanError
from whale_train.strategies.grammar.nodes import Replicate, Split
from whale_train.strategies.graph.operation_graph import (
    ModelProfile,
    OperationGraph,
    Size,
)
from whale_train.strategies.independence.learned_targets import learned_means
from whale_train.strategies.independence.states import PerSample
from whale_train.strategies.layouts.propagation import RULES
from whale_train.strategies.layouts.rules.reductions import embedding
from whale_train.strategies.partition.dense_parts import dense_parts
from whale_train.strategies.partition.output_head import Head, find_heads, matching
from whale_train.strategies.partition.pipeline_partition import Slice, is_inside
from whale_train.strategies.partition.routed_experts import route_experts
from whale_train.strategies.partition.split_parts import SplitParts, SplitRefused, together
from whale_train.strategies.stages.placement import PlanningContext
from whale_train.strategies.stages.split_names import is_named, names_of, nearest_modules, sharded


@dataclass(frozen=True)
class BesideCopies:
    """The parts of a stage that are split while the rest is replicated.

    parts: the split parts, joined into one.
    head: the output projection, where it is the only split part; else None.
    """

    parts: SplitParts
    head: Head | None


def split_parts(
    job: PlanningContext, stage: int, part: Slice, shared: Mapping[str, tuple[int, ...]]
) -> BesideCopies:
    """Return the parts that the splits of a stage name, over the stage's devices.

    job: the strategy on its devices.
    stage: number of the stage.
    part: the stage's slice of the model.
    shared: stages of every weight that several stages hold, by path.

    Raises PlanError where a split names nothing that can be split, where two nodes name the same
    weight, and where a value that enters or leaves the stage does not have the batch first.
    """
    splits, all_parts = job.form.stages[stage].splits, list[SplitParts]()
    heads: list[Head] = []
    body = job.form.stages[stage].body
    assert body is not None
    copied = frozenset[str]()  # weights that `body` names; unnamed weights are replicated too
    if body.modules != ("*",):
        copied = frozenset(_named(job, part, body.modules))
    for split in splits:
        named = named_weights(job, part, shared, split)
        if split.modules != ("*",) and copied:
            _refuse_named_twice(job, split, body, named & copied)
            if named and named <= copied:
                rule = f"names weights alone that are tied to ones of {body.path}.modules"
                key, value = f"{split.path}.modules", ", ".join(split.modules)
                raise PlanError([Fault(key, value, rule, "name them in one node")])
        named -= copied  # a tied weight that both name is replicated
        parts = _experts(job, stage, part, shared, split, named)
        if parts is not None and split.patterns:
            rule = "says how weights of modules are cut, and these are experts"
            raise PlanError([Fault(f"{split.path}.patterns", "", rule, "leave it out")])
        if parts is not None:
            all_parts.append(parts)
        elif not named or _is_head(job, split, body):
            profile = job.profile if job.chunk_count == 1 else _profile_of(job, part)
            head = _head_of(job, part, shared, split, profile)
            _refuse_copied_head(split, body, head, copied)
            free = {head.weight, *_added_to_classes(job, part, head)} - copied - shared.keys()
            all_parts.append(_head_parts(job, stage, part, split, head, free))
            if beside := _beside_head(job, stage, part, shared, split, free | copied):
                all_parts.append(beside)
            else:
                heads.append(head)
        else:
            all_parts.append(_dense(job, stage, part, split, named))
    split = splits[0]
    key, value = f"{split.path}.modules", ", ".join(split.modules)
    remedy = "use a split of the whole stage"
    if crossing := _not_by_sample(job, (*part.takes, *part.gives)):
        rule = f"shares the samples, and {crossing}, which enters or leaves its stage, has no "
        raise PlanError([Fault(key, value, f"{rule}batch first", remedy)])
    try:
        joined = together(all_parts)
    except SplitRefused as refusal:
        key, rule = splits[0].path.rpartition("[")[0], f"splits parts that meet: {refusal}"
        remedy = f"name each module in one split, or {remedy}"
        raise PlanError([Fault(key, "", rule, remedy)]) from None
    return BesideCopies(joined, heads[0] if len(splits) == 1 and heads else None)


def _beside_head(
    job: PlanningContext,
    stage: int,
    part: Slice,
    shared: Mapping[str, tuple[int, ...]],
    split: Split,
    taken: Set[str],
) -> SplitParts | None:
    """Return the part that a split names besides a head: experts, or other modules, in weights
    outside `taken`. Return None where it names nothing else that can be cut. Raises PlanError."""
    modules = tuple(glob for glob in split.modules if glob not in ("head", "*"))
    if not modules:
        return None
    others = replace(split, modules=modules)
    named = named_weights(job, part, shared, others) - taken
    if not named:
        return None
    experts = _experts(job, stage, part, shared, others, named)
    if experts is not None:
        return experts
    try:
        return _dense(job, stage, part, others, named)
    except NothingToCutError:
        return None


class NothingToCutError(PlanError):
    """A split names no weight that can be cut over the stage's devices."""


def _refuse_copied_head(split: Split, body: Replicate, head: Head, copied: Set[str]) -> None:
    """Raise PlanError if `body` names the weight of the head that a split names, perhaps by another
    name of a tied weight."""
    if head.weight in copied:
        key, value = f"{split.path}.modules", ", ".join(split.modules)
        rule = f"is {head.module or 'the output'}, whose weight {body.path}.modules names as well"
        raise PlanError([Fault(key, value, rule, "name each module in one node")])


def _refuse_named_twice(
    job: PlanningContext, split: Split, body: Replicate, paths: Set[str]
) -> None:
    """Raise PlanError if a weight of `paths` has a name that both `split` and `body`, the
    replicated rest, name."""
    for path in sorted(paths):
        modules = [name.rpartition(".")[0] for name in names_of(job.profile, path)]
        for module in modules:
            if all(any(is_inside(module, x) for x in of.modules) for of in (split, body)):
                rule = f"names {path}, which a split of the list names as well"
                key, value = f"{body.path}.modules", ", ".join(body.modules)
                raise PlanError([Fault(key, value, rule, "name each module in one node")])


def named_weights(
    job: PlanningContext, part: Slice, shared: Mapping[str, tuple[int, ...]], split: Split
) -> frozenset[str]:
    """Return the paths of the weights of `part` that `split` names. Weights that several stages
    hold (`shared`) are left out: they stay unsplit, so that their gradients can be summed."""
    return frozenset(path for path in _named(job, part, split.modules) if path not in shared)


def _named(job: PlanningContext, part: Slice, modules: Sequence[str]) -> Iterator[str]:
    """Yield the paths of the weights of `part` that lie in `modules` (paths, globs, `head`)."""
    names = set(modules)
    if "head" in names:
        names |= {head.module for head in job.findings.heads}
    yield from (path for path in part.weights if is_named(job.profile, path, sorted(names)))


def _is_head(job: PlanningContext, split: Split, body: Replicate) -> bool:
    """Return True if a split names the head of a stage. Experts, which are looked for first, are
    not considered."""
    if split.dim == "tensor":
        return False
    if split.modules == ("*",):
        return body.modules == ("*",)
    return "head" in split.modules or bool(matching(job.findings.heads, split.modules))


def _head_parts(
    job: PlanningContext, stage: int, part: Slice, split: Split, head: Head, free: Set[str]
) -> SplitParts:
    """Return the head over a stage's devices, cut by its classes unless the split says otherwise.

    head: the output projection.
    free: paths of the head's weight and of the parameters that are cut with it (a bias).

    Raises PlanError.
    """
    members = job.form.stages[stage].shards
    key, value = f"{split.path}.modules", ", ".join(split.modules)
    if head.classes < members:
        rule = f"has {head.classes} classes, too few to give each of {members} devices one"
        raise PlanError([Fault(key, value, rule, "use strategy=dp, or fewer devices")])
    if not split.patterns:
        pattern = "vocabulary" if _is_table(job, part, head.weight) else "column"
        split = replace(split, dim="auto", patterns=((head.weight, pattern),))
    return _dense(job, stage, part, split, free, head)


def _is_table(job: PlanningContext, part: Slice, weight: str) -> bool:
    """Return True if an embedding of `part` reads `weight`."""
    paths = job.profile.weights_read(part.operations)
    return any(
        paths.get(op.inputs[0]) == weight
        for op in job.graph
        if op.name in part.operations and RULES.get(op.target) is embedding
    )


def _added_to_classes(job: PlanningContext, part: Slice, head: Head) -> Iterator[str]:
    """Yield the paths of the parameters that only the head's product and later operations read. The
    head's weight is left out."""
    graph, after = job.graph, job.graph.descendants({head.operation})
    readers = after | {head.operation}
    for name, path in job.profile.weights_read(part.operations).items():
        if path != head.weight and all(user in readers for user in graph.users[name]):
            yield path


def _dense(
    job: PlanningContext,
    stage: int,
    part: Slice,
    split: Split,
    named: Set[str],
    head: Head | None = None,
) -> SplitParts:
    """Return the part of the weights `named`, divided over the stage's devices by layouts of these
    weights.

    job, stage, part: as in `split_parts`.
    split: the split that names the weights.
    named: paths of the weights. Heads are left out where `split` and the replicated rest both name
        everything, unless the part is `head` itself.
    head: the output projection, where it is the part.

    Raises PlanError.
    """
    members = job.form.stages[stage].shards
    key, value = f"{split.path}.modules", ", ".join(split.modules)
    body = job.form.stages[stage].body
    if body is not None and split.modules == body.modules == ("*",) and head is None:
        named = named - {head.weight for head in job.findings.heads}
    named = frozenset(named)
    key_of_part = (part.operations, part.gives, named, split)
    # A mean over targets that cannot be counted beforehand needs one loss over all samples.
    alone = len(job.form.stages[stage].splits) == 1
    together = job.findings.once("learned means", partial(learned_means, job.profile))
    together = together if alone else ()
    typed = job.findings.sharded(
        ("dense", key_of_part), members, lambda: sharded(job, part, named, split, members)
    )
    typed = replace(typed, patterns={x: how for x, how in typed.patterns.items() if x in named})
    if not typed.weights:
        rule = f"finds nothing to cut over {members} devices in {module_span(part.modules)}"
        remedy = "use fewer devices, other modules, or patterns for their weights"
        raise NothingToCutError([Fault(key, value, rule, remedy)])
    try:
        return job.findings.once(
            ("dense parts", key_of_part, typed.groups),
            lambda: dense_parts(
                job.graph, part.operations, part.gives, job.findings.sample_states, typed, together
            ),
        )
    except SplitRefused as refusal:
        rule = f"cannot be split beside copies of the rest: {refusal}"
        remedy = "use a split of the whole stage"
        if head is not None:
            module, remedy = head.module or "the output", _instead_of_head(job)
            rule = f"is {module}, which cannot be split from the rest: {refusal}"
        raise PlanError([Fault(key, value, rule, remedy)]) from None


def _experts(
    job: PlanningContext,
    stage: int,
    part: Slice,
    shared: Mapping[str, tuple[int, ...]],
    split: Split,
    named: frozenset[str],
) -> SplitParts | None:
    """Return the experts among the weights `named`, spread over a stage's devices. Return None
    where there are no experts and the split may mean something else. Raises PlanError."""
    if split.dim not in ("auto", "experts") or "head" in split.modules:
        return None
    form = job.form.stages[stage]
    key, value = f"{split.path}.modules", ", ".join(split.modules)
    axis = "experts" if job.chunk_count == 1 else f"stage_{stage}.experts"
    try:
        read = job.profile.weights_read(part.operations).items()
        among = {name: path for name, path in read if path in named}
        experts = _routed(job, part, among, form.shards, axis)
    except SplitRefused as refusal:
        rule = f"are experts, which cannot be split beside copies of the rest: {refusal}"
        raise PlanError([Fault(key, value, rule, "use a split of the whole stage")]) from None
    if experts is None and split.dim == "experts":
        rule = f"finds no stacks of at least {form.shards} experts in {module_span(part.modules)}"
        remedy = "use fewer devices, or a replicate around the list"
        if job.findings.experts is None:
            rule = f"finds no experts of a mixture in {job.profile.name}"
            remedy = "use strategy=dp, or a model that has one, as moe_gpt"
        elif any(path in shared for path in job.findings.experts.sharded.weights):
            rule = f"finds experts in {module_span(part.modules)} that another stage holds as well"
            remedy = "use one stage, or model.share_layers=false"
        raise PlanError([Fault(key, value, rule, remedy)])
    return experts


def _routed(
    job: PlanningContext, part: Slice, named: Mapping[str, str], members: int, axis: str
) -> SplitParts | None:
    """Return the experts of `part` among the parameters `named`, spread over `members`; None where
    there are none. One cached result serves every group size at which each member gets an expert.
    Raises SplitRefused."""
    everywhere = job.findings.experts
    if everywhere is not None and members <= min(everywhere.sharded.axes.values()):
        members = 2
    key = ("routed", part.operations, part.gives, tuple(named), members, axis)
    return job.findings.once(
        key, lambda: route_experts(job.graph, part.operations, part.gives, named, members, axis)
    )


def _not_by_sample(job: PlanningContext, names: Sequence[str]) -> str:
    """Return the first of the values `names` whose first dimension is not the batch, with equally
    many adjacent rows for each sample; "" where all qualify. The loss is allowed, since no other
    stage takes it."""
    states, loss = job.findings.sample_states, job.graph.operations[-1].inputs[0]

    def is_by_sample(name: str) -> bool:
        shape = job.graph[name].shape
        of_samples = states[name] == PerSample(0) and shape is not None and not shape[0].fixed
        return name == loss or of_samples or (shape or ("",))[0] == Size(0, 1)

    return next((name for name in names if not is_by_sample(name)), "")


def _head_of(
    job: PlanningContext,
    part: Slice,
    shared: Mapping[str, tuple[int, ...]],
    split: Split,
    profile: ModelProfile,
) -> Head:
    """Return the head that a split names, in a slice with its `profile`.

    Raises PlanError where the slice has no head, where another stage holds the head's weight as
    well, and where a value that enters the stage does not have the batch first.
    """
    gives_loss = job.graph.operations[-1].inputs[0] in part.operations
    all_heads = find_heads(profile) if gives_loss else ()
    heads = matching(all_heads, split.modules)
    key, value = f"{split.path}.modules", ", ".join(split.modules)
    faults, remedy = [], _instead_of_head(job)
    if name := _not_by_sample(job, part.takes):
        rule = f"shares the samples, and {name}, which enters its stage, has no batch first"
        faults.append(Fault(key, value, rule, remedy))
    if not heads:
        where = profile.name if job.chunk_count == 1 else module_span(part.modules)
        rule = f"finds no output projection in {where}"
        if "head" not in split.modules and split.modules != ("*",):
            rule, remedy = (
                f"names no weights of {where}",
                nearest_modules(part.weights, split.modules[0]),
            )
        faults.append(Fault(key, value, rule, remedy))
    elif heads[0].weight in shared:
        rule = f"is {heads[0].module or 'the output'}, whose weight another stage holds as well"
        faults.append(Fault(key, value, rule, "untie it, or split whole stages"))
    if faults:
        raise PlanError(faults)
    return heads[0]


def _instead_of_head(job: PlanningContext) -> str:
    """Return the remedy for a head that cannot be split while the rest is replicated."""
    if job.chunk_count == 1:
        return "use strategy=dp or a zero strategy"
    return "use another stage for it, or a split of the whole stage"


def _profile_of(job: PlanningContext, part: Slice) -> ModelProfile:
    """Return the profile of one slice of the model, with the values that the slice takes as
    inputs."""
    inside = set(part.operations)
    taken = [
        replace(job.graph[name], target="input", args=(), kwargs=(), after=())
        for name in part.takes
    ]
    rest = [op for op in job.graph if op.name in inside or op.target == "output"]
    held = tuple(p for p in job.profile.parameters if p.path in part.parameters)
    return replace(job.profile, graph=OperationGraph((*taken, *rest)), parameters=held)


def module_span(modules: Sequence[str]) -> str:
    """Return the text `a ... b` that names a run of modules in messages."""
    named = [module or "(the model)" for module in modules]
    return named[0] if len(named) == 1 else f"{named[0]} ... {named[-1]}" if named else "nothing"
