"""A mixture with a shared expert over hosts: rows come back under its products, or before them.

sudo python benchmarks/shared_expert.py

The hosts are network namespaces of this machine (hosts.py).
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import sides
from hosts import Hosts
from interleave import Running, Side, Turns, interleaved, show
from rich.console import Console

from whale_train.runtime.graph import shard_graph
from whale_train.runtime.process.fork_server import num_threads, preload

CONFIG = (
    "{{vocab_size: 257, hidden_size: {width}, num_hidden_layers: {depth}, num_attention_heads: 4, "
    "num_key_value_heads: 4, max_position_embeddings: {sequence}, intermediate_size: 64, "
    "moe_intermediate_size: {ffn}, num_experts: {experts}, num_experts_per_tok: {top_k}, "
    "shared_expert_intermediate_size: {shared}, decoder_sparse_step: 1}}"
)


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--hosts", type=int, default=2, help="of a rank each")
    parser.add_argument("--gbit", type=float, default=1.0, help="rate of a host's link, Gbit/s")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=64, help="hidden units of an expert")
    parser.add_argument("--shared", type=int, default=512, help="hidden units of the shared one")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences a host")
    parser.add_argument("--rounds", type=int, default=5, help="turns a side")
    parser.add_argument("--steps", type=int, default=3, help="timed steps a turn")
    options = parser.parse_args()
    hosts = Hosts.make(options.hosts, options.gbit)  # before there are threads
    preload()
    console = Console(width=150)
    measured = hosts.measured_gbit_s()
    console.print(f"{options.hosts} hosts at {options.gbit:g} Gbit/s; measured {measured:.2f}")
    turns = Turns(options.rounds, options.steps)
    request, plan = sides.resolved(
        [
            *("model=hf", "model.architecture=Qwen2MoeForCausalLM"),
            f"model.config={CONFIG.format(**vars(options))}",
            *("data=text", f"data.sequence_length={options.sequence}", "strategy=experts_dp"),
            *("optimizer=sgd", "optimizer.lr=0.01", "optimizer.schedule=constant"),
            *("hardware=cpu", f"hardware.devices={options.hosts}"),
            f"train.global_batch={options.batch * options.hosts}",
        ],
        turns.total_steps,
    )
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        under, before = (
            sides.ours(name, request, plan, Path(folder))
            for name in ("rows come under products", "rows come before products")
        )
        before = Side(before.name, partial(_awaited, before.start), before.huge_pages)
        threads = num_threads(options.hosts)
        results = interleaved([under, before], options.hosts, threads, turns, hosts.move)
    words = f"{options.experts} experts of {options.width} x {options.ffn}, top {options.top_k}, "
    words += f"beside one of {options.shared}, {options.depth} layers, "
    words += f"{options.batch * options.sequence} tokens a host, {options.gbit:g} Gbit/s"
    show(words, results, [before.name], console)


def _awaited(start: "partial[Running]", rank: int) -> Running:
    """Set up a side whose ranks wait for rows at once."""
    with patch.object(shard_graph, "delay_combines", lambda graph: None):
        return start(rank)


if __name__ == "__main__":
    main()
