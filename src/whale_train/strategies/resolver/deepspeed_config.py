"""The DeepSpeed config of one engine, as a pure function.

Sets every DeepSpeed default that would change the mathematics, in one place.
"""

from typing import Any

from whale_train.strategies.grammar.nodes import Replicate
from whale_train.strategies.memory.engine_memory import REDUCE_BUCKET_ELEMENTS
from whale_train.strategies.plan.training import BUCKET_ELEMENTS


def deepspeed_config(
    node: Replicate,
    micro_batch_size: int,
    grad_clip: float,
    optimizer: dict[str, Any] | None,
    on_cpu: bool,
    reduce_dtype: str = "fp32",
    bucket_elements: int = BUCKET_ELEMENTS,
    *,
    gradients_in_files: bool = False,
) -> dict[str, Any] | None:
    """Return the config of a rank's engine; None where ZeRO is off and torch's
    DistributedDataParallel serves (docs/adr/003).

    node: ZeRO stage and offload of the replicas.
    micro_batch_size: samples of the rank's largest micro-batch.
    grad_clip: norm to which gradients are clipped.
    optimizer: section that `deepspeed_optimizer` returns; None where DeepSpeed is given an
        optimizer object.
    on_cpu: True if the rank's device is a CPU process.
    reduce_dtype: dtype in which gradients are sent.
    bucket_elements: number of gradients that are reduced together.
    gradients_in_files: True if the only backward of a step writes gradients to files.
    """
    if node.zero == 0:
        return None
    zero: dict[str, Any] = {
        "stage": node.zero,
        "reduce_bucket_size": bucket_elements,
        "allgather_bucket_size": bucket_elements,
        # A gloo reduction runs on the very cores that compute, and unmanaged accumulation allows
        # overlap only where gradients are partitioned.
        "overlap_comm": node.zero >= 2 and not on_cpu,
    }
    for state in ("optimizer", "parameters"):
        place = getattr(node, f"offload_{state}")
        if place == "none":
            continue
        key = "offload_param" if state == "parameters" else "offload_optimizer"
        # Copies to a GPU and back overlap with its work only from pinned memory.
        zero[key] = {"device": place, "pin_memory": not on_cpu}
        if place == "nvme":
            zero[key]["nvme_path"] = node.offload_path
            if state == "parameters":  # by default, the first 1e9 elements stay in memory
                zero[key]["max_in_cpu"] = 0
    if node.zero == 3:
        # By default DeepSpeed leaves parameters under 100,000 elements whole on every rank.
        zero["stage3_param_persistence_threshold"] = 0
        # By default DeepSpeed releases no parameter of a model under 1e9 elements, as ZeRO 2.
        zero["stage3_max_reuse_distance"] = 0
        # Prefetch overlaps with a GPU's work. On a CPU it would run on the same cores, and every
        # prefetched parameter takes its memory twice (docs/adr/012).
        zero["stage3_prefetch_bucket_size"] = 0 if on_cpu else REDUCE_BUCKET_ELEMENTS
        # The update of a sub-group copies its gradient, three times with Adam; by default the
        # sub-group is all parameters. Copies of one bucket take no more memory than the reduction
        # of gradients has just taken.
        zero["sub_group_size"] = REDUCE_BUCKET_ELEMENTS
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        # Backward may run any number of times; reduction happens in step(). Gradients go to files
        # during the backward where it is known to run once.
        "managed_gradient_accumulation": gradients_in_files,
        # DeepSpeed clips to 1.0 unless told not to.
        "gradient_clipping": grad_clip,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "communication_data_type": reduce_dtype,
        # Gradients are fp32 from the backward that makes them on, in every precision.
        "data_types": {"grad_accum_dtype": "fp32"},
        # Our 16-bit precisions are autocast (docs/adr/007), fp16 with one loss scale for the job.
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed has no CPU kernel for plain SGD, which may be offloaded as well.
        "zero_force_ds_cpu_optimizer": False,
        **({} if optimizer is None else {"optimizer": optimizer}),
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }


def deepspeed_optimizer(name: str, options: dict[str, Any], offloaded: bool) -> dict[str, Any]:
    """Return the optimizer section of a config: torch's own optimizers, or DeepSpeed's CPUAdam if
    the state is `offloaded` to the host. `name` is sgd, adam or adamw: `adam` adds weight decay to
    the gradient, `adamw` to the update."""
    parameters = dict(options)
    fused = parameters.pop("fused", False)
    if name == "sgd":
        return {"type": "SGD", "params": {**parameters, "fused": fused}}
    kind = {"adam": "Adam", "adamw": "AdamW"}[name]
    parameters["adam_w_mode"] = name == "adamw"
    if not offloaded:
        parameters |= {"torch_adam": True, "fused": fused}
    return {"type": kind, "params": parameters}


def for_processes(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config for a CPU process that stands for a GPU. It has no overlap by streams and no
    pinned memory, which only a GPU has. ZeRO 3's prefetch stays as on a GPU."""
    zero = {**config["zero_optimization"], "overlap_comm": False}
    for key in ("offload_optimizer", "offload_param"):
        if key in zero:
            zero[key] = {**zero[key], "pin_memory": False}
    return {**config, "zero_optimization": zero}
