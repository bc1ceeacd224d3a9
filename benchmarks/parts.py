"""Compare split modules beside replicated ones with full replicas and full splits, on hosts.

sudo python benchmarks/parts.py

The hosts are network namespaces of this machine (hosts.py).
"""

import tempfile
from pathlib import Path

import sides
from between_hosts import Bench, options_of

STRATEGIES = {
    "copies": "strategy=dp",
    "MLPs beside copies": (
        'strategy.graph=[{replicate: {}}, {split: {modules: ["*.expand", "*.contract"]}}]'
    ),
    "all weights beside copies": "strategy.graph=[{replicate: {}}, {split: {dim: tensor}}]",
    "split by sequence": "strategy=split_sequence",
}


def main() -> None:
    parser = options_of(__doc__, hosts=2, gbit=1.0)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4, help="sequences a host")
    options = parser.parse_args()
    bench = Bench(options)
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        compared = []
        for name, strategy in STRATEGIES.items():
            asked = [
                *("model=gpt", f"model.width={options.width}", f"model.depth={options.depth}"),
                *(
                    f"model.heads={options.width // 64}",
                    f"model.sequence_length={options.sequence}",
                ),
                *("data=text", f"data.sequence_length={options.sequence}", strategy),
                *("optimizer=sgd", "optimizer.lr=0.01", "optimizer.schedule=constant"),
                *("hardware=cpu", f"hardware.devices={options.hosts}"),
                f"train.global_batch={options.batch * options.hosts}",
            ]
            resolved = sides.resolved(asked, bench.turns.total_steps)
            compared.append(sides.ours(name, *resolved, Path(folder)))
        words = f"GPT of {options.width} x {options.depth}, "
        words += f"{options.batch * options.sequence} tokens a host"
        bench.compare(words, compared, "copies")


if __name__ == "__main__":
    main()
