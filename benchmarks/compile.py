"""Measure the effect of `train.compile`, which is meant for GPUs, on steps of CPU processes.

    python benchmarks/compile.py --ranks 2

Compiled and uncompiled steps are compared for replicas of the unchanged model (`dp`), and for the
model's exported graph (`split`).
"""

import argparse
import tempfile
from pathlib import Path

import sides
from interleave import Turns, interleaved, show
from rich.console import Console

from whale_train.runtime.cpu.threads import num_threads
from whale_train.runtime.process.preload import preload

LENGTH = 128
MODELS = {
    "GPT": ["model=gpt", "model.width=256", f"model.sequence_length={LENGTH}"],
    "HF Llama": [
        "model=hf",
        "model.architecture=LlamaForCausalLM",
        "model.config={vocab_size: 2048, hidden_size: 256, intermediate_size: 688, "
        "num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 4, "
        f"max_position_embeddings: {LENGTH}}}",
    ],
}


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=["dp", "split"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="samples a rank")
    parser.add_argument("--rounds", type=int, default=8, help="turns a side")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a turn")
    options = parser.parse_args()
    preload()
    turns = Turns(options.rounds, options.steps)
    for model in options.models:
        for strategy in options.strategies:
            with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
                compared = []
                for compiles in (False, True):
                    request, plan = sides.resolved(
                        [
                            *MODELS[model],
                            f"data.sequence_length={LENGTH}",
                            "hardware=cpu",
                            f"hardware.devices={options.ranks}",
                            "optimizer=sgd",
                            f"strategy={strategy}",
                            f"train.global_batch={options.batch * options.ranks}",
                            f"train.compile={compiles}",
                        ],
                        turns.total_steps,
                    )
                    name = "compiled" if compiles else "not compiled"
                    compared.append(sides.ours(name, request, plan, Path(folder)))
                results = interleaved(compared, options.ranks, num_threads(options.ranks), turns)
            title = f"{model}, {strategy}, {options.ranks} ranks x {options.batch} sequences"
            show(title, results, ["not compiled"], Console(width=120))


if __name__ == "__main__":
    main()
