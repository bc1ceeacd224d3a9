"""Compare two ways to return rows beside a shared expert: during its products, or after them.

sudo python benchmarks/shared_expert.py

The hosts are network namespaces of this machine (hosts.py).
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import sides
from between_hosts import Bench, options_of

from whale_train.strategies.graph.rewrites import OVERLAPPED_ROWS
from whale_train.strategies.plan.plan import Plan

CONFIG = (
    "{{vocab_size: 257, hidden_size: {width}, num_hidden_layers: {depth}, num_attention_heads: 4, "
    "num_key_value_heads: 4, max_position_embeddings: {sequence}, intermediate_size: 64, "
    "moe_intermediate_size: {ffn}, num_experts: {experts}, num_experts_per_tok: {top_k}, "
    "shared_expert_intermediate_size: {shared}, decoder_sparse_step: 1}}"
)


def main() -> None:
    parser = options_of(__doc__, hosts=2, gbit=1.0)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=64, help="hidden units of an expert")
    parser.add_argument("--shared", type=int, default=512, help="hidden units of the shared one")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences a host")
    options = parser.parse_args()
    bench = Bench(options)
    request, plan = sides.resolved(
        [
            *("model=hf", "model.architecture=Qwen2MoeForCausalLM"),
            f"model.config={CONFIG.format(**vars(options))}",
            *("data=text", f"data.sequence_length={options.sequence}", "strategy=experts_dp"),
            *("optimizer=sgd", "optimizer.lr=0.01", "optimizer.schedule=constant"),
            *("hardware=cpu", f"hardware.devices={options.hosts}"),
            f"train.global_batch={options.batch * options.hosts}",
        ],
        bench.turns.total_steps,
    )
    words = f"{options.experts} experts of {options.width} x {options.ffn}, top {options.top_k}, "
    words += f"beside one of {options.shared}, {options.depth} layers, "
    words += f"{options.batch * options.sequence} tokens a host"
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        under, apart = (
            sides.ours(name, request, of, Path(folder))
            for name, of in (
                ("rows come under products", plan),
                ("rows come after products", _without_overlap(plan)),
            )
        )
        bench.compare(words, [under, apart], apart.name)


def _without_overlap(plan: Plan) -> Plan:
    """Return `plan` without the overlap: ranks send rows back only when an operation reads them."""
    assert plan.rewrite is not None
    segments = (
        replace(x, rewrites=tuple(of for of in x.rewrites if of.kind != OVERLAPPED_ROWS))
        for x in plan.rewrite.segments
    )
    return replace(plan, rewrite=replace(plan.rewrite, segments=tuple(segments)))


if __name__ == "__main__":
    main()
