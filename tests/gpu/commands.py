"""Runs the command on this machine's GPUs, and a rank of it in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600.0
GPT = ("model=gpt", "model.width=256", "model.depth=4", "model.heads=4")
_LLAMA = (
    "vocab_size: 512, hidden_size: 256, intermediate_size: 688, num_hidden_layers: 4, "
    "num_attention_heads: 8, num_key_value_heads: 4, max_position_embeddings: 128"
)
LLAMA = ("model=hf", "model.architecture=LlamaForCausalLM", f"model.config={{{_LLAMA}}}")
MOE = ("model=moe_gpt", "model.width=256", "model.depth=2", "model.heads=4", "model.ffn=512")
MODELS = {"gpt": GPT, "llama": LLAMA, "moe": MOE}
# The exported graph on one GPU: split, staged and joined as on several.
AS_A_GRAPH = "strategy.graph={pipeline: {stages: 1, micro_batches: 4}}"
TRAINING = ("train.global_batch=8", "train.steps=8", "optimizer=adamw", "optimizer.lr=1e-3")


def whale_train(run_dir: Path, *overrides: str, gpus: int = 1) -> subprocess.CompletedProcess[str]:
    """Run the command on the first `gpus` GPUs; its run directory is `run_dir`."""
    place = ("hardware=local", f"hardware.devices={gpus}", f"hydra.run.dir={run_dir}")
    command = [sys.executable, "-m", "whale_train.launcher.cli", *TRAINING, *place, *overrides]
    return _done(command, run_dir.parent)


def verdict(run_dir: Path, *overrides: str, gpus: int = 1) -> str:
    """Return why the first steps under a plan are not one process's; '' where they are."""
    done = whale_train(run_dir, "mode=verify", *overrides, gpus=gpus)
    return "" if done.returncode == 0 else f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def of_a_rank(folder: Path, *overrides: str, may_wait: bool = False) -> dict[str, Any]:
    """Return what `one_rank.py` found of a rank on the first GPU."""
    script = str(Path(__file__).with_name("one_rank.py"))
    flags = ("--may-wait",) if may_wait else ()
    place = ("hardware=local", "hardware.devices=1")
    done = _done([sys.executable, script, *flags, *TRAINING, *place, *overrides], folder)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _done(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
