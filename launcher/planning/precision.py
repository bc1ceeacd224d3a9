"""The precision of a request that names none: what its devices are made for."""

from typing import Literal

from whale_train.config import Request
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.plan import Decision


def with_precision(
    request: Request, used: Cluster, device: Literal["cpu", "cuda"]
) -> tuple[Request, tuple[Decision, ...]]:
    """Return the request with the precision it is trained in, and what is said of that: bf16 where
    every device of `used` computes it, and ranks run on those devices or only a plan is asked for.
    CPU processes that stand for devices compute fp32, of which some have no other."""
    if request.train.precision is not None or not used.devices or used.on_cpu:
        return request, ()
    if device == "cpu" and request.mode != "plan":
        return request, ()
    if not all("bf16" in each.flops for each in used.devices):
        return request, ()
    train = request.train.model_copy(update={"precision": "bf16"})
    why = "every device computes it; train.precision=fp32 asks for fp32"
    said = Decision("train.precision", "bf16", "fp32", why)
    return request.model_copy(update={"train": train}), (said,)
