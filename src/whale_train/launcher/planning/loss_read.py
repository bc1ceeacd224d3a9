"""Describe the logits that `model.loss=cross_entropy` reads, and the properties that `mode=verify`
cannot test because both of its runs share them."""

from whale_train.config import Request
from whale_train.data.sources.text import IGNORED_LABEL
from whale_train.strategies.graph.operation_graph import Logits, ModelProfile
from whale_train.strategies.plan.plan import Decision

_KEY = "model.class_dim"


def explain_logits(request: Request, profile: ModelProfile) -> tuple[Decision, ...]:
    """Return a note for the plan where the classes of a model's logits are in dimension 1, or
    another dimension fits the labels as well."""
    logits = profile.logits
    if logits is None or len(logits.shape) < 2 or request.model.class_dim is not None:
        return ()
    labels = next(field.shape for field in profile.inputs if field.name == "labels")
    shapes = f"the logits {_batch(logits.shape)} and the labels {_batch(labels)}"
    if logits.is_open:
        usual = (
            "language models have them" if logits.class_dim < 0 else "torch's cross_entropy does"
        )
        other = -1 if logits.class_dim == 1 else 1
        reason = f"the classes of the loss, as {usual}; {shapes} fit {_KEY}={other} as well"
        return (Decision(_KEY, str(logits.class_dim), str(other), reason),)
    if logits.class_dim == 1:
        return (Decision(_KEY, "1", "", f"the classes of the loss, by {shapes}"),)
    return ()


def shared_by_both(request: Request, profile: ModelProfile) -> tuple[str, ...]:
    """Return the properties that the plan's run shares with the run of one process, in words. A
    verification cannot find faults in these properties."""
    own = request.model.own_loss
    loss = f"the loss that {own.target if own else request.model.class_name} computes"
    if profile.logits is not None:
        loss = f"the loss as model.loss=cross_entropy reads it, {_read(profile.logits)}"
    options = request.data
    return (
        loss,
        f"the samples of data={request.names.get('data', options.kind)} and their order "
        f"(seed={request.seed}, data.shuffle={str(options.shuffle).lower()})",
        f"the model's code and how its weights begin (seed={request.seed})",
    )


def _read(logits: Logits) -> str:
    """Return text on the classes that the loss reads: their number and their dimension."""
    dim = len(logits.shape) if logits.class_dim < 0 else logits.class_dim
    where = f"dimension {dim} of the logits {_batch(logits.shape)}"
    return f"its {logits.num_classes} classes in {where}, without labels of {IGNORED_LABEL}"


def _batch(shape: tuple[int, ...]) -> str:
    """Return text on the shape of a batch, such as `[batch, 128, 1000]`.

    shape: the shape of one sample.
    """
    return f"[{', '.join(['batch', *map(str, shape)])}]"
