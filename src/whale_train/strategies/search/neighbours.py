"""Change one thing of a candidate: the strategies next to it in the grammar.

The space of a search (`space.py`) is regular, so that its candidates can be estimated: shard groups
of one size, micro-batches by powers of two, at most two numbers of copies. Neighbours are not
bound by that. Owns which changes there are; `improve.py` tries them.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise, permutations, product

from whale_train.strategies.estimate.candidates import Candidate, Mesh, Part
from whale_train.strategies.grammar.nodes import PATTERNS, SCHEDULES
from whale_train.strategies.search.space import Devices, Space, divisors
from whale_train.strategies.stages.analysis import ModelAnalysis

_WEIGHTS = (
    6  # largest weights whose patterns are changed, and whose modules are split beside copies
)
_LISTED = 4  # most devices of which every list of stages is simulated, where little fits
_WIDEST = 8  # most devices of a stage for which every way to divide them is tried

Stages = tuple[Part, ...]


@dataclass(frozen=True)
class Choices:
    """What neighbours choose from.

    space: the space of the search.
    beside: modules, or globs of modules, that may be split beside copies.
    weights: globs of the weights whose patterns may be given by hand.
    sets: sets of devices that may be used.
    """

    space: Space
    beside: Sequence[str]
    weights: Sequence[str]
    sets: frozenset[Devices]


def choices_of(space: Space, findings: ModelAnalysis) -> Choices:
    """Return the choices for neighbours of candidates for a model. Weights of equal blocks have one
    glob, which stands for all of them."""
    sets = frozenset(space.sets())
    if not (space.exported and space.splits):
        return Choices(space, (), (), sets)
    elements: dict[str, int] = {}
    heads = {head.weight for head in findings.heads[:1]}
    for parameter in findings.profile.parameters:
        if len(parameter.shape) > 1:
            glob = _of_all_blocks(parameter.path)
            elements[glob] = elements.get(glob, 0) + parameter.elements
    large = sorted(elements, key=lambda glob: -elements[glob])
    weights = large[:_WEIGHTS]
    modules = [glob.rpartition(".")[0] for glob in weights if glob not in heads]
    parts = dict.fromkeys(module for module in modules if module)
    head = ["head"] if space.split_head else []
    return Choices(space, [*head, *parts][:_WEIGHTS], weights, sets)


def _of_all_blocks(path: str) -> str:
    """Return the path of a weight with `*` for the numbers of blocks."""
    return ".".join("*" if name.isdigit() else name for name in path.split("."))


def general(candidate: Candidate) -> Candidate:
    """Return the same strategy with one part for each stage, and a split head as a part beside the
    copies of its stage."""
    mesh = candidate.mesh
    if candidate.split_head:
        part = Part("", 1, 1, mesh.count, ("head",))
        return replace(candidate, split_head=False, mesh=replace(mesh, copies=1, parts=(part,)))
    stages = tuple(replace(part, stages=1) for part in mesh.parts for _ in range(part.stages))
    return replace(candidate, mesh=replace(mesh, parts=stages))


def every_pipeline(devices: Devices, choices: Choices) -> Iterator[Candidate]:
    """Yield candidates for every list of stages on all of `devices`, in every order of kinds, or
    nothing for more than `_LISTED` devices. Each replica takes a micro-batch for each stage, if it
    has the samples. Where the last stage is a shard group, one candidate splits its head alone."""
    space, count = choices.space, sum(number for _, number in devices)
    if count > _LISTED or not space.exported:
        return
    for order in [devices] if space.use_all else permutations(devices):
        for copies in divisors(count):
            for stages in _lists(count // copies, space):
                mesh = Mesh(order, copies, stages)
                schedule = "zero_bubble" if mesh.stages > 1 else "1f1b"
                pieces = max(mesh.widest, min(mesh.stages, space.global_batch // copies))
                plain = Candidate(mesh, pieces, schedule)
                yield from _possible(iter([plain]), space)
                if space.split_head and stages[-1].shards > 1:
                    parts = (*stages[:-1], replace(stages[-1], beside=("head",)))
                    beside = _on(plain, replace(mesh, parts=parts), space.global_batch)
                    yield from _possible(iter([beside]), space)


def every_part_beside(devices: Devices, choices: Choices) -> Iterator[Candidate]:
    """Yield replicas of all of `devices` beside each split part, and beside all of them, with every
    ZeRO stage and offload; nothing for more than `_LISTED` devices."""
    space, count = choices.space, sum(number for _, number in devices)
    dense = tuple(sorted(module for module in choices.beside if module != "head"))
    parts = dict.fromkeys((*((module,) for module in choices.beside), dense))
    if count > _LISTED or not space.exported:
        return
    for shards, beside in product(divisors(count)[1:], (modules for modules in parts if modules)):
        mesh = Mesh(devices, count // shards, (Part("", 1, 1, shards, beside),))
        of_part = (Candidate(mesh, zero=z, offload=o) for z, o in space.keepings(True, 3))
        yield from _possible(of_part, space)


def _lists(width: int, space: Space) -> Iterator[Stages]:
    """Yield the lists of stages on `width` devices."""
    if not width:
        yield ()
    for first in range(1, width + 1):
        for part, rest in product(_divided("", first, space), _lists(width - first, space)):
            yield (part, *rest)


def other_numbers(candidate: Candidate, choices: Choices) -> Iterator[Candidate]:
    """Yield the candidates with another number of micro-batches, schedule or ZeRO stage, or
    without offload, out of those in `general` form."""
    yield from _possible(_numbers(candidate, choices.space), choices.space)


def other_stages(candidate: Candidate, choices: Choices) -> Iterator[Candidate]:
    """Yield the candidates with other replicas, stages, splits, one device more or less, or another
    order of devices, out of those in `general` form. Experts that are spread stay as they are. The
    resolver refuses some."""
    space, mesh = choices.space, candidate.mesh
    if not space.exported or candidate.experts:
        return
    meshes = (replace(mesh, copies=copies, parts=stages) for copies, stages in _stages(mesh, space))
    resized = _with_other_devices(mesh, choices.sets)
    changed = (_on(candidate, x, space.global_batch) for x in chain(meshes, resized))
    ordered = (
        replace(candidate, mesh=replace(mesh, devices=order))
        for order in (() if space.use_all else islice(permutations(mesh.devices), 1, 4))
    )
    yield from _possible(chain(changed, _splits(candidate, choices), ordered), space)


def other_patterns(candidate: Candidate, choices: Choices) -> Iterator[Candidate]:
    """Yield the candidates whose splits have another pattern by hand for one weight, or none."""
    if all(part.shards == 1 or part.beside for part in candidate.mesh.parts):
        return
    for weight in choices.weights:
        others = tuple(pair for pair in candidate.patterns if pair[0] != weight)
        if others != candidate.patterns:
            yield replace(candidate, patterns=others)
        for pattern in PATTERNS:
            if (weight, pattern) not in candidate.patterns:
                yield replace(candidate, patterns=tuple(sorted((*others, (weight, pattern)))))


def _possible(candidates: Iterator[Candidate], space: Space) -> Iterator[Candidate]:
    """Yield the candidates that the batch, the model and the optimizer allow, each once."""
    for other in dict.fromkeys(candidates):
        mesh = other.mesh
        few = mesh.copies * mesh.widest <= space.global_batch and mesh.stages <= space.places
        if few and space.keeps(other):
            yield other


def _on(candidate: Candidate, mesh: Mesh, global_batch: int) -> Candidate:
    """Return a candidate with the stages of `mesh`, and without what these have no use for."""
    several = mesh.stages > 1 or mesh.widest > 1
    is_split = any(part.shards > 1 and not part.beside for part in mesh.parts)
    members = max(part.shards if part.beside else 1 for part in mesh.parts)
    most = global_batch // (mesh.copies * members)  # every member takes a sample of each
    return replace(
        candidate,
        mesh=mesh,
        micro_batches=max(min(candidate.micro_batches, most), mesh.widest if several else 0),
        schedule=candidate.schedule if mesh.stages > 1 else "1f1b",
        zero=min(candidate.zero, 1) if several else candidate.zero,
        offload="optimizer" if several and candidate.offload == "all" else candidate.offload,
        dim=candidate.dim if is_split else "auto",
        patterns=candidate.patterns if is_split else (),
        recompute=candidate.recompute and not several,
    )


def _numbers(candidate: Candidate, space: Space) -> Iterator[Candidate]:
    """Yield other numbers of micro-batches, schedules and ZeRO stages, and no offload."""
    mesh, pieces = candidate.mesh, candidate.micro_batches
    fewest = mesh.widest if mesh.stages > 1 or mesh.widest > 1 else 0
    most = space.global_batch // mesh.copies if space.exported else 0
    most = min(most, 1) if space.sole_micro_batch or not space.shared else most
    for number in (pieces - 1, pieces + 1, pieces - 2, pieces + 2, pieces // 2, 2 * pieces, most):
        if fewest <= number <= most and (number != 1 or fewest):
            yield replace(candidate, micro_batches=number)
    for schedule in SCHEDULES if mesh.stages > 1 else ():
        yield replace(candidate, schedule=schedule)
    holders = [part.copies * (part.shards if part.beside else 1) for part in mesh.parts]
    several = mesh.copies * min(holders) > 1
    for zero, offload in space.keepings(several, 1 if pieces else 3):
        if offload in ("none", candidate.offload):
            yield replace(candidate, zero=zero, offload=offload)


def _stages(mesh: Mesh, space: Space) -> Iterator[tuple[int, Stages]]:
    """Yield other numbers of replicas, and stages, that use the same devices."""
    stages = mesh.parts
    for number, stage in enumerate(stages):
        before, after = stages[:number], stages[number + 1 :]
        for other in _divided(stage.kind, stage.copies * stage.shards, space):
            yield mesh.copies, (*before, other, *after)
        for first in range(1, stage.width):
            for pair in _two(stage.kind, first, stage.kind, stage.width - first, space):
                yield mesh.copies, (*before, *pair, *after)
                if mesh.by_kind:  # a stage of this kind anywhere
                    rest = (*before, pair[1], *after)
                    for place in range(len(rest) + 1):
                        yield mesh.copies, (*rest[:place], pair[0], *rest[place:])
    for number, (one, other) in enumerate(pairwise(stages)):
        before, after = stages[:number], stages[number + 2 :]
        if one.kind == other.kind:
            for merged in _divided(one.kind, one.width + other.width, space):
                yield mesh.copies, (*before, merged, *after)
        else:
            yield mesh.copies, (*before, other, one, *after)
    for giver, taker in product(range(len(stages)), repeat=2):
        one, other = stages[giver], stages[taker]
        if giver != taker and one.width > 1 and one.kind == other.kind:
            for pair in _two(one.kind, one.width - 1, other.kind, other.width + 1, space):
                changed = {giver: pair[0], taker: pair[1]}
                yield mesh.copies, tuple(changed.get(i, s) for i, s in enumerate(stages))
    yield from _copies(mesh)
    if mesh.by_kind:
        yield mesh.copies, tuple(replace(stage, kind="") for stage in stages)
    elif mesh.copies == 1 and len(mesh.devices) > 1:
        yield from ((1, named) for named in _named(mesh))


def _with_other_devices(mesh: Mesh, sets: Set[Devices]) -> Iterator[Mesh]:
    """Yield the meshes with one device of a kind more or less, out of the `sets` of at most
    `_WIDEST` devices: one replica or one copy of a stage more or less, a stage more, or less."""
    for step in (1, -1):
        for kind, _ in mesh.devices:
            devices = tuple((k, n + step * (k == kind)) for k, n in mesh.devices)
            if mesh.count + step > _WIDEST or tuple(sorted(devices)) not in sets:
                continue
            other = replace(mesh, devices=devices)
            if len(mesh.parts) == 1 and mesh.parts[0].width == 1:
                yield replace(other, copies=mesh.copies + step)
            elif mesh.copies == 1:
                yield from (replace(other, parts=parts) for parts in _resized(mesh, kind, step))


def _resized(mesh: Mesh, kind: str, step: int) -> Iterator[Stages]:
    """Yield the stages of a mesh with one device of a kind more (`step` 1) or less (-1)."""
    stages = mesh.parts
    for number, stage in enumerate(stages):
        before, after = stages[:number], stages[number + 1 :]
        if stage.kind not in ("", kind):
            continue
        if step > 0:
            yield (*before, Part(stage.kind, 1, 1, 1), stage, *after)
        elif stage.width == 1 and len(stages) > 1:
            yield (*before, *after)
        if stage.shards == 1 and stage.copies + step > 0:
            yield (*before, replace(stage, copies=stage.copies + step), *after)


def _copies(mesh: Mesh) -> Iterator[tuple[int, Stages]]:
    """Yield the mesh with fewer replicas of stages of more devices, and the other way round."""
    for factor in divisors(mesh.copies)[1:]:
        yield mesh.copies // factor, tuple(replace(s, copies=s.copies * factor) for s in mesh.parts)
        wider = (replace(s, shards=s.shards * factor, beside=s.beside) for s in mesh.parts)
        yield mesh.copies // factor, tuple(wider)
        if len(mesh.parts) == 1:
            yield mesh.copies // factor, mesh.parts * factor
    for factor in range(2, min(stage.width for stage in mesh.parts) + 1):
        if not any(stage.copies % factor for stage in mesh.parts):
            fewer = (replace(stage, copies=stage.copies // factor) for stage in mesh.parts)
            yield mesh.copies * factor, tuple(fewer)


def _named(mesh: Mesh) -> Iterator[Stages]:
    """Yield one stage on each kind of device, with copies, and the stages of `mesh` with the kinds
    of their devices, if each has one kind."""
    yield tuple(Part(kind, 1, count, 1) for kind, count in mesh.devices)
    devices = iter([kind for kind, count in mesh.devices for _ in range(count)])
    kinds = [set(islice(devices, stage.width)) for stage in mesh.parts]
    if all(len(held) == 1 for held in kinds):
        yield tuple(replace(s, kind=k) for s, (k,) in zip(mesh.parts, kinds, strict=True))


def _two(
    kind: str, first: int, other_kind: str, second: int, space: Space
) -> Iterator[tuple[Part, Part]]:
    """Yield the ways in which two stages may divide their `first` and `second` devices."""
    yield from product(_divided(kind, first, space), _divided(other_kind, second, space))


def _divided(kind: str, width: int, space: Space) -> Sequence[Part]:
    """Return the stages on `width` devices of a kind: copies of shard groups. Of more than
    `_WIDEST` devices, only copies of one device and one shard group."""
    numbers = divisors(width) if width <= _WIDEST else [1, width]
    return [
        Part(kind, 1, width // shards, shards) for shards in numbers if space.splits or shards == 1
    ]


def _splits(candidate: Candidate, choices: Choices) -> Iterator[Candidate]:
    """Yield other splits of the stages: by sequence, and of other parts beside copies."""
    mesh, stages = candidate.mesh, candidate.mesh.parts
    split = [number for number, stage in enumerate(stages) if stage.shards > 1]
    if any(not stages[number].beside for number in split):
        yield replace(candidate, dim="auto" if candidate.dim == "sequence" else "sequence")
    for number, module in product(split, choices.beside):
        beside = set(stages[number].beside) ^ {module}
        changed = replace(stages[number], beside=tuple(sorted(beside)))
        parts = (*stages[:number], changed, *stages[number + 1 :])
        yield _on(candidate, replace(mesh, parts=parts), choices.space.global_batch)
