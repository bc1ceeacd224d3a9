"""Rules for torch's losses, which reduce the losses of samples as an argument says."""

from dataclasses import replace

from whale_train.strategies.independence.call import Answer, Call, Refused, only_batch_dim
from whale_train.strategies.independence.computing import STATISTIC, broadcast_rows
from whale_train.strategies.independence.states import FIXED, PerSample, Reduced, State, added


def _loss(call: Call, reduction: object, rows: State | Refused | None) -> Answer:
    if isinstance(rows, Refused) or not isinstance(rows, PerSample):
        pooled = any(isinstance(x, Reduced) for x in call.tensors().values())
        return Refused(STATISTIC) if pooled else rows
    if reduction in (1, 2):
        return Reduced(-1 if reduction == 1 else 0)
    dim = only_batch_dim(call.shape)
    return replace(rows, dim=dim) if reduction == 0 and dim is not None else None


def elementwise_loss(call: Call, position: int) -> Answer:
    """Derive the state of an elementwise loss of inputs that are broadcast against each other.
    `position` is the index of the reduction argument."""
    rows = broadcast_rows(call)
    return _loss(call, call.argument(position, "reduction", 1), rows)


def row_loss(call: Call, position: int) -> Answer:
    """Derive the state of a loss of rows. Dimension 0 must be the sample dimension. `position` is
    the index of the reduction argument."""
    states = [call.states[name] for name in call.operation.inputs]
    rows = [x for x in states if isinstance(x, PerSample)]
    others = any(x != FIXED and not isinstance(x, PerSample) for x in states)
    if others or any(x.dim or x.degree for x in rows):
        return _loss(call, None, None)
    one = added(list(rows)) if rows else None
    if rows and one is None:
        return Refused("compares different samples with each other")
    return _loss(call, call.argument(position, "reduction", 1), one)


def typed_target_mean(call: Call) -> Answer:
    """Derive the state of a cross-entropy or a negative log-likelihood. A mean over targets is
    normalised by the targets of the whole batch at run time."""
    logits, targets = call.state(0), call.state(1)
    reduction = call.argument(3, "reduction", 1)
    weight = call.argument(2, "weight")
    of_classes = call.state_of(weight)
    if of_classes != FIXED:
        pooled = isinstance(of_classes, Reduced)
        return Refused("weights classes by a statistic of the whole batch") if pooled else None
    if isinstance(logits, Reduced) or isinstance(targets, Reduced):
        return Refused(STATISTIC)
    if not isinstance(logits, PerSample) or logits.degree:
        return None
    if logits.dim != 0 or call.rank_of(0) < 2:
        return Refused("takes the samples of the batch for classes") if logits.dim == 1 else None
    if targets != FIXED and not isinstance(targets, PerSample):
        return Refused("compares the samples of the batch with each other")
    if isinstance(targets, PerSample) and added([logits, replace(targets, degree=0)]) is None:
        return Refused("compares different samples with each other")
    if reduction == 1:
        return Reduced(-1, targets=True)
    return _loss(call, reduction, replace(logits, uniform=False))
