"""Train our GPT with state in files by hand, for benchmarks/eight_gigabytes.py.

python benchmarks/offload_by_hand.py compile
python benchmarks/offload_by_hand.py SETTINGS.json

A single process. Every block is checkpointed by torch, and DeepSpeed's ZeRO 3 keeps optimizer and
parameters in files, with sub-groups and buffers of the size of the model's weights and deeper
queues than the defaults. Reads and writes beside updates (`pipeline_read`, `pipeline_write`) need
three times the buffers, which do not fit beside the gradients in the memory that is compared, and
gained nothing where they did. Initial weights are the ones that
`model.init=sharded` makes, and batches are read from a file. A line for each step is appended to a
file: its loss and its seconds.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
from torch import nn
from torch.utils.checkpoint import checkpoint

from whale_train.models.gpt import GPT
from whale_train.models.weights.deferred import deferred, made

UPDATED_ELEMENTS = 6_553_600  # of a sub-group, beyond which one weight may reach
STATES = 4  # value, gradient and two moments of AdamW, a buffer each


def main() -> None:
    if sys.argv[1] == "compile":
        for builder in (CPUAdamBuilder, AsyncIOBuilder, ShareMemCommBuilder):
            builder().load()
        return
    settings = json.loads(Path(sys.argv[1]).read_text())
    batches = torch.load(settings["batches"], weights_only=True)
    deepspeed.init_distributed("gloo")
    model = built(settings)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=config_of(settings),
    )
    with open(settings["results"], "a", buffering=1) as results:
        for batch in batches:
            began = time.perf_counter()
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            line = {"loss": float(loss), "seconds": time.perf_counter() - began}
            results.write(json.dumps(line) + "\n")


def config_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    width = settings["model"]["width"]
    largest = max(4 * width * width, settings["model"]["vocab_size"] * width)
    place = {"device": "nvme", "nvme_path": settings["folder"], "pin_memory": False}
    # Modules of a block have one weight above 1 MB each.
    parameters = {"buffer_count": 4, "buffer_size": largest, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": settings["batch"],
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": settings["optimizer"]},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**place, "buffer_count": STATES},
            "offload_param": {**place, **parameters},
            "sub_group_size": UPDATED_ELEMENTS,
            "reduce_bucket_size": UPDATED_ELEMENTS,
            "overlap_comm": False,
            "stage3_prefetch_bucket_size": 0,  # a prefetch from files fails in DeepSpeed 0.19.8
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 0,
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "overlap_events": True},
        "steps_per_print": 1 << 31,
    }


def built(settings: dict[str, Any]) -> nn.Module:
    """Return the model with its parameters in files, and a checkpoint around every block."""
    with deepspeed.zero.Init(config_dict_or_path=config_of(settings)):
        model = GPT(**settings["model"])
    initial = deferred(lambda: GPT(**settings["model"]), settings["seed"])
    for parameter, placeholder in zip(model.parameters(), initial.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(made(placeholder))
    for block in model.blocks:
        recomputed(block)
    return model


def recomputed(block: nn.Module) -> None:
    """Make a block compute its forward again in the backward.

    With `use_reentrant=False` a single process with parameters in files gets wrong gradients:
    DeepSpeed 0.19.8 reads a weight into the buffer that a saved tensor still is a view of.
    """
    forward = block.forward

    def again(hidden: torch.Tensor) -> Any:
        return checkpoint(forward, hidden, use_reentrant=True)

    block.forward = again  # type: ignore[method-assign]


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    main()
