"""Rehearse the ranks of every shipped strategy, and compare their memory with the plans.

    python benchmarks/rehearsals.py --hardware v100_p100_mix dgx_a100_2 v100_512

Every strategy in `conf/strategy` is planned for every model and cluster. Of each plan, one rank of
every kind is rehearsed (`mode=rehearse`), or of some kinds if there are many: a pipeline over 512
devices has 512 kinds. The output has the faults, and the deviation of peak memory from the plan. No
GPU is needed.
"""

import argparse
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console

from whale_train.config import Request, read_request
from whale_train.errors import RequestError
from whale_train.launcher.compose.command_line import composed, rewritten
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.rehearsal import Rehearsal
from whale_train.runtime.rehearse.main import chosen, model_of, rehearse
from whale_train.strategies.search.shipped import strategy_files

CLUSTERS = {
    "v100_p100_mix": ["hardware=v100_p100_mix", "train.global_batch=64"],
    "dgx_a100_2": [
        "hardware=dgx_a100",
        "hardware.nodes=[{count: 2, devices: 8, device: a100_sxm_80gb, link: nvlink3}]",
        "train.global_batch=64",
    ],
    "v100_512": ["hardware=v100_512", "train.global_batch=1024", "train.precision=fp16"],
}
_LLAMA = (
    "vocab_size: 32000, hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 8, "
    "num_attention_heads: 16, num_key_value_heads: 4, max_position_embeddings: 2048"
)
_VIT = (
    "hidden_size: 768, num_hidden_layers: 6, num_attention_heads: 12, intermediate_size: 3072, "
    "image_size: 224, num_labels: 1000"
)
MODELS = {
    "gpt": ["model=gpt"],
    "bert_large": ["model=bert_large"],
    "t5_large": ["model=t5_large"],
    "moe_gpt": ["model=moe_gpt"],
    "class_head": ["model=class_head", "data=classes"],
    "image_classifier": ["model=image_classifier", "data=images"],
    "hf_llama": ["model=hf", "model.architecture=LlamaForCausalLM", f"model.config={{{_LLAMA}}}"],
    "hf_vit": [
        *("model=hf", "model.architecture=ViTForImageClassification"),
        *(f"model.config={{{_VIT}}}", "data=images"),
    ],
}


@dataclass(frozen=True)
class Off:
    """The deviation of a rehearsed rank's peak memory from the plan.

    case: the cluster, model and strategy.
    rank: number of the rank.
    part: the deviation, as a fraction of the planned bytes.
    """

    case: str
    rank: int
    part: float


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--hardware", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", default=list(strategy_files()))
    parser.add_argument("--kinds", type=int, default=16, help="of rank, of a plan, at most")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, of all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console = Console(width=160, highlight=False)
    offs: list[Off] = []
    for hardware in options.hardware:
        for name in options.models:
            model = None
            for strategy in options.strategies:
                case = f"{hardware} {name} {strategy}"
                overrides = [*CLUSTERS[hardware], *MODELS[name], f"strategy={strategy}"]
                started = time.perf_counter()
                try:
                    request = _request([*overrides, *options.overrides], hardware, strategy)
                    plan = resolve_request(request).plan
                except RequestError as error:
                    console.print(f"{case}: refused: {' '.join(str(error).split())[:100]}")
                    continue
                planned_s = time.perf_counter() - started
                # A model with an exported graph serves all strategies. It replaces a model without.
                if model is None or (model.graph is None and plan.rewrite is not None):
                    model = model_of(request, plan)
                kinds = _some(chosen(plan, "kinds"), options.kinds)
                rehearsal = rehearse(request, plan, model, kinds, options.processes)
                offs += _said(console, case, rehearsal, planned_s)
    if offs:
        parts = sorted((abs(x.part) for x in offs), reverse=True)
        worst = [f"{x.case} rank {x.rank} {x.part:+.1%}" for x in _worst(offs)]
        console.print(f"{len(offs)} kinds of rank; memory off by {median(parts):.1%} in the median")
        console.print(f"over 10%: {sum(x > 0.1 for x in parts)}; the worst: {'; '.join(worst)}")


def _some(kinds: Sequence[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
    """Return at most `most` of a plan's kinds of rank, evenly spaced, the first and the last
    included."""
    number = min(most, len(kinds))
    return [kinds[i * (len(kinds) - 1) // max(number - 1, 1)] for i in range(number)]


def _request(overrides: list[str], hardware: str, strategy: str) -> Request:
    config = composed(rewritten([*overrides, "mode=plan"]))
    return read_request(config, {"hardware": hardware, "strategy": strategy})


def _said(console: Console, case: str, rehearsal: Rehearsal, planned_s: float) -> list[Off]:
    """Print the outcome of a rehearsal, and return the deviations of the ranks' memory."""
    offs = [
        Off(case, x.rank, x.peak / x.planned - 1)
        for x in rehearsal.kinds
        if not x.error and x.planned
    ]
    errors = {f"{x.error[:100]} at {x.place[-90:]}" for x in rehearsal.kinds if x.error}
    span = f"{min(x.part for x in offs):+.1%} to {max(x.part for x in offs):+.1%}" if offs else ""
    said = [f"{len(rehearsal.kinds)} kinds", span, *sorted(errors), *rehearsal.faults[:2]]
    seconds = f"{planned_s:.0f} + {rehearsal.seconds:.0f} s"
    console.print(f"{case}: {'; '.join(filter(None, said))} ({seconds})", soft_wrap=True)
    return offs


def _worst(offs: list[Off]) -> list[Off]:
    return sorted(offs, key=lambda x: -abs(x.part))[:12]


if __name__ == "__main__":
    main()
