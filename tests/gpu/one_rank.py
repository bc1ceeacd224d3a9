"""A rank of a plan for one GPU, whose steps may not wait for it.

    python one_rank.py [--may-wait] KEY=VALUE ...

After some steps in which libraries set themselves up, torch raises for whatever waits for the
device, unless that may be. Prints, as JSON, the most memory that tensors had, and what the plan has
of it.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from whale_train.config import read_request
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.models.fp32_precision import compute_fp32
from whale_train.runtime.assembly.build_program import assemble
from whale_train.runtime.comms.process_groups import (
    file_rendezvous,
    join,
    leave,
    make_channels,
    make_groups,
)
from whale_train.runtime.compile.compiler import Compiler
from whale_train.runtime.engines.rank_context import RankContext
from whale_train.runtime.process import rank_main as worker
from whale_train.runtime.train.batches import RankBatches
from whale_train.runtime.train.loop import Loop

_SETTING_UP = 4  # steps


def main() -> None:
    may_wait = sys.argv[1] == "--may-wait"
    config = composed(rewritten(sys.argv[2 if may_wait else 1 :]))
    request = read_request(config, {"hardware": "local", "strategy": "strategy"})
    plan = resolve_request(request).plan
    prepared = worker.prepare(request)
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1"}
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    compute_fp32(in_tf32=request.train.tf32)
    with tempfile.TemporaryDirectory() as folder:
        join(file_rendezvous(Path(folder)), 0, 1, device)
        compiler = Compiler() if request.train.compile else None
        groups, channels = make_groups(plan, 0), make_channels(plan, 0, device)
        seat = RankContext(0, device, groups, channels, compiler=compiler)
        torch.manual_seed(request.seed)
        program = assemble(request, plan, prepared.module, prepared.graph, seat)
        batches = RankBatches(request, plan, prepared.data, 0, device)
        loop = Loop(request, plan, program, batches, None)
        for number in range(request.train.steps):
            if number == _SETTING_UP:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
            loop.step(number)
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        found = {
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "planned_bytes": plan.ranks[0].memory_bytes.total,
        }
        batches.close()
        del program, loop
        leave()
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
