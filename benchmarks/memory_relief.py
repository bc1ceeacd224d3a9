"""Compare the peak memory of means against running out of memory with what is planned for them.

    python benchmarks/memory_relief.py

Every means (recomputation, activations on the host, ZeRO with offload, splits, pipelines) is
rehearsed alone and combined, for three models on a node of eight devices: each kind of rank runs a
step on tensors without storage (`mode=rehearse`), whose peak stands beside the plan. No GPU is
needed. Equal losses are the matter of `tests/distributed/test_relief.py`.
"""

import argparse
import warnings
from statistics import median

from rehearsals import MODELS as SHIPPED
from rich.console import Console

from whale_train.config import read_request
from whale_train.errors import RequestError
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.runtime.rehearse.main import chosen, model_of, rehearse

_GPT = [
    *("model.vocab_size=32000", "model.sequence_length=1024"),
    *("model.width=1024", "model.heads=16"),
]
MODELS = {
    "gpt": ["model=gpt", *_GPT, "model.depth=24"],
    "hf_llama": SHIPPED["hf_llama"],
    "moe_gpt": ["model=moe_gpt", *_GPT, "model.depth=8", "model.ffn=2048"],
}
MEANS = {
    "none": "replicate: {}",
    "recompute": "replicate: {recompute: full}",
    "half recomputed": "replicate: {recompute: {memory: 0.5}}",
    "activations": "replicate: {offload: {activations: cpu}}",
    "zero 1": "replicate: {zero: 1}",
    "zero 2": "replicate: {zero: 2}",
    "zero 3": "replicate: {zero: 3}",
    "optimizer": "replicate: {zero: 2, offload: {optimizer: cpu}}",
    "parameters": "replicate: {zero: 3, offload: {optimizer: cpu, parameters: cpu}}",
    "split": "replicate: {of: {split: {degree: 4, dim: tensor}}}",
    "sequence": "replicate: {of: {split: {degree: 4, dim: sequence}}}",
    "context": "replicate: {of: {split: {degree: 4, dim: context}}}",
    "pipeline": "pipeline: {stages: 2, micro_batches: 8}",
    "recompute + activations": "replicate: {recompute: full, offload: {activations: cpu}}",
    "recompute + zero 3": "replicate: {zero: 3, recompute: full}",
    "recompute + parameters": (
        "replicate: {zero: 3, recompute: full, offload: {optimizer: cpu, parameters: cpu}}"
    ),
    "activations + zero 3": "replicate: {zero: 3, offload: {activations: cpu}}",
    "everything": (
        "replicate: {zero: 3, recompute: full, "
        "offload: {activations: cpu, optimizer: cpu, parameters: cpu}}"
    ),
    "recompute + split + zero 1": (
        "replicate: {zero: 1, of: {split: {degree: 2, dim: tensor, recompute: full}}}"
    ),
    "activations + split + zero 1": (
        "replicate: {zero: 1, offload: {activations: cpu}, of: {split: {degree: 2, dim: tensor}}}"
    ),
    "recompute + context + zero 1": (
        "replicate: {zero: 1, of: {split: {degree: 4, dim: context, recompute: full}}}"
    ),
    "recompute + pipeline + zero 1": (
        "replicate: {zero: 1, recompute: full, of: {pipeline: {stages: 2, micro_batches: 8}}}"
    ),
}
TRAINING = [
    "hardware=dgx_a100",
    "train.global_batch=64",
    "train.precision=bf16",
    "data.sequence_length=1024",
]


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--means", nargs="+", choices=MEANS, default=list(MEANS))
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, of all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(width=160, highlight=False)
    parts: dict[str, float] = {}
    for name in options.models:
        for means in options.means:
            graph = f"strategy.graph={{{MEANS[means]}}}"
            overrides = [*TRAINING, *MODELS[name], graph, *options.overrides]
            config = composed(rewritten([*overrides, "mode=plan"]))
            try:
                request = read_request(config, {"hardware": "dgx_a100", "strategy": "dp"})
                plan = resolve_request(request).plan
            except RequestError as error:
                console.print(f"{name}, {means}: refused: {' '.join(str(error).split())}")
                continue
            model = model_of(request, plan)
            rehearsal = rehearse(request, plan, model, chosen(plan, "kinds"), 2)
            for kind in rehearsal.kinds:
                case = f"{name}, {means}, rank {kind.rank}"
                if kind.error:
                    console.print(f"{case}: {kind.error} at {kind.place}")
                    continue
                parts[case] = kind.peak / kind.planned - 1
                uses = ", ".join(
                    f"{use[:5]} {kind.peak_bytes[use] / 1e6:,.0f} "
                    f"({kind.planned_bytes[use] / 1e6:,.0f})"
                    for use in kind.planned_bytes
                )
                sizes = f"{kind.peak / 1e6:,.0f} MB, planned {kind.planned / 1e6:,.0f} MB"
                console.print(f"{case}: {parts[case]:+.1%}: {sizes}: {uses}", soft_wrap=True)
    if parts:
        off = [abs(part) for part in parts.values()]
        console.print(f"off by {median(off):.1%} in the median of {len(off)} kinds of rank")
        under = sorted((case for case in parts if parts[case] > 0.03), key=lambda x: -parts[x])
        console.print(f"planned more than 3% too low: {'; '.join(under) or 'none'}")


if __name__ == "__main__":
    main()
