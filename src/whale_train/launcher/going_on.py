"""Decide whether a run can continue from a checkpoint.

A run may continue under another plan, precision, learning rate, number of steps or global batch,
since these concern later steps alone. The model, the set of trained parameters and the data must be
the same, or differ in a way that is known to be right. Notes in the plan tell the user of such a
difference.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from whale_train.checkpoints.url_path import Place
from whale_train.config import Request
from whale_train.data.fingerprint import Fingerprint
from whale_train.errors import ConfigError, Fault, listed, shortened
from whale_train.models.options import ModelOptions
from whale_train.optimizer_options import OptimizerOptions
from whale_train.strategies.plan.optimizer_classes import OptimizerClass
from whale_train.strategies.plan.plan import Decision, Plan, TaskGraph
from whale_train.validation import as_yaml

KEY, DATA_KEY = "train.resume", "train.resume_data"
_ORDER = ("seed", "data.shuffle", "data.evaluation_fraction")
# Options that say where rows are read, and nothing about the rows.
_PLACES = (
    *("data.path", "data.split", "data.columns", "data.max_bytes"),
    *("data.tokenizer", "data.cache", "data.field", "data.evaluation"),
    "data.evaluation_transform",
    *("data.target", "data.arguments", "data.fields", "data.collate", "data.pad", "data.workers"),
)
_FLOATS = ("F64", "F32", "F16", "BF16")


def refuse_other_run(saved: Request, state: CheckpointState, request: Request, named: str) -> None:
    """Raise ConfigError where a request asks for another run than the checkpoint's.

    That is the case for an optimizer with another kind of state, for shared layers where the
    checkpoint's layers have weights of their own, and, under `train.resume_data=same`, for other
    data or data in another order. All faults are raised together.

    saved: the request of the checkpoint's run.
    state: the checkpoint's state.
    request: the request of the run that continues.
    named: the user's name for the checkpoint, for messages.
    """
    faults = []
    if request.model.share_layers and not saved.model.share_layers:
        rule = f"is not so of {named}, whose layers have weights of their own"
        faults.append(Fault("model.share_layers", "true", rule, "use false"))
    redraws = request.model.quantize is not None and request.model.pretrained is None
    if redraws and request.seed != saved.seed and request.train.resume_data != "same":
        rule = f"is not that of {named}, from which its frozen weights in 4 bits are drawn again"
        faults.append(Fault("seed", str(request.seed), rule, f"use seed={saved.seed}"))
    kinds = [_kind(options) for options in (saved.optimizer, request.optimizer)]
    if kinds[0] != kinds[1]:
        rule = f"has no state in {named}, which was saved with {kinds[0]}"
        remedy = f"use optimizer={saved.optimizer.name}"
        if saved.optimizer.target is not None:
            remedy = f"use optimizer._target_={saved.optimizer.target}"
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
    """Return the kind of optimizer in words.

    Optimizers of one kind have the same state, so a run may continue with any optimizer of that
    kind.
    """
    if options.target is not None:
        others = {x.target: None for x in options.groups if x.target is not None}
        return listed([options.target, *others], 9)
    if options.name == "lars":
        return "lars with momentum" if options.momentum else "lars without momentum"
    if options.name == "sgd":
        return "sgd with momentum" if options.momentum else "sgd without momentum"
    return "adam, adamw or lamb"


# --- The data ------------------------------------------------------------------------------------


def _data_options(request: Request) -> dict[str, Any]:
    """Return the options that determine a run's samples and the order of the samples, by key."""
    options = request.data.model_dump()
    if sources := options.pop(
        "sources", ()
    ):  # their samples are compared, but not how many of each
        options["weights"] = [source["weight"] for source in sources]
    return {"seed": request.seed, **{f"data.{key}": value for key, value in options.items()}}


def _unlike_options(saved: Request, state: CheckpointState, request: Request) -> list[str]:
    """Return the keys of the data options by which two runs see other samples, or another order.

    Where the checkpoint has a fingerprint of the data, the kind and the location of the data are
    ignored, since the samples themselves are compared.
    """
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
    """The way in which a run continues from a checkpoint.

    data_anew: whether the run starts again with the first sample of the data.
    decisions: notes for the plan, about the data and about the rest of the checkpoint.
    """

    data_anew: bool
    decisions: tuple[Decision, ...]


def compared_data(
    path: Place,
    state: CheckpointState,
    saved: Request,
    request: Request,
    num_samples: int,
    here: Fingerprint | None,
) -> GoingOn:
    """Compare the data of a run with the data of the checkpoint's run.

    path: the checkpoint.
    state: the checkpoint's state.
    saved: the request of the checkpoint's run.
    request: the request of the run that continues.
    num_samples: number of training samples in the data of `request`.
    here: fingerprint of the data of `request`; None where the data has none.

    Returns whether the data starts again at its first sample, and notes for the plan. Raises
    ConfigError where the data differs and `train.resume_data=same`.
    """
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


def refuse_lost_place(
    path: Place, state: CheckpointState, request: Request, lost_place: str
) -> None:
    """Raise ConfigError where a run cannot continue a stream at the checkpoint's position.

    lost_place: why the stream's state cannot be used, as the end of a sentence; '' where it can.
    """
    if not lost_place and state.stream is not None:
        return
    target = getattr(request.data, "target", "")
    rule = f"is of a run on a stream, data._target_={target}, which {lost_place}"
    remedy = "give its class both, so that it goes on from what JSON holds"
    if not lost_place:
        rule = f"holds no place of the stream data._target_={target}"
        remedy = "use a checkpoint of a run on this stream"
    remedy += f", or begin it anew with {DATA_KEY}=any"
    raise ConfigError([Fault(KEY, str(path), rule, remedy)])


def _moved(saved: Request, request: Request) -> str:
    """Return the end of a remedy, which names the earlier location of the data; '' where the
    location has not changed."""
    before, now = _data_options(saved), _data_options(request)
    keys = [key for key in ("data.kind", *_PLACES) if key in before and before[key] != now.get(key)]
    shown = ", ".join(f"{key}={as_yaml(before[key])}" for key in keys)
    return f"; it was that of {shown}" if shown else ""


# --- The model -----------------------------------------------------------------------------------


def compared_model(
    path: Place,
    saved_options: ModelOptions,
    options: ModelOptions,
    plan: Plan,
    optimizer: OptimizerOptions,
    parts: bool = False,
) -> tuple[Decision, ...]:
    """Compare the tensors of a checkpoint with the model and the optimizer of a run.

    path: the checkpoint.
    saved_options: the model of the run that saved it.
    options: the model of the run.
    plan: the plan of the run.
    optimizer: the optimizer of the run.
    parts: whether layers that shared their weights get weights of their own here. Every such layer
        then starts from the checkpoint's tensors of the first layer.

    Returns notes for the plan: on moments that start at zero, on unused moments of the checkpoint,
    and on update counts of several parameters that ZeRO replaces by one.

    Raises ConfigError in these cases: the checkpoint cannot be read; a tensor of the model is
    missing, is one too many, or has another shape or kind of dtype; a parameter has only some of
    its moments, or moments of another shape; the plan's engines cannot start with moments for some
    parameters and none for others.
    """
    from whale_train.models.export.export import model_on_meta  # which imports torch
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
    described = {name: _described(x) for name, x in ours.items()}
    faults = _unlike_tensors(path, saved, described, _as_saved(saved_options, options))
    updated = _by_parameter(moments)
    shapes = {name: tuple(ours[name].shape) for name in trained if name in ours}
    needed = {name: _slots(optimizer, plan.optimizer_of(name), x) for name, x in shapes.items()}
    wrong = [
        name
        for name, shape in shapes.items()
        if 0 not in shape and not _is_whole(updated.get(places.get(name, name)), needed[name])
    ]
    if wrong:
        rule = f"has not all moments of {listed(wrong)}, or some of another shape"
        faults.append(Fault(KEY, str(path), rule, "name another checkpoint"))
    new = [
        name
        for name, shape in shapes.items()
        if needed[name] and 0 not in shape and places.get(name, name) not in updated
    ]
    counts_updates = any("step" in slots for slots in needed.values())
    if counts_updates and 0 < len(new) < len(shapes):
        faults += _counted_together(path, new, plan)
    if parts and plan.optimizers:
        rule = "has moments of layers together, and how to divide those of "
        rule += f"{plan.optimizers[0].target} is not known"
        faults.append(Fault(KEY, str(path), rule, "use model.share_layers=true"))
    if faults:
        raise ConfigError(faults)
    said = []
    if counts_updates and not new and (counts := _unlike_counts(path, moments, plan)):
        if plan.optimizers:
            rule = f"has from {counts[0]:g} to {counts[1]:g} updates of its parameters, which ZeRO "
            rule += f"counts together; what else {plan.optimizers[0].target} counts is not known"
            remedy = "go on under a strategy without ZeRO, as strategy=dp"
            raise ConfigError([Fault(KEY, str(path), rule, remedy)])
        why = f"{path} has from {counts[0]:g} to {counts[1]:g} of its parameters"
        chosen = f"ZeRO goes on from {counts[1]:g} updates of all parameters"
        said.append(Decision(KEY, chosen, "", why))
    if new:
        why = f"{path} has none: they were not trained"
        said.append(Decision(KEY, f"moments begin at zero for {listed(new)}", "", why))
    held = {places.get(name, name) for name in shapes}
    unused = [name for name in updated if name not in held]
    if unused:
        why = f"{path} has them, and these are not trained"
        said.append(Decision(KEY, f"no use is made of the moments of {listed(unused)}", "", why))
    return tuple(said)


def refuse_other_model(
    folder: Place, saved_options: ModelOptions, options: ModelOptions, *, is_final: bool
) -> None:
    """Raise ConfigError where the weights in `folder` do not fit a model, or cannot be read.

    saved_options: the model of the run that saved the weights.
    options: the model.
    is_final: whether the weights were exported, and so have the names that other programs use.
    """
    from whale_train.models.export.export import model_on_meta  # which imports torch
    from whale_train.models.loss_module import LossModule
    from whale_train.models.weights.kept_tensors import kept_tensors, other_names, saved_names

    try:
        saved = stored_tensors(folder)
    except BrokenCheckpoint as error:
        raise ConfigError([broken(folder, error)]) from None
    module = LossModule(model_on_meta(options), options)
    names = saved_names(module, options)
    renamed = other_names(module.model) if is_final else {}
    ours = {
        renamed.get(name, name): _described(x)
        for name, x in kept_tensors(module).items()
        if name in names
    }
    if faults := _unlike_tensors(folder, saved, ours, _as_saved(saved_options, options)):
        raise ConfigError(faults)


def broken(path: Place, error: BrokenCheckpoint) -> Fault:
    """Return the fault of a checkpoint that cannot be read."""
    return Fault(KEY, str(path), f"is no whole checkpoint: {error}", "name another")


def _described(tensor: Any) -> tuple[Shape, str]:
    """Return the shape of a tensor, and the name of its dtype in torch, such as `float32`."""
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")


def _as_saved(saved: ModelOptions, options: ModelOptions) -> str:
    """Return the remedy for a model whose tensors are not those of a checkpoint.

    It names the options in which the checkpoint's model, `saved`, differs from `options`.
    """
    before, now = _options_of_tensors(saved), _options_of_tensors(options)
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if saved.class_name != options.class_name:
        keys = [key for key in keys if key in ("model._target_", "model.architecture")]
    given = listed((f"{x}={shortened(as_yaml(before[x]))}" for x in keys if x in before), 5)
    others = listed((key for key in keys if key not in before), 5)
    remedy = "train the model that it was saved of"
    remedy += f", with {given}" if given else ""
    return remedy + (f", without {others}" if others else "")


def _options_of_tensors(options: ModelOptions) -> dict[str, Any]:
    """Return the options that decide which tensors a model has, by their keys in a config."""
    fields = {"_target_": options.target, **options.arguments}
    if options.is_hugging_face:
        names = ("architecture", "pretrained", "adapters", "quantize")
        fields |= {name: getattr(options, name) for name in names}
        fields |= {f"config.{name}": value for name, value in options.config.items()}
    return {f"model.{name}": value for name, value in fields.items()}


def _unlike_tensors(
    path: Place,
    saved: Mapping[str, Sequence[StoredBlock]],
    ours: Mapping[str, tuple[Shape, str]],
    remedy: str,
) -> list[Fault]:
    """Return the faults of a checkpoint whose tensors differ from the model's.

    path: the checkpoint, for messages.
    saved: the blocks of each tensor in the checkpoint, by name.
    ours: the shape and dtype of each tensor of the model, by name.
    remedy: the remedy of every fault.
    """
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
    """Return whether numbers of the safetensors dtype `code` can be loaded into a tensor of
    `dtype`.

    All floating-point dtypes convert to each other, since a plan may hold weights in half
    precision. Any other dtype must be the same.
    """
    if dtype.startswith(("float", "bfloat")):
        return code in _FLOATS
    kind, bits = dtype.rstrip("0123456789"), dtype.lstrip("abcdefghijklmnopqrstuvwxyz")
    return code == {"int": "I", "uint": "U", "bool": "BOOL"}.get(kind, "?") + bits


def _size(shape: Sequence[int]) -> str:
    """Return a shape as text, such as `128 x 64`, or `a scalar`."""
    return " x ".join(map(str, shape)) or "a scalar"


# --- The optimizer -------------------------------------------------------------------------------


def _slots(
    options: OptimizerOptions, optimizer: OptimizerClass | None, shape: Shape
) -> dict[str, Shape]:
    """Return the shape of each state tensor that the optimizer keeps for a parameter, by the
    optimizer's name for the tensor.

    optimizer: the optimizer class of the parameter; None for a built-in optimizer.
    shape: the shape of the parameter.
    """
    if optimizer is not None:
        return {x.name: x.sizes(shape) for x in optimizer.entries(tuple(shape))}
    if options.name in ("sgd", "lars"):
        return {"momentum_buffer": shape} if options.momentum else {}
    return {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}


def _by_parameter(
    moments: Mapping[str, Sequence[StoredBlock]],
) -> dict[str, dict[str, Shape]]:
    """Return the shapes of a checkpoint's moments, by parameter and then by torch's name of the
    moment."""
    shapes: dict[str, dict[str, Shape]] = {}
    for name, stored in moments.items():
        path, _, kind = name.removeprefix("state.").rpartition(".")
        shapes.setdefault(path, {})[kind] = whole_shape(stored)
    return shapes


def _is_whole(stored: Mapping[str, Shape] | None, slots: Mapping[str, Shape]) -> bool:
    """Return whether a checkpoint has all moments of a parameter, or none.

    stored: the shapes of the parameter's moments in the checkpoint, by name; None without moments.
    slots: the shapes of the moments that the optimizer needs, by name.
    """
    return stored is None or all(stored.get(slot) == shape for slot, shape in slots.items())


def _counted_together(path: Place, new: Sequence[str], plan: Plan) -> list[Fault]:
    """Return the fault of an engine that has parameters with moments and parameters without.

    Such an engine keeps one update count for all its parameters, and would correct the bias of new
    moments by the count of the old ones. The list is empty where no engine has both.

    new: names of the parameters without moments in the checkpoint.
    """
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
    path: Place, moments: Mapping[str, Sequence[StoredBlock]], plan: Plan
) -> tuple[float, float] | None:
    """Return the smallest and the largest update count among parameters that ZeRO counts together.

    Returns None where all counts are equal. Raises ConfigError where a stored count cannot be read.
    """
    counts = []
    for task_graph in _with_zero(plan):
        stored = (moments.get(f"state.{name}.step") for name in task_graph.trained)
        try:
            counts += [read_number(blocks[0]) for blocks in stored if blocks]
        except (BrokenCheckpoint, OSError) as error:
            raise ConfigError([broken(path, BrokenCheckpoint(str(error)))]) from None
    return (min(counts), max(counts)) if counts and min(counts) != max(counts) else None


def _with_zero(plan: Plan) -> Iterator[TaskGraph]:
    """Yield the TaskGraphs of a plan that run on DeepSpeed engines."""
    for task_graph in plan.task_graphs:
        engines = (plan.ranks[ranks[0]].deepspeed for ranks in task_graph.replicas)
        if any(configs.get(str(task_graph.id)) for configs in engines):
            yield task_graph
