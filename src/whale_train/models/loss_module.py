"""Wrap any model as a module that takes fields of the data and returns a scalar loss."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from whale_train.errors import ConfigError, Fault, nearest
from whale_train.models.class_dim import FIRST, LAST, class_dim
from whale_train.models.options import LossOptions, ModelOptions
from whale_train.own_code import TargetKind, by_keyword, importable, named_function
from whale_train.strategies.graph.operation_graph import InputField

MODEL_PREFIX = "model."  # the prefix of the model's own parameter paths in LossModule
IGNORED_LABEL = -100  # labels that cross-entropy ignores, as in torch and transformers


def _forward_parameters(model: nn.Module) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters of a model's forward that can be passed by keyword, and whether it
    takes `**kwargs`."""
    return by_keyword(inspect.signature(model.forward).parameters)


def _takes_labels(model: nn.Module, loss: str) -> bool:
    """Return whether the model is given the labels.

    With the loss cross_entropy, a model gets labels only where its forward requires them: with
    optional labels it would only compute a second loss.
    """
    named, open_ended = _forward_parameters(model)
    if "labels" not in named:
        return open_ended and loss == "model"
    return loss == "model" or named["labels"].default is inspect.Parameter.empty


def forward_fields(
    model: nn.Module, options: ModelOptions, fields: tuple[InputField, ...]
) -> tuple[str, ...]:
    """Return the names of the data's fields that `LossModule` takes, in the data's order.

    They are the arguments of the model's forward, and the labels where the loss needs them. Raises
    ConfigError with all faults: a field that neither forward nor the loss takes, a forward argument
    without a field, and a loss without labels or with labels that are not integers.
    """
    named, open_ended = _forward_parameters(model)
    names = [field.name for field in fields]
    listing, owner = ", ".join(names), type(model).__name__
    by_loss = () if options.loss == "model" else ("labels",)
    faults = []
    for name in names:
        if name in named or open_ended or name in by_loss:
            continue
        if name == "labels":
            rule = f"needs a forward that takes labels, and that of {owner} takes none"
            faults.append(Fault("model.loss", "model", rule, "use model.loss=cross_entropy"))
        else:
            rule = f"is not an argument of the forward of {owner}"
            remedy = nearest(name, named) if named else "leave it out: forward takes no arguments"
            faults.append(Fault(f"data.{name}", "", rule, remedy))
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in (*names, *by_loss):
            rule = f"needs {name} in its forward, and the fields of the data are {listing}"
            remedy = f"name one of the data's fields {name}, in data.columns or data.fields, or "
            remedy += "give it a default"
            faults.append(Fault("model._target_", options.target, rule, remedy))
    labels = next((field for field in fields if field.name == "labels"), None)
    if options.loss == "cross_entropy" and labels is not None and not labels.is_integer:
        rule = f"numbers classes, and the labels of the data are {labels.dtype}"
        remedy = "save labels as int64, or use model.loss=model"
        faults.append(Fault("model.loss", "cross_entropy", rule, remedy))
    if by_loss and "labels" not in names:
        rule = f"needs labels, and the fields of the data are {listing}"
        remedy = "name the field of the labels labels, in data.columns or data.fields, or use "
        remedy += "model.loss=model"
        shown = "cross_entropy" if options.own_loss is None else options.own_loss.target
        faults.append(Fault("model.loss", shown, rule, remedy))
    if faults:
        raise ConfigError(faults)
    return tuple(names)


_TENSOR = TargetKind("torch.Tensor", lambda made: issubclass(made, Tensor))


def own_loss(options: LossOptions) -> Callable[..., object]:
    """Return the loss of the user's own.

    Raises ConfigError where it cannot be imported, is not a loss, or has parameters or buffers,
    which no rank would train or move.
    """
    with importable(os.getcwd()), torch.device("cpu"):
        loss = named_function("model.loss", options.target, options.arguments, _TENSOR)
    if isinstance(loss, nn.Module):
        held = [*loss.named_parameters(), *loss.named_buffers()]
        if held:
            rule = f"has tensors of its own ({held[0][0]})"
            remedy = "compute them in the model, or from the labels"
            raise ConfigError([Fault("model.loss._target_", options.target, rule, remedy)])
    return loss


class LossModule(nn.Module):
    """A model and its loss as one module, which takes a batch by keyword and returns a scalar loss.

    The loss is the mean over the batch's samples, or over unmasked tokens. It is the model's own,
    the user's own function of logits and labels, or the cross-entropy of the model's logits,
    [batch, classes, ...] or [..., classes] (`models/class_dim.py`), with `labels` [batch, ...],
    where labels of -100 do not count. The model's parameter paths get the prefix `MODEL_PREFIX`.
    `on_logits`, where it is set, is called with the shape of the logits before cross-entropy.
    """

    on_logits: Callable[[tuple[int, ...]], None] | None = None

    def __init__(self, model: nn.Module, options: ModelOptions) -> None:
        super().__init__()
        self.model = model
        self.loss, self.class_dim = options.loss, options.class_dim
        # In a tuple, a loss that is a module is not registered as a submodule.
        self._own = () if options.own_loss is None else (own_loss(options.own_loss),)
        self.takes_labels = _takes_labels(model, options.loss)
        named, open_ended = _forward_parameters(model)
        kind = inspect.Parameter.KEYWORD_ONLY
        names = dict.fromkeys([*named, "labels"])
        parameters = [inspect.Parameter(name, kind, default=None) for name in names]
        if open_ended:
            parameters.append(inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD))
        self.signature = inspect.Signature(parameters)

    def name(self, fields: Iterable[str]) -> None:
        """Add `fields` to the signature of `forward`.

        Fields that a model takes as `**kwargs` are not named in its signature, and torch.export
        gives a dynamic shape only to named arguments.
        """
        given = dict(self.signature.parameters)
        kind = inspect.Parameter.KEYWORD_ONLY
        more = {x: inspect.Parameter(x, kind, default=None) for x in fields if x not in given}
        # A `**others` stays the last.
        ordered = sorted({**given, **more}.values(), key=lambda parameter: parameter.kind)
        self.signature = inspect.Signature(ordered)

    @property
    def forward(self) -> Callable[..., Tensor]:  # type: ignore[override]
        """Return `forward(**batch)` with the names of the model's own arguments in its signature.

        torch.export gives each tensor its dynamic shape by the names of the signature, and refuses
        a bare `**batch`.
        """

        def forward(**batch: Tensor) -> Tensor:
            return self._loss_of(batch)

        forward.__signature__ = self.signature  # type: ignore[attr-defined]
        return forward

    def _loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the scalar loss of `batch`.

        Raises ConfigError where the model returns no loss or no logits.
        """
        given = {k: v for k, v in batch.items() if k != "labels" or self.takes_labels}
        output = self.model(**given)
        wanted = "loss" if self.loss == "model" else "logits"
        tensor = _member(output, wanted)
        owner = type(self.model).__name__
        if tensor is None or (wanted == "loss" and tensor.dim()):
            rule = f"finds no {wanted} in what {owner} returns ({type(output).__name__})"
            other = "cross_entropy" if wanted == "loss" else "model"
            remedy = f"return it as .{wanted}, or use model.loss={other}"
            raise ConfigError([Fault("model.loss", self.loss, rule, remedy)])
        if wanted == "loss":
            return tensor
        for loss in self._own:
            return _scalar(loss(tensor, batch["labels"]), loss)
        return self._cross_entropy(tensor, batch["labels"])

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of `logits`, an fp32 scalar.

        `labels` have the shape of the logits without the classes. Raises ConfigError for other
        shapes.
        """
        if self.on_logits is not None:
            self.on_logits(tuple(logits.shape))
        classes = class_dim(logits.shape, labels.shape, self.class_dim) if logits.dim() else None
        if classes is None:
            shapes = f"logits {list(logits.shape)} for labels {list(labels.shape)}"
            owner = type(self.model).__name__
            rule = f"needs a label for each place of the logits, and {owner} makes {shapes}"
            rule += f" (a batch of {len(labels)})"
            remedy = "use labels of the logits' shape without the classes, which model.class_dim=1 "
            remedy += "takes from dimension 1, and model.class_dim=-1 from the last"
            raise ConfigError([Fault("model.loss", self.loss, rule, remedy)])
        if classes.dim == FIRST and logits.dim() > 2:
            logits = logits.movedim(FIRST, LAST)
        if labels.dtype != torch.int64:
            labels = labels.long()  # torch takes only int64 and uint8 labels
        return functional.cross_entropy(
            logits.flatten(0, -2).float(),  # a half-precision loss keeps three digits
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
        )


def _scalar(computed: object, loss: Callable[..., object]) -> Tensor:
    """Return `computed`, the result of the user's own `loss`. Raises ConfigError where it is not a
    scalar tensor."""
    if isinstance(computed, Tensor) and not computed.dim():
        return computed
    name = getattr(loss, "__name__", type(loss).__name__)
    kind = type(computed).__name__
    shape = f" of shape {list(computed.shape)}" if isinstance(computed, Tensor) else ""
    rule = f"returns a {kind}{shape}, and a step has one loss"
    raise ConfigError([Fault("model.loss", name, rule, "return the mean over the samples")])


def _member(output: object, name: str) -> Tensor | None:
    """Return the loss or the logits in a model's output, or None where the output has no tensor.

    It is the attribute or key `name`, else the first tensor of a sequence, else the output itself.
    """
    member = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    if member is None and type(output) in (tuple, list):
        member = next((part for part in output if isinstance(part, Tensor)), None)  # type: ignore[attr-defined]
    if member is None and isinstance(output, Tensor):
        member = output
    return member if isinstance(member, Tensor) else None
