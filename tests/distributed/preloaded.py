"""What ranks forked by `harness.run_ranks` would otherwise each import: imported once, by their
fork server, when this module is."""

import gc
import importlib

from whale_train.runtime.process.preload import preload

preload()
for _name in (
    "numpy",
    "hypothesis",
    "pytest",
    "torch.distributed",
    "torch.export",
    "whale_train.runtime.process.rank_main",
    "whale_train.strategies.tensor_parallel.choose",
    "whale_train.strategies.layouts.shape_check",
    "whale_train.models.moe_gpt",
    "transformers.modeling_utils",
):
    importlib.import_module(_name)
gc.freeze()  # what the server has imported, no rank need look through
