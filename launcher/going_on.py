"""Whether a run can go on from a checkpoint: what the two have in common, and what they must.

Another plan, precision, learning rate, number of steps or global batch is all right: each is a
matter of the steps that follow. The model, what is trained of it and the data have to be the same,
or to differ in a way that is known to be right, of which the user is told.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whale_train.checkpoints.checkpoint_files import stored_tensors
from whale_train.checkpoints.checkpoint_state import CheckpointState
from whale_train.checkpoints.safetensors_files import (
    BrokenCheckpoint,
    Shape,
    StoredBlock,
    read_number,
    whole_shape,
)
from whale_train.config import OptimizerOptions, Request
from whale_train.data.fingerprint import Fingerprint
from whale_train.errors import ConfigError, Fault, listed
from whale_train.models.options import ModelOptions
from whale_train.strategies.plan.plan import Decision, Plan, TaskGraph
from whale_train.validation import as_yaml

KEY, DATA_KEY = "train.resume", "train.resume_data"
_ORDER = ("seed", "data.shuffle", "data.evaluation_fraction")
# Where rows are read, which says nothing of them.
_PLACES = ("data.path", "data.split", "data.columns", "data.max_bytes")
_FLOATS = ("F64", "F32", "F16", "BF16")


def refuse_other_run(saved: Request, state: CheckpointState, request: Request, named: str) -> None:
    """Raise ConfigError where the run of a checkpoint, which the user calls `named`, was asked for
    data in another order, or for an optimizer with another state."""
    faults = []
    if request.model.share_layers and not saved.model.share_layers:
        rule = f"is not so of {named}, whose layers have weights of their own"
        faults.append(Fault("model.share_layers", "true", rule, "use false"))
    kinds = [_kind(options) for options in (saved.optimizer, request.optimizer)]
    if kinds[0] != kinds[1]:
        rule = f"has no state in {named}, which was saved with {kinds[0]}"
        remedy = f"use optimizer={saved.optimizer.name}"
        faults.append(Fault("optimizer", kinds[1], rule, remedy))
    if request.train.resume_data == "same":
        before, now = _data_options(saved), _data_options(request)
        for key in _unlike_options(saved, state, request):
            rule = f"is not that of {named}, which has seen a part of other data"
            given, remedy = as_yaml(now.get(key)), f"use {key}={as_yaml(before[key])}"
            faults.append(Fault(key, given, rule, remedy))
    if faults:
        raise ConfigError(faults)


def _kind(options: OptimizerOptions) -> str:
    """Return what the optimizer's state is of: a run may go on with another of the kind."""
    if options.name == "sgd":
        return "sgd with momentum" if options.momentum else "sgd without momentum"
    return "adam, adamw or lamb"


# --- The data ------------------------------------------------------------------------------------


def _data_options(request: Request) -> dict[str, Any]:
    """Return what says which samples a run sees in which order, by key."""
    options = request.data.model_dump()
    return {"seed": request.seed, **{f"data.{key}": value for key, value in options.items()}}


def _unlike_options(saved: Request, state: CheckpointState, request: Request) -> list[str]:
    """Return the keys that make the order of two runs' samples, or the samples, different. Where
    these are compared themselves, the kind of data and its place say nothing of them."""
    before, now = _data_options(saved), _data_options(request)
    if state.data is None:
        keys: Iterable[str] = (key for key in before if key != "data.path")
    elif saved.data.kind != request.data.kind:
        keys = _ORDER
    else:
        keys = (key for key in before if key not in _PLACES)
    return [key for key in keys if now.get(key) != before[key]]


@dataclass(frozen=True)
class GoingOn:
    """How a run goes on: `data_anew` from the first sample of its data, and what the plan says of
    that and of the rest."""

    data_anew: bool
    decisions: tuple[Decision, ...]


def compared_data(
    path: Path,
    state: CheckpointState,
    saved: Request,
    request: Request,
    num_samples: int,
    here: Fingerprint | None,
) -> GoingOn:
    """Return whether the data begins anew, and what is said of it: `here` is its fingerprint, of
    `num_samples` samples. Raises ConfigError where it is not what the checkpoint's run had seen a
    part of, and has to be."""
    unlike = ""
    before = num_samples if state.num_samples is None else state.num_samples
    if before != num_samples:
        unlike = f"has seen a part of {before:,} samples, and the data has {num_samples:,}"
    elif state.data is not None and here is not None and (why := state.data.unlike(here)):
        unlike = f"has seen a part of other data ({why})"
    if request.train.resume_data == "any":
        if not unlike and state.data and not _unlike_options(saved, state, request):
            return GoingOn(False, ())
        why = unlike or "is not known to have seen the same data in the same order"
        said = Decision(DATA_KEY, "the data is begun with its first sample", "", f"{path} {why}")
        return GoingOn(True, (said,))
    if unlike:
        told = _moved(saved, request)
        remedy = "use the data as it was, or begin anew with the weights of mode=export, or begin "
        remedy += f"with this data by {DATA_KEY}=any{told}"
        raise ConfigError([Fault(KEY, str(path), unlike, remedy)])
    if state.data is None:
        why = f"{path} says how many samples it had, and nothing of what is in them"
        return GoingOn(False, (Decision(KEY, "the data is taken to be the same", "", why),))
    return GoingOn(False, ())


def _moved(saved: Request, request: Request) -> str:
    """Return which options said where the data is, as far as they have changed."""
    before, now = _data_options(saved), _data_options(request)
    keys = [key for key in ("data.kind", *_PLACES) if key in before and before[key] != now.get(key)]
    shown = ", ".join(f"{key}={as_yaml(before[key])}" for key in keys)
    return f"; it was that of {shown}" if shown else ""


# --- The model -----------------------------------------------------------------------------------


def compared_model(
    path: Path,
    options: ModelOptions,
    plan: Plan,
    optimizer: OptimizerOptions,
    parts: bool = False,
) -> tuple[Decision, ...]:
    """Return what the plan says of moments that begin at zero, and of those that nobody goes on
    with. With `parts`, layers have what the checkpoint has of the first of them.

    Raises ConfigError where the checkpoint lacks a tensor of the model, has one that the model
    lacks, or has one of another shape or kind of number, and where the plan's engines cannot begin
    with moments for some parameters alone.
    """
    from whale_train.models.export.export import model_on_meta  # and with it torch
    from whale_train.models.loss_module import LossModule
    from whale_train.models.weights.kept_tensors import kept_tensors, saved_names
    from whale_train.models.weights.shared_layers import shared_places

    try:
        saved, moments = (stored_tensors(path / folder) for folder in ("model", "optimizer"))
    except BrokenCheckpoint as error:
        raise ConfigError([broken(path, error)]) from None
    model = model_on_meta(options)
    places = shared_places(model) if parts else {}
    module = LossModule(model, options)
    names = saved_names(module, options)
    ours = {name: x for name, x in kept_tensors(module).items() if name in names}
    trained = [name for task_graph in plan.task_graphs for name in task_graph.trained]
    saved |= {name: saved[first] for name, first in places.items() if first in saved}
    faults = _unlike_tensors(path, saved, {name: _described(x) for name, x in ours.items()})
    updated = _by_parameter(moments)
    shapes = {name: tuple(ours[name].shape) for name in trained if name in ours}
    slots = _slots(optimizer)
    wrong = [
        name
        for name, shape in shapes.items()
        if 0 not in shape and not _is_whole(updated.get(places.get(name, name)), slots, shape)
    ]
    if wrong:
        rule = f"has not all moments of {listed(wrong)}, or some of another shape"
        faults.append(Fault(KEY, str(path), rule, "name another checkpoint"))
    new = [
        name
        for name, shape in shapes.items()
        if slots and 0 not in shape and places.get(name, name) not in updated
    ]
    if "step" in slots and 0 < len(new) < len(shapes):
        faults += _counted_together(path, new, plan)
    if faults:
        raise ConfigError(faults)
    said = []
    if "step" in slots and not new and (counts := _unlike_counts(path, moments, plan)):
        why = f"{path} has from {counts[0]:g} to {counts[1]:g} of its parameters"
        chosen = f"ZeRO goes on from {counts[1]:g} updates of all parameters"
        said.append(Decision(KEY, chosen, "", why))
    if new:
        why = f"{path} has none: they were not trained"
        said.append(Decision(KEY, f"moments begin at zero for {listed(new)}", "", why))
    held = {places.get(name, name) for name in shapes}
    left = [name for name in updated if name not in held]
    if left:
        why = f"{path} has them, and these are not trained"
        said.append(Decision(KEY, f"no use is made of the moments of {listed(left)}", "", why))
    return tuple(said)


def broken(path: Path, error: BrokenCheckpoint) -> Fault:
    """Return the fault of a checkpoint that cannot be read."""
    return Fault(KEY, str(path), f"is no whole checkpoint: {error}", "name another")


def _described(tensor: Any) -> tuple[Shape, str]:
    """Return the shape of a tensor, and its dtype as torch calls it."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _unlike_tensors(
    path: Path, saved: Mapping[str, Sequence[StoredBlock]], ours: Mapping[str, tuple[Shape, str]]
) -> list[Fault]:
    """Return what differs between the tensors of a checkpoint and the model's."""
    shapes = {name: whole_shape(x) for name, x in saved.items()}
    missing = [name for name, (shape, _) in ours.items() if name not in saved and 0 not in shape]
    more = [name for name in saved if name not in ours]
    unlike = [
        f"{name} ({_size(shapes[name])}, and here {_size(shape)})"
        for name, (shape, _) in ours.items()
        if name in saved and shapes[name] != shape
    ]
    others = [
        f"{name} ({saved[name][0].dtype}, and here {dtype})"
        for name, (_, dtype) in ours.items()
        if name in saved and not _converts(saved[name][0].dtype, dtype)
    ]
    remedy = "train the model that it was saved of"
    rules = (
        ("has no", missing),
        ("has another shape of", unlike),
        ("has another kind of number in", others),
    )
    faults = [
        Fault(KEY, str(path), f"{rule} {listed(names)}", remedy) for rule, names in rules if names
    ]
    if more:
        rule = f"has {listed(more)}, which the model lacks"
        faults.append(Fault(KEY, str(path), rule, remedy))
    return faults


def _converts(code: str, dtype: str) -> bool:
    """Return whether numbers of a file's dtype stand for a tensor's: a plan may hold floating-point
    numbers in fewer bits, and all others are as they are."""
    if dtype.startswith(("float", "bfloat")):
        return code in _FLOATS
    kind, bits = dtype.rstrip("0123456789"), dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return code == {"int": "I", "uint": "U", "bool": "BOOL"}.get(kind, "?") + bits


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"


# --- The optimizer -------------------------------------------------------------------------------


def _slots(options: OptimizerOptions) -> tuple[str, ...]:
    """Return what the optimizer keeps of every parameter, by torch's names."""
    if options.name == "sgd":
        return ("momentum_buffer",) if options.momentum else ()
    return ("exp_avg", "exp_avg_sq", "step")


def _by_parameter(
    moments: Mapping[str, Sequence[StoredBlock]],
) -> dict[str, dict[str, Shape]]:
    """Return the shapes of a checkpoint's moments, by parameter and by torch's names for them."""
    found: dict[str, dict[str, Shape]] = {}
    for name, stored in moments.items():
        path, _, kind = name.removeprefix("state.").rpartition(".")
        found.setdefault(path, {})[kind] = whole_shape(stored)
    return found


def _is_whole(kept: Mapping[str, Shape] | None, slots: Sequence[str], shape: Shape) -> bool:
    """Return whether what a checkpoint has of a parameter of `shape` is all that the optimizer
    wants: everything, or nothing at all."""
    if kept is None:
        return True
    return all(kept.get(slot) == (() if slot == "step" else shape) for slot in slots)


def _counted_together(path: Path, new: Sequence[str], plan: Plan) -> list[Fault]:
    """Return the fault of a plan whose engines count the updates of all their parameters as one,
    and would correct the `new` moments by a number that is not theirs."""
    for task_graph in _with_zero(plan):
        begin = [name for name in new if name in task_graph.trained]
        if begin and len(begin) < len(task_graph.trained):
            rule = f"has no moments of {listed(begin)}, and ZeRO counts the updates of all "
            rule += "parameters together"
            remedy = "go on under a strategy without ZeRO or offload, as strategy=dp, or with the "
            remedy += "weights of mode=export"
            return [Fault(KEY, str(path), rule, remedy)]
    return []


def _unlike_counts(
    path: Path, moments: Mapping[str, Sequence[StoredBlock]], plan: Plan
) -> tuple[float, float] | None:
    """Return the smallest and the largest number of updates of parameters that ZeRO counts
    together, None where they are the same. Raises ConfigError for a number that is none."""
    counts = []
    for task_graph in _with_zero(plan):
        stored = (moments.get(f"state.{name}.step") for name in task_graph.trained)
        try:
            counts += [read_number(blocks[0]) for blocks in stored if blocks]
        except (BrokenCheckpoint, OSError) as error:
            raise ConfigError([broken(path, BrokenCheckpoint(str(error)))]) from None
    return (min(counts), max(counts)) if counts and min(counts) != max(counts) else None


def _with_zero(plan: Plan) -> Iterator[TaskGraph]:
    """Yield the parts of the model whose engines are DeepSpeed's."""
    for task_graph in plan.task_graphs:
        engines = (plan.ranks[ranks[0]].deepspeed for ranks in task_graph.replicas)
        if any(found.get(str(task_graph.id)) for found in engines):
            yield task_graph
