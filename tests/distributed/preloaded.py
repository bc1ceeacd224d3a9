"""What ranks forked by `harness.run_ranks` would otherwise each import: imported once, by their
fork server, when this module is."""

import gc
import importlib

from whale_train.runtime import host

host.preload()
for _name in (
    "numpy",
    "hypothesis",
    "pytest",
    "torch.distributed",
    "torch.export",
    "whale_train.runtime.worker",
    "whale_train.strategies.patterns",
    "whale_train.strategies.shape_check",
    "whale_train.models.moe_gpt",
    "transformers.modeling_utils",
):
    importlib.import_module(_name)
gc.freeze()  # what the server has imported, no rank need look through
