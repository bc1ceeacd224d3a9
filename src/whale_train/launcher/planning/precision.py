"""Choose a request's precision and fp32 rates by the precisions that the devices support."""

from typing import Literal

from whale_train.config import Request
from whale_train.errors import Fault
from whale_train.strategies.hardware.cluster import Cluster
from whale_train.strategies.plan.plan import Decision


def with_precision(
    request: Request, used: Cluster, device: Literal["cpu", "cuda"]
) -> tuple[Request, tuple[Decision, ...]]:
    """Return the request with a precision, and a note for the plan where bf16 was chosen.

    bf16 is chosen if the request gives no precision, every device of `used` supports bf16, and the
    ranks run on these devices or `mode=plan`. CPU processes that emulate devices compute fp32,
    since not every CPU supports another precision.

    used: the devices of the plan.
    device: the kind of device that ranks run on.
    """
    if request.train.precision is not None or not used.devices or used.on_cpu:
        return request, ()
    if device == "cpu" and request.mode != "plan":
        return request, ()
    if request.train.tf32 or not all("bf16" in used_device.flops for used_device in used.devices):
        return request, ()
    train = request.train.model_copy(update={"precision": "bf16"})
    why = "every device computes it; train.precision=fp32 asks for fp32"
    said = Decision("train.precision", "bf16", "fp32", why)
    return request.model_copy(update={"train": train}), (said,)


def refuse_reduce_dtype(request: Request, faults: list[Fault]) -> None:
    """Add a fault where `train.reduce_dtype` is neither fp32 nor the precision of the run, which
    for fp8 is bf16."""
    precision, sent = request.train.precision or "fp32", request.train.reduce_dtype
    if sent not in ("fp32", "bf16" if precision == "fp8" else precision):
        rule = f"is neither the precision of the run ({precision}) nor fp32"
        own = "bf16 or fp32" if precision == "fp8" else "fp32"
        remedy = f"use train.precision={sent}, or train.reduce_dtype={own}"
        faults.append(Fault("train.reduce_dtype", sent, rule, remedy))


def with_tf32(
    request: Request, cluster: Cluster, faults: list[Fault]
) -> tuple[Cluster, tuple[Decision, ...]]:
    """Return the cluster with TF32's rates for fp32 if the request asks for TF32, and a note for
    the plan.

    faults: receives a fault where the request asks for TF32 and no device supports it.
    """
    if not request.train.tf32 or not cluster.devices:
        return cluster, ()
    faster = cluster.in_tf32()
    if cluster.on_cpu or faster == cluster:
        rule = f"is computed by no device of hardware={cluster.name}"
        faults.append(Fault("train.tf32", "true", rule, "use train.tf32=false"))
        return cluster, ()
    why = "products of fp32 round their factors to 10 bits of mantissa, on devices that compute it"
    return faster, (Decision("train.tf32", "true", "false", why),)
