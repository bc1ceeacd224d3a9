"""The weights that splits name by globs: which of them a model and its stages have, and how they
may be cut.

A glob that matches nothing is a fault, and so is a pattern that no weight gets: neither would have
an effect.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

from whale_train.errors import Fault, PlanError, closest, listed
from whale_train.strategies.grammar.nodes import Split
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.layouts.propagation import R
from whale_train.strategies.partition.pipeline_partition import Slice, is_inside
from whale_train.strategies.stages.placement import PlanningContext, StageChunk
from whale_train.strategies.tensor_parallel.choose import Sharded, choose_patterns
from whale_train.strategies.tensor_parallel.region import matches


def names_of(profile: ModelProfile, path: str) -> tuple[str, ...]:
    """Return all names of the weight at `path`: several where it is tied."""
    weight = profile.weight_by_path[path]
    return weight.path, *weight.aliases


def is_named(profile: ModelProfile, path: str, modules: Sequence[str]) -> bool:
    """Return True if the weight at `path` lies inside a module that one of `modules` (paths or
    globs) names."""
    inside = (name.rpartition(".")[0] for name in names_of(profile, path))
    return any(is_inside(module, glob) for module in inside for glob in modules)


def refuse_unknown_names(job: PlanningContext, faults: list[Fault]) -> None:
    """Add a fault for every glob that names no weight of the model, in a split or in the replicate
    beside it."""
    profile = job.profile
    paths = [p.path for p in (*profile.parameters, *profile.frozen)]
    stages = job.form.stages
    nodes = [node for stage in stages for node in (stage.body, *stage.splits) if node]
    for node in dict.fromkeys(nodes):
        unknown = [
            glob
            for glob in node.modules
            if glob not in ("*", "head") and not any(is_named(profile, p, [glob]) for p in paths)
        ]
        if unknown:
            rule = f"names no weights of {profile.name}"
            key, remedy = f"{node.path}.modules", nearest_modules(paths, unknown[0])
            faults.append(Fault(key, ", ".join(unknown), rule, remedy))
    for split in dict.fromkeys(split for stage in stages for split in stage.splits):
        for glob, pattern in split.patterns:
            if not any(matches(names_of(profile, path), glob) for path in paths):
                rule = f"names no weight of {profile.name}"
                key, remedy = f"{split.path}.patterns.{glob}", _nearest_weights(profile, glob)
                faults.append(Fault(key, pattern, rule, remedy))


def nearest_modules(weights: Sequence[str], mistyped: str) -> str:
    """Return a remedy for the name `mistyped`: modules that a split may name, out of those with
    `weights` (paths)."""
    modules = list(dict.fromkeys(path.rpartition(".")[0] for path in weights))
    near = closest(mistyped, [*modules, *(f"*.{x.rpartition('.')[2]}" for x in modules)])
    remedy = f"use head, or modules with weights, such as {listed(modules)}"
    return f"did you mean {near}? Else {remedy}" if near else remedy


def _nearest_weights(profile: ModelProfile, mistyped: str) -> str:
    """Return a remedy for the glob `mistyped`: weights and modules that a pattern may name."""
    names = list(profile.weight_by_path)
    of_any_block = dict.fromkeys(_of_any_block(name) for name in names)
    modules = {path.rpartition(".")[0] for path in (*names, *of_any_block)}
    near = closest(mistyped, [*names, *of_any_block, *modules])
    remedy = f"use weights or modules, such as {listed(of_any_block)}"
    return f"did you mean {near}? Else {remedy}" if near else remedy


def _of_any_block(name: str) -> str:
    """Return a glob for the last two parts of a weight's name, or the name itself if it has fewer
    than three parts."""
    parts = name.split(".")
    return name if len(parts) < 3 else f"*.{parts[-2]}.{parts[-1]}"


def refuse_idle_patterns(job: PlanningContext, chunks: Sequence[StageChunk]) -> None:
    """Raise PlanError for patterns that no weight of their stages gets, with the reason. Stages
    with equal patterns share one list, of which each uses the entries for its own weights."""
    held: dict[tuple[tuple[str, str], ...], list[tuple[Split, StageChunk]]] = {}
    for chunk in chunks:
        for split in job.form.stages[chunk.stage].splits:
            held.setdefault(split.patterns, []).append((split, chunk))
    faults = []
    for patterns, users in held.items():
        for number, (glob, pattern) in enumerate(patterns):
            if not any(_is_had(job, chunk, glob, pattern) for _, chunk in users):
                rule, remedy = _why_idle(job, users, patterns[:number], glob)
                faults.append(Fault(f"{users[0][0].path}.patterns.{glob}", pattern, rule, remedy))
    if faults:
        raise PlanError(faults)


def _matched(job: PlanningContext, chunk: StageChunk, glob: str) -> Iterator[str]:
    """Yield the paths of the weights of a chunk that a pattern's glob names."""
    return (p for p in chunk.slice.weights if matches(names_of(job.profile, p), glob))


def _is_had(job: PlanningContext, chunk: StageChunk, glob: str, pattern: str) -> bool:
    """Return True if some weight of a chunk that `glob` names is cut by the requested `pattern`.
    The columns of a product that a cross-entropy reads count as its vocabulary."""
    had: Mapping[str, str] = dict.fromkeys(chunk.shards, "vocabulary")
    if chunk.sharded is not None:
        had = chunk.sharded.patterns
    meant = ("column", "vocabulary") if pattern == "column" else (pattern,)
    return any(had.get(path, "replicate") in meant for path in _matched(job, chunk, glob))


def why_whole(job: PlanningContext, chunk: StageChunk, module: str) -> str:
    """Return why a chunk holds weights of `module` whole: because patterns or the splits' modules
    ask for it, or because no pattern fits."""
    splits = job.form.stages[chunk.stage].splits
    had = chunk.sharded.patterns if chunk.sharded else {}
    whole = [path for path, pattern in had.items() if pattern == "replicate"]
    weights = [path for path in whole if path.rpartition(".")[0] == module]
    globs = [glob for x in splits for glob, pattern in x.patterns if pattern == "replicate"]
    if all(any(matches(names_of(job.profile, path), glob) for glob in globs) for path in weights):
        return "patterns say replicate"
    modules = [glob for split in splits for glob in split.modules]
    if "head" in modules or any(is_named(job.profile, path, modules) for path in weights):
        return "no pattern fits it"
    return "no split names it"


def _why_idle(
    job: PlanningContext,
    users: Sequence[tuple[Split, StageChunk]],
    before: Sequence[tuple[str, str]],
    glob: str,
) -> tuple[str, str]:
    """Return the rule and the remedy for a `glob` whose pattern no weight gets.

    users: the splits that have the pattern, with their chunks.
    before: the (glob, pattern) pairs listed before it.
    """
    matched = [(split, path) for split, chunk in users for path in _matched(job, chunk, glob)]
    if not matched:
        return "names weights of other stages alone", "give it to a split of these, or leave it out"
    split, path = matched[0]
    names = names_of(job.profile, path)
    first = next((earlier for earlier, _ in before if matches(names, earlier)), None)
    if first is not None:
        rule = f"comes after {first}, which names {path} as well, and the first that matches counts"
        return rule, f"write it before {first}, or leave it out"
    modules = ", ".join(split.modules)
    of_head = {"*", "head"} & {*split.modules} and any(form.body for form in job.form.stages)
    named = path in (head.weight for head in job.findings.heads) if of_head else False
    if not of_head:
        named = "*" in split.modules or is_named(job.profile, path, split.modules)
    if not named:
        rule = f"names {path}, which modules={modules} leaves whole"
        return rule, "name it there, or leave it out"
    return f"cannot be had for {path}, which stays whole", "use replicate, or leave it out"


def sharded(
    job: PlanningContext,
    part: Slice,
    named: Collection[str],
    split: Split,
    members: int,
) -> Sharded:
    """Return the layouts of a stage's slice over a group of `members`. Values that enter and leave
    the slice are not sharded.

    job: the strategy on its devices.
    part: the slice.
    named: paths of the weights that may be cut; all others are replicated.
    split: dimension and patterns by which the weights are cut.
    members: size of the shard group.
    """
    replicated = [(path, "replicate") for path in part.weights if path not in named]
    return choose_patterns(
        job.graph,
        part.operations,
        parameters=job.profile.weights_read(part.operations),
        held=job.profile.weight_elements,
        group_size=members,
        given=dict.fromkeys(part.takes, R),
        wanted=dict.fromkeys(part.gives, R),
        by_hand=(*replicated, *split.patterns),
        aliases={path: job.profile.weight_by_path[path].aliases for path in part.weights},
        dim=split.dim,
        key=split.path,
    )
