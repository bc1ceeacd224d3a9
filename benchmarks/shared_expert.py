"""A mixture with a shared expert over hosts: rows come back under its products, or before them.

sudo python benchmarks/shared_expert.py

The hosts are network namespaces of this machine (hosts.py).
"""

import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import sides
from between_hosts import Bench, options_of
from interleave import Running, Side

from whale_train.runtime.graph import shard_graph

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
        under, before = (
            sides.ours(name, request, plan, Path(folder))
            for name in ("rows come under products", "rows come before products")
        )
        before = Side(before.name, partial(_awaited, before.start), before.huge_pages)
        bench.compare(words, [under, before], before.name)


def _awaited(start: "partial[Running]", rank: int) -> Running:
    """Return the side of `start` on rank `rank`, made to wait for rows at once."""
    with patch.object(shard_graph, "delay_combines", lambda graph: None):
        return start(rank)


if __name__ == "__main__":
    main()
