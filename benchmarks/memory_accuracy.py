"""Compare predicted with measured memory, for models and strategies that no figure was fitted to.

python benchmarks/memory_accuracy.py

The command trains every pair of model and strategy for a few steps. The memory that the plan
predicts for the heaviest rank is compared with the memory of the rank that used most.

*Measured* is the peak of a rank's resident memory from the second step on, as the kernel records it
(VmHWM of /proc/PID/status, which is reset after the first step, so that no peak is missed). In the
first step, a rank also has pages of the initial weights mapped, which all ranks of a host share.
The memory of the same ranks with a tiny model of the same kind is subtracted: Python, torch,
DeepSpeed, and all that a rank inherits from the host that forked it.

Fragmentation of malloc is memory of the process as well, and no plan predicts it. `--given-back`
runs the ranks under MALLOC_MMAP_THRESHOLD_, so that every freed block of 64 KiB or more returns to
the system. The ranks then use the memory that their tensors need, as on a GPU, and steps take
longer.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

from memory import descendants
from rich.console import Console
from rich.table import Table

MB = 1e6
RESET_PEAK = "5"  # to /proc/PID/clear_refs: see proc(5)
INTERVAL_S = 0.02
TINY_STEPS = 100  # steps of milliseconds, so many that the watching thread sees the ranks


def hugging_face(architecture: str, config: str) -> tuple[str, ...]:
    """Return the overrides for a model of transformers.

    config: the settings of the model, as YAML.
    """
    return "model=hf", f"model.architecture={architecture}", f"model.config={{{config}}}"


TEXT = ("data=text", "data.sequence_length=128")
MODELS: Mapping[str, tuple[str, ...]] = {
    "gpt": ("model=gpt", "model.width=384", "model.depth=8", "model.heads=6", *TEXT),
    "llama": (
        *hugging_face(
            "LlamaForCausalLM",
            "vocab_size: 8000, hidden_size: 384, intermediate_size: 1152, num_hidden_layers: 8, "
            "num_attention_heads: 6, num_key_value_heads: 2",
        ),
        *TEXT,
    ),
    "bert": (
        *hugging_face(
            "BertForMaskedLM",
            "vocab_size: 16000, hidden_size: 384, intermediate_size: 1536, num_hidden_layers: 6, "
            "num_attention_heads: 6",
        ),
        *("data.objective=masked", *TEXT),
    ),
    "vit": (
        *hugging_face(
            "ViTForImageClassification",
            "hidden_size: 384, intermediate_size: 1536, num_hidden_layers: 8, "
            "num_attention_heads: 6, image_size: 96, patch_size: 8, num_labels: 10",
        ),
        "data=images",
    ),
    "classes": ("model=class_head", "model.num_classes=40000", "data=classes"),
    "moe_gpt": ("model=moe_gpt", "model.width=384", "model.ffn=768", "model.heads=6", *TEXT),
}
SHORT = ("data=text", "data.sequence_length=8", "train.global_batch=8")
TINY = ("model=gpt", "model.width=16", *SHORT)
TINY_HUGGING_FACE = (
    *hugging_face(
        "LlamaForCausalLM",
        "vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 4, "
        "num_attention_heads: 2, num_key_value_heads: 2",
    ),
    *SHORT,
)


def pipeline(more: str = "", stages: str = "2") -> str:
    return f"strategy.graph={{pipeline: {{stages: {stages}, micro_batches: 4{more}}}}}"


STRATEGIES: Mapping[str, str] = {
    "dp": "strategy=dp",
    "zero1": "strategy=zero1",
    "zero2": "strategy=zero2",
    "zero3": "strategy=zero3",
    "split": "strategy=split",
    "pipeline": pipeline(),
    "zero_bubble": pipeline(", schedule: zero_bubble"),
    "interleaved": pipeline(", schedule: interleaved_1f1b"),
    "recompute": pipeline(
        stages="[{stage: {recompute: full, of: {replicate: {degree: 1}}}}, "
        "{stage: {recompute: full, of: {replicate: {degree: 1}}}}]"
    ),
    "split head": "strategy=hybrid_split_dp",
    "split head, zero3": (
        "strategy.graph=[{replicate: {modules: '*', zero: 3}}, {split: {modules: head}}]"
    ),
    "zero1 of splits": "strategy.graph={replicate: {zero: 1, of: {split: {degree: 2}}}}",
    "zero3 of splits": "strategy.graph={replicate: {zero: 3, of: {split: {degree: 2}}}}",
}
TWICE_AS_MANY = ("zero1 of splits", "zero3 of splits")  # ranks
SGD, BF16 = "optimizer=sgd", "train.precision=bf16"
# (model, strategy, samples of a step, further overrides)
PAIRS: Sequence[tuple[str, str, int, tuple[str, ...]]] = (
    ("gpt", "dp", 16, ()),
    ("gpt", "dp", 32, (SGD,)),
    ("gpt", "dp", 16, (BF16,)),
    ("gpt", "zero1", 16, ()),
    ("gpt", "zero2", 16, ()),
    ("gpt", "zero3", 16, ()),
    ("gpt", "split", 16, ()),
    ("gpt", "zero1 of splits", 16, ()),
    ("gpt", "zero3 of splits", 16, ()),
    ("gpt", "split head, zero3", 16, ()),
    ("gpt", "pipeline", 32, ()),
    ("gpt", "zero_bubble", 32, ()),
    ("gpt", "interleaved", 32, ()),
    ("gpt", "recompute", 64, ()),
    ("llama", "dp", 16, ()),
    ("llama", "zero3", 16, (SGD,)),
    ("llama", "split", 16, ()),
    ("llama", "zero3 of splits", 16, ()),
    ("llama", "pipeline", 32, (SGD,)),
    ("bert", "dp", 16, (SGD,)),
    ("bert", "zero1", 16, ()),
    ("bert", "split", 16, ()),
    ("bert", "pipeline", 32, ()),
    ("vit", "dp", 16, ()),
    ("vit", "split", 16, (SGD,)),
    ("vit", "pipeline", 32, ()),
    ("classes", "dp", 256, (SGD,)),
    ("classes", "zero1", 256, ()),
    ("classes", "split head", 256, ()),
    ("moe_gpt", "dp", 16, ()),
    ("moe_gpt", "split", 16, ()),
    ("moe_gpt", "pipeline", 32, (SGD,)),
)


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.formatter_class = words
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--ranks", type=int, default=2, help="twice as many of copies of splits")
    parser.add_argument("--steps", type=int, default=4, help="of a run")
    parser.add_argument("--given-back", action="store_true", help="have malloc leave no holes")
    options = parser.parse_args()
    rows: list[tuple[str, Mapping[str, float], float]] = []
    known: dict[tuple[tuple[str, ...], tuple[str, ...]], Mapping[int, int]] = {}
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        for model, strategy, batch, more in PAIRS:
            if model not in options.models or strategy not in options.strategies:
                continue
            run_dir = Path(tempfile.mkdtemp(dir=folder))
            ranks = options.ranks * (2 if strategy in TWICE_AS_MANY else 1)
            asked = (STRATEGIES[strategy], *more)
            batched = (*MODELS[model], f"train.global_batch={batch}", *asked)
            peaks = measure(batched, run_dir / "run", ranks, options.steps, options.given_back)
            tiny = TINY_HUGGING_FACE if "model=hf" in MODELS[model] else TINY
            if (tiny, asked) not in known:
                known[tiny, asked] = measure(
                    (*tiny, *asked), run_dir / "tiny", ranks, TINY_STEPS, options.given_back
                )
            empty = known[tiny, asked]
            taken = max(peaks[rank] - empty[rank] for rank in peaks)
            name = ", ".join([model, strategy, *(word.partition("=")[2] for word in more)])
            rows.append((name, heaviest(run_dir / "run"), taken))
            Console(stderr=True).print(f"{name}: {rows[-1][1]['total'] / taken:.3f}")
    Console(width=130).print(table_of(rows))


def table_of(rows: Sequence[tuple[str, Mapping[str, float], float]]) -> Table:
    """Return a table with a row for each pair, and a summary in the caption.

    rows: the name, the predicted bytes by kind of memory, and the measured bytes of each pair.
    """
    ratios = [parts["total"] / taken for _, parts, taken in rows]
    caption = (
        f"{len(rows)} pairs: median error {median(abs(ratio - 1) for ratio in ratios):.1%}, "
        f"most under {max(0.0, 1 - min(ratios)):.1%}, most over {max(0.0, max(ratios) - 1):.1%}"
    )
    title = "The heaviest rank, predicted by what holds it and measured, MB"
    table = Table(title=title, title_justify="left", caption=caption)
    table.add_column("model, strategy")
    parts = list(rows[0][1])
    for name in (*parts, "measured", "predicted / measured"):
        table.add_column(name.replace("total", "predicted"), justify="right")
    for (name, predicted, taken), ratio in zip(rows, ratios, strict=True):
        cells = (f"{x / MB:.0f}" for x in (*predicted.values(), taken))
        table.add_row(name, *cells, f"{ratio:.2f}")
    return table


def heaviest(run_dir: Path) -> Mapping[str, float]:
    """Return the bytes that the plan predicts for the heaviest rank, by kind of memory."""
    ranks = json.loads((run_dir / "plan.json").read_text())["ranks"]
    needs: list[dict[str, float]] = [rank["memory_bytes"] for rank in ranks]
    return max(needs, key=lambda need: need["total"])


def measure(
    asked: Sequence[str], run_dir: Path, ranks: int, steps: int, given_back: bool
) -> Mapping[int, int]:
    """Run the command, and return each rank's peak of resident bytes after the first step.

    asked: the overrides, without the devices and the steps.
    run_dir: the run directory.
    ranks: number of ranks.
    steps: number of steps.
    given_back: whether malloc returns freed blocks to the system.

    Exits the process where the command fails.
    """
    line = [sys.executable, "-m", "whale_train.launcher.cli", *asked]
    line += ["hardware=cpu", f"hardware.devices={ranks}", f"train.steps={steps}"]
    # The plan predicts the memory of steps, so the final weights, which map pages, are not written.
    line += ["checkpoint.final=false", f"hydra.run.dir={run_dir}"]
    threshold = {"MALLOC_MMAP_THRESHOLD_": str(2**16)} if given_back else {}
    with tempfile.TemporaryFile("w+") as output:
        environment = os.environ | threshold
        process = subprocess.Popen(line, stdout=output, stderr=output, env=environment)
        ended, peaks = threading.Event(), dict[int, int]()
        looking = threading.Thread(target=watch, args=(process.pid, run_dir, ended, peaks))
        looking.start()
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # the command then ends its ranks
            process.wait()
            raise
        finally:
            ended.set()
            looking.join()
        if status:
            output.seek(0)
            sys.exit(f"{' '.join(line)} failed:\n{output.read()}")
    return peaks


def watch(command: int, run_dir: Path, ended: threading.Event, peaks: dict[int, int]) -> None:
    """Write every rank's peak of resident bytes after the first step into `peaks`, until `ended` is
    set.

    command: the process id of the command.
    run_dir: the run directory.
    ended: set when the command has ended.
    peaks: receives the peaks, by rank.
    """
    ranks: dict[int, int] = {}  # the ranks whose peak was reset, by process id
    metrics = run_dir / "metrics.jsonl"
    while not ended.wait(INTERVAL_S):
        if not ranks and metrics.exists() and metrics.stat().st_size:
            for pid in descendants(command):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("whale-rank-"):
                    Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
                    ranks[pid] = int(name.rpartition("-")[2])
        for pid, rank in ranks.items():
            with suppress(OSError):  # the process has just ended
                status = Path(f"/proc/{pid}/status").read_text()
                peak = re.search(r"VmHWM:\s+(\d+) kB", status)
                if peak is not None:  # a process that is ending has no memory
                    peaks[rank] = int(peak[1]) * 1024


if __name__ == "__main__":
    main()
