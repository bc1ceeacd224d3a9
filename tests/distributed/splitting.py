"""A model split over the ranks of a group, against the same model whole on each of them.

Exported as the product does, patterns chosen, the graph written for this rank from the plan's
JSON, one forward and backward: the loss, and every parameter's gradient on this rank's shard, next
to what autograd gives on the whole model.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch import distributed as dist

from whale_train.models.export.export import export, model_path
from whale_train.models.export.to_operation_graph import operation_graph
from whale_train.models.loss_module import LossModule
from whale_train.models.options import ModelOptions
from whale_train.runtime.comms.layout_collectives import shard_of
from whale_train.runtime.graph.nested_graphs import is_tensor
from whale_train.runtime.graph.segment import Counts, SegmentModule
from whale_train.runtime.graph.shard_graph import write_segment_graph
from whale_train.runtime.graph.shard_place import ShardContext
from whale_train.runtime.kernels.weight_gradients import WeightGradients
from whale_train.strategies.layouts.propagation import R
from whale_train.strategies.layouts.segment import Segment
from whale_train.strategies.layouts.shape_check import shape_check
from whale_train.strategies.resolver.planned_segment import planned_segment, planned_shard
from whale_train.strategies.schedule.apportion import optimal_shares, tile
from whale_train.strategies.tensor_parallel.choose import Sharded, choose_patterns

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Split:
    """How to split: members' speeds, patterns by hand, and which dimensions."""

    speeds: tuple[float, ...]
    by_hand: tuple[tuple[str, str], ...] = ()
    dim: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """What one rank saw: the loss and the whole model's, every gradient's largest error relative
    to the largest gradient of its parameter, the patterns, the collectives (each once), what was
    gathered for want of a rule, and the part of all elements this rank holds."""

    loss: float
    expected: float
    errors: dict[str, float]
    patterns: dict[str, str]
    casts: dict[str, int]
    gathered: tuple[str, ...]
    held: float
    random: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Written:
    """One rank's segment, the whole module it came from, and how it was split."""

    segment: SegmentModule
    module: LossModule
    sharded: Sharded
    axes: dict[str, tuple[tuple[int, int], ...]]
    loss: str
    parameters: dict[str, nn.Parameter]

    def of(self, path: str, whole: Tensor, index: int) -> Tensor:
        """My part of a parameter, or of anything shaped like it."""
        layout = self.sharded.weights.get(path)
        if layout is None:
            return whole.detach()
        return shard_of(whole, planned_shard(layout), self.axes[layout.axis], index)


def write(
    build: Callable[[], nn.Module],
    batch: Batch,
    split: Split,
    *,
    on_meta: bool = False,
    dtype: torch.dtype = torch.float32,
    counts: Counts | None = None,
    graph: fx.GraphModule | None = None,
    **place: Any,
) -> Written:
    """The part of `build()`'s model that this rank of the default group holds; `place` are more
    fields of its Place. `graph` is what `exported` gives, where that is known."""
    torch.manual_seed(0)
    module = _wrapped(build().to(dtype))
    # It is written to, and may be another case's as well.
    graph = copy.deepcopy(graph) if graph is not None else _exported(build, module, batch, on_meta)
    canonical = _canonical(module)
    operations = operation_graph(graph, {}, {}, {})
    region = tuple(op.name for op in operations if op.target != "output")
    loss = operations.operations[-1].inputs[0]
    parameters = {op.name: canonical[op.path] for op in operations if op.target == "parameter"}
    by_path = {model_path(name): p for name, p in module.named_parameters(remove_duplicate=False)}
    sharded = choose_patterns(
        operations,
        region,
        parameters=parameters,
        held={path: by_path[path].numel() for path in parameters.values()},
        group_size=len(split.speeds),
        given={},
        wanted={loss: R},
        by_hand=split.by_hand,
        dim=split.dim,
    )
    axes = {}
    for axis, units in sharded.axes.items():
        shares = optimal_shares(units, split.speeds, [units] * len(split.speeds), 1)
        assert shares is not None
        axes[axis] = tile(units, shares)
    assert shape_check(operations, sharded.assignment, axes) == ()
    found = Written(_held(), module, sharded, axes, loss, by_path)  # of whose parts it is made
    index = dist.get_rank()
    tensors = _tensors(graph, module, canonical, found, index)
    segment = SegmentModule((), (loss,), tensors)
    here = ShardContext(
        **{
            "device": torch.device("cpu"),
            "group": dist.group.WORLD,
            "index": index,
            "axes": axes,
            "batch_norm_group": None,
            **place,
        }
    )
    part = Segment(0, region, (), (loss,), sharded.assignment)
    rewrites = part.rewrites(operations, on_cpu=True, defers=False, own_gradients=False)
    written = planned_segment(operations, part, rewrites)
    write_segment_graph(segment, written, graph, canonical, here, counts, WeightGradients())
    segment.train(counts is None)
    return Written(segment, module, sharded, axes, loss, by_path)


def compare(
    build: Callable[[], nn.Module],
    batch: Batch,
    split: Split,
    *,
    on_meta: bool = False,
    dtype: torch.dtype = torch.float32,
    graph: fx.GraphModule | None = None,
    **place: Any,
) -> Outcome:
    """One forward and backward, split and whole; more arguments as in `write`."""
    cast = _cast(batch, dtype)
    written = write(build, cast, split, on_meta=on_meta, dtype=dtype, graph=graph, **place)
    (loss,) = written.segment(*(cast[name] for name in written.segment.inputs))
    expected = written.module(**cast)
    loss.backward()
    expected.backward()
    sharded, index = written.sharded, dist.get_rank()
    errors = {}
    held = 0
    for path, attribute in written.segment.tensor_names.items():
        mine = getattr(written.segment, attribute)
        if not isinstance(mine, nn.Parameter):
            continue
        held += mine.numel()
        whole = written.parameters[path].grad
        if whole is None:
            assert mine.grad is None or not mine.grad.any(), path
            continue
        assert mine.grad is not None, path
        largest = float(whole.abs().max())
        difference = mine.grad - written.of(path, whole, index)
        # What is zero but for rounding has no digits to compare.
        errors[path] = float(difference.abs().max()) / largest if largest > 1e-7 else 0.0
    casts = {(c.kind, c.value, c.target) for c in sharded.assignment.casts}
    elements = sum(p.numel() for p in {id(p): p for p in written.parameters.values()}.values())
    return Outcome(
        float(loss.detach()),
        float(expected.detach()),
        errors,
        sharded.patterns,
        dict(Counter(kind for kind, _, _ in casts)),
        sharded.assignment.gathered,
        held / elements,
        sharded.assignment.random,
    )


def assert_equal(outcomes: Sequence[Outcome], tolerance: float) -> None:
    """All ranks had the whole model's loss and gradients."""
    for rank, outcome in enumerate(outcomes):
        assert abs(outcome.loss - outcome.expected) <= tolerance * abs(outcome.expected), outcome
        assert outcome.errors
        worst = max(outcome.errors, key=lambda path: outcome.errors[path])
        assert outcome.errors[worst] <= tolerance, (rank, worst, outcome.errors[worst])


def _held() -> SegmentModule:
    return SegmentModule((), (), {})


def _wrapped(model: nn.Module) -> LossModule:
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    module = LossModule(model, ModelOptions(target="a.Model", loss="model"))
    module.train()
    return module


def exported(
    build: Callable[[], nn.Module],
    batch: Batch,
    *,
    on_meta: bool = False,
    dtype: torch.dtype = torch.float32,
) -> fx.GraphModule:
    """Return the graph of `build()`'s model, which does not depend on how it is split."""
    torch.manual_seed(0)
    return _exported(build, _wrapped(build().to(dtype)), _cast(batch, dtype), on_meta)


def _cast(batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    return {k: x.to(dtype) if x.is_floating_point() else x for k, x in batch.items()}


def _exported(
    build: Callable[[], nn.Module], module: LossModule, batch: Batch, on_meta: bool
) -> fx.GraphModule:
    if on_meta:
        with torch.device("meta"):
            module = _wrapped(build())
        batch = {k: torch.empty(x.shape, dtype=x.dtype, device="meta") for k, x in batch.items()}
    else:
        module = copy.deepcopy(module)
    graph, error = export(module, dict(batch))
    assert graph is not None, error
    return graph


def _canonical(module: nn.Module) -> dict[str, str]:
    names: dict[int, str] = {}
    return {
        model_path(name): names.setdefault(id(p), model_path(name))
        for name, p in module.named_parameters(remove_duplicate=False)
    }


def _tensors(
    graph: fx.GraphModule,
    module: nn.Module,
    canonical: dict[str, str],
    written: Written,
    index: int,
) -> dict[str, Tensor]:
    buffers = {model_path(k): b for k, b in module.named_buffers(remove_duplicate=False)}
    tensors: dict[str, Tensor] = {}
    for node in graph.graph.nodes:
        if node.op != "get_attr" or not is_tensor(graph, node):
            continue
        path = model_path(str(node.target))
        path = canonical.get(path, path)
        parameter = written.parameters.get(path)
        whole = parameter if parameter is not None else buffers.get(path)
        if whole is None:
            whole = graph
            for part in str(node.target).split("."):
                whole = getattr(whole, part)
        assert isinstance(whole, Tensor)
        if whole.device.type == "meta":  # a constant of the forward; only an empty one has a value
            assert whole.numel() == 0, path
            whole = torch.empty_like(whole, device="cpu")
        mine = written.of(path, whole, index).clone()
        trained = parameter is not None and parameter.requires_grad
        tensors[path] = nn.Parameter(mine) if trained else mine
    return tensors
