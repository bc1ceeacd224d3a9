"""Choose the modules of each stage that compute their forward again in the backward.

A strategy names them, asks for all repeated blocks, or leaves the choice open. Of an open choice,
those blocks come first that free the most bytes for a second of their forward. Equal blocks come in
the model's order: a block near the loss is needed again at once, while all others still keep their
values (as in Megatron-LM's `recompute_method=block`, which takes the first layers).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Literal

from whale_train.errors import Fault, PlanError, nearest
from whale_train.strategies.grammar.recompute import Recompute
from whale_train.strategies.graph.block_paths import blocks_of, unit_of
from whale_train.strategies.graph.operation_graph import (
    GIVEN,
    HELD,
    OWN,
)
from whale_train.strategies.graph.saved_tensors import entering_values, kept
from whale_train.strategies.hardware.cluster import Device
from whale_train.strategies.stages.placement import PlanningContext, StageChunk

Units = Mapping[int, frozenset[str]]  # paths of the modules that are recomputed, by stage

_ROUNDED = 3  # digits to which two blocks free the same bytes for a second


def units_asked_for(
    job: PlanningContext, chunks: Sequence[StageChunk]
) -> dict[int, frozenset[str]]:
    """Return the modules that the request says to recompute, by stage: all repeated blocks, the
    modules that it names, or the blocks that keep at most a fraction of the bytes. Stages without
    any are left out.

    Raises PlanError for names without modules, and where the model has no repeated blocks.
    """
    units: dict[int, frozenset[str]] = {}
    faults: list[Fault] = []
    stages_of: dict[Recompute, list[StageChunk]] = {}
    for stage, form in enumerate(job.form.stages):
        asked, here = form.recompute, [chunk for chunk in chunks if chunk.stage == stage]
        if asked.mode == "none":
            continue
        stages_of.setdefault(asked, []).extend(here)
        if asked.is_open and job.profile.graph is None:
            continue
        match asked.mode:
            case "named":
                units[stage] = frozenset(_named(job, here, asked.modules))
            case "full":
                units[stage] = frozenset(all_blocks(job, here))
            case "memory":
                units[stage] = frozenset(_within(job, here, asked.share))
    for asked, of_stages in stages_of.items():
        faults += _faults(job, asked, of_stages)
    if faults:
        raise PlanError(faults)
    return {stage: here for stage, here in units.items() if here}


def all_blocks(job: PlanningContext, chunks: Iterable[StageChunk]) -> tuple[str, ...]:
    """Return the paths of the repeated blocks in `chunks`, in the order they run."""
    return tuple(dict.fromkeys(block for chunk in chunks for block in _blocks(job, chunk)))


def in_order_of_worth(job: PlanningContext, chunks: Sequence[StageChunk]) -> tuple[str, ...]:
    """Return the blocks of a stage's `chunks`, first those that free the most bytes for each second
    that their forward takes."""
    worth = _worth(job, chunks)
    rounded = {block: float(f"{freed / seconds:.{_ROUNDED}g}") if seconds else 0.0
               for block, (freed, seconds) in worth.items()}  # fmt: skip
    return tuple(sorted(worth, key=lambda block: -rounded[block]))  # a stable sort


def second_forward_s(job: PlanningContext, chunks: Sequence[StageChunk]) -> float:
    """Return the seconds of a sample's forward in all blocks of `chunks`."""
    return sum(seconds for _, seconds in _worth(job, chunks).values())


def key_of_units(job: PlanningContext, chunk: StageChunk, units: frozenset[str]) -> object:
    """Return a key of what a chunk recomputes. Chunks that are equal but for names and recompute
    all or none of their blocks have equal keys."""
    of_model = blocks_of_model(job)
    if units <= of_model:
        blocks = frozenset(_blocks(job, chunk))
        if units >= blocks:
            return "full" if blocks else "none"
        if units.isdisjoint(blocks):
            return "none"
    return units


def share_of_units(job: PlanningContext, chunk: StageChunk, units: frozenset[str]) -> float:
    """Return the part of a chunk's repeated blocks that is recomputed, by number; 0 without any."""
    blocks = _blocks(job, chunk)
    return len(units.intersection(blocks)) / len(blocks) if blocks else 0.0


def blocks_of_model(job: PlanningContext) -> frozenset[str]:
    """Return the paths of all repeated blocks of the model."""
    if job.profile.graph is None:
        return frozenset(_blocks_of_parameters(job))
    return job.findings.once("blocks", lambda: frozenset(blocks_of(job.graph)))


def operations_again(
    job: PlanningContext, operations: Iterable[str], units: frozenset[str]
) -> tuple[str, ...]:
    """Return the names among `operations` that run again in the backward."""
    return tuple(x for x in operations if unit_of(job.graph[x].module, units))


def units_of(job: PlanningContext, chunk: StageChunk, units: Units) -> tuple[str, ...]:
    """Return the modules of a chunk that are recomputed, in the order they run."""
    here = units.get(chunk.stage, frozenset())
    if job.profile.graph is None:
        return tuple(sorted(here))
    modules = (job.graph[name].module for name in chunk.slice.operations)
    return tuple(dict.fromkeys(unit for x in modules if (unit := unit_of(x, here))))


def recompute_of(
    job: PlanningContext, chunk: StageChunk, units: Units
) -> Literal["full", "some", "none"]:
    """Return the value of `recompute` for a chunk: all of its repeated blocks, other modules, or
    nothing."""
    here = units_of(job, chunk, units)
    if not here:
        return "none"
    return "full" if set(here) == set(_blocks(job, chunk)) else "some"


def described(job: PlanningContext, chunks: Sequence[StageChunk], units: frozenset[str]) -> str:
    """Return the recomputed part of a stage's chunks, as text: `none`, `full`, or a number of
    blocks."""
    blocks = all_blocks(job, chunks)
    if not units:
        return "none"
    if units.issuperset(blocks):
        return "full"
    return f"{len(units)} of {len(blocks)} blocks"


def _blocks(job: PlanningContext, chunk: StageChunk) -> tuple[str, ...]:
    """Return the paths of the repeated blocks in a chunk, in the order they run."""
    operations = chunk.slice.operations
    if job.profile.graph is None or not operations:
        return tuple(_blocks_of_parameters(job))
    of_model = blocks_of_model(job)

    def found() -> tuple[str, ...]:
        return tuple(dict.fromkeys(
            unit for x in operations if (unit := _innermost(job.graph[x].module, of_model))
        ))  # fmt: skip

    return job.findings.once((*_place(chunk), "blocks"), found)


def _place(chunk: StageChunk) -> tuple[str, str, int]:
    """Return a key of the operations of a chunk, which are consecutive."""
    operations = chunk.slice.operations
    return operations[0], operations[-1], len(operations)


def _innermost(module: str, units: frozenset[str]) -> str:
    """Return the innermost of `units` that the module at a path is part of; '' for none."""
    while module and module not in units:
        module = module.rpartition(".")[0]
    return module


def _blocks_of_parameters(job: PlanningContext) -> dict[str, None]:
    """Return the repeated blocks of a model without a graph, by the paths of its parameters."""
    blocks = dict[str, None]()
    for parameter in (*job.profile.parameters, *job.profile.frozen):
        parts = parameter.path.split(".")[:-1]
        numbered = [i for i, x in enumerate(parts[:-1]) if x.isdecimal()]
        if numbered:
            blocks.setdefault(".".join(parts[: numbered[-1] + 1]))
    return blocks


def _worth(job: PlanningContext, chunks: Sequence[StageChunk]) -> dict[str, tuple[float, float]]:
    """Return the bytes of a sample that recomputing a block frees, and the seconds of the block's
    forward, by the block's path, in the order they run."""
    device = job.cluster.devices[job.replicas[chunks[0].stage][0][0]]
    worth: dict[str, tuple[float, float]] = {}
    for chunk in chunks:
        here = job.findings.once(
            (*_place(chunk), "worth", id(device)), partial(_worth_in, job, chunk, device)
        )
        for block, (freed, seconds) in here.items():
            before = worth.get(block, (0.0, 0.0))
            worth[block] = (before[0] + freed, before[1] + seconds)
    return worth


def _worth_in(
    job: PlanningContext, chunk: StageChunk, device: Device
) -> dict[str, tuple[float, float]]:
    """Return the bytes and seconds of `_worth` for the operations of one chunk."""
    view, graph = job.findings.view, job.graph
    blocks = frozenset(_blocks(job, chunk))
    names: dict[str, list[str]] = {}
    for name in chunk.slice.operations:
        if graph[name].target not in GIVEN and (block := unit_of(graph[name].module, blocks)):
            names.setdefault(block, []).append(name)
    worth: dict[str, tuple[float, float]] = {}
    for block, inside in names.items():
        own = kept(view, inside)
        entering = entering_values(graph, inside)
        freed = sum(num_bytes for (x, _), num_bytes in own.items() if x not in entering)
        freed -= sum(view.num_bytes(x) for x in entering if (x, OWN) not in own)
        times = job.findings.prices.times(("again", block, inside[0]), inside, device, 1)
        worth[block] = (freed, times.forward)
    return worth


def _within(job: PlanningContext, chunks: Sequence[StageChunk], share: float) -> Sequence[str]:
    """Return the fewest blocks, in the order of their worth, whose recomputation leaves at most the
    fraction `share` of the bytes that `chunks` keep without it; all where no number does."""
    if not chunks:
        return ()
    worth, order = _worth(job, chunks), in_order_of_worth(job, chunks)
    view = job.findings.view
    total = sum(x for chunk in chunks for x in kept(view, chunk.slice.operations).values())
    freed = (0.0, *accumulate(worth[block][0] for block in order))
    number = next((n for n, x in enumerate(freed) if total - x <= share * total), len(order))
    return order[:number]


def _modules(job: PlanningContext, chunks: Iterable[StageChunk]) -> dict[str, None]:
    """Return the paths of all modules that run operations of `chunks`, or hold such modules."""
    if job.profile.graph is None:
        paths = [x.path.rpartition(".")[0] for x in (*job.profile.parameters, *job.profile.frozen)]
    else:
        names = dict.fromkeys(x for chunk in chunks for x in chunk.slice.operations)
        paths = [job.graph[x].module for x in names if job.graph[x].target not in HELD]
    modules = dict[str, None]()
    for path in dict.fromkeys(paths):
        parts = path.split(".")
        for number in range(1, len(parts) + 1):
            modules.setdefault(".".join(parts[:number]))
    modules.pop("", None)
    return modules


def _named(job: PlanningContext, chunks: Sequence[StageChunk], globs: Sequence[str]) -> set[str]:
    """Return the modules in `chunks` whose paths match one of `globs`, the outermost ones alone. A
    list of blocks stands for its entries."""
    modules, blocks = _modules(job, chunks), blocks_of_model(job)
    matched = {x for x in modules if any(fnmatchcase(x, glob) for glob in globs)}
    units: set[str] = set()
    for path in matched:
        if unit_of(path.rpartition(".")[0], matched):
            continue
        entries = {x for x in blocks if x in modules and x.rpartition(".")[0] == path}
        units |= entries or {path}
    return units


def _faults(
    job: PlanningContext, asked: Recompute, chunks: Sequence[StageChunk]
) -> Iterator[Fault]:
    """Yield the faults of a request in the stages that follow it, which run `chunks`."""
    if job.profile.graph is None and asked.is_open:
        rule = "needs the model's graph, to know what each block keeps, and it has none"
        yield Fault(asked.path, str(asked), rule, "use full, or a list of modules")
        return
    modules = _modules(job, chunks)
    for glob in asked.modules:
        if not any(fnmatchcase(module, glob) for module in modules):
            rule = "is the path of no module that runs here"
            yield Fault(asked.path, glob, rule, nearest(glob, modules))
    if asked.mode in ("full", "memory") and not blocks_of_model(job):
        rule = f"finds no list of blocks in {job.profile.name}"
        remedy = f"name the modules, as recompute: [{next(iter(modules), 'encoder')}]"
        yield Fault(asked.path, str(asked), rule, remedy)
