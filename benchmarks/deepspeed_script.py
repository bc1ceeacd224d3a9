"""Train our GPT with DeepSpeed ZeRO 1, as a script by hand does, for benchmarks/startup.py.

torchrun --standalone --nproc-per-node 2 benchmarks/deepspeed_script.py FILE

The script runs three steps on random tokens. Rank 0 writes a line to FILE after each step.
"""

import sys

import deepspeed
import torch
from torch import distributed as dist

from whale_train.models.gpt import GPT

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = GPT()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.001, fused=True),
    config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
)
with open(sys.argv[1], "a", buffering=1) as file:
    for step in range(3):
        tokens = torch.randint(257, (1, 128))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0:
            file.write(f"{step + 1} {float(loss)}\n")
dist.barrier()
dist.destroy_process_group()
