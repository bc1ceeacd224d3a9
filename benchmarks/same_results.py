"""Compare the plans and losses of two trees of this project, to the digit.

    python benchmarks/same_results.py write before --command ../other/.venv/bin/whale-train
    python benchmarks/same_results.py write after
    python benchmarks/same_results.py compare before after

`write` fills a folder with the plan, or the refusal, of every strategy in `conf/strategy` for four
models on four inventories, and with the losses and gradient norms of a dozen short jobs. It uses
nothing but the command, so it works with any tree. `compare` prints all differences, and has exit
status 1 if there is any. After a refactoring it prints none.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

_BERT = (
    "vocab_size: 1000, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, "
    "intermediate_size: 128, max_position_embeddings: 64"
)
MODELS = {
    "gpt": ["model=gpt"],
    "class_head": ["model=class_head", "data=classes"],
    "moe_gpt": ["model=moe_gpt"],
    "bert": [
        *("model=hf", "model.architecture=BertForMaskedLM", "data.sequence_length=32"),
        f"model.config={{{_BERT}}}",
    ],
}
CLUSTERS = {
    "cpu_2": ["hardware=cpu", "hardware.devices=2"],
    "cpu_4": ["hardware=cpu", "hardware.devices=4"],
    "v100_p100_mix": ["hardware=v100_p100_mix"],
    "v100_512": ["hardware=v100_512", "train.global_batch=1024", "train.precision=fp16"],
}
# (model, devices, further overrides)
PARTS = ("plans", "losses")
_SHORT = ("train.steps=4", "train.global_batch=8", "checkpoint.final=false")
JOBS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "dp": ("gpt", 2, ("strategy=dp", "train.accumulate=2")),
    "zero1": ("gpt", 2, ("strategy=zero1", "train.grad_clip=0.5")),
    "zero2": ("gpt", 2, ("strategy=zero2", "train.precision=bf16")),
    "zero3": ("bert", 2, ("strategy=zero3",)),
    "hybrid_split_dp": ("class_head", 2, ("strategy=hybrid_split_dp",)),
    "hybrid_tied": ("bert", 2, ("strategy=hybrid_split_dp", "train.accumulate=2")),
    "experts_dp": ("moe_gpt", 2, ("strategy=experts_dp",)),
    "split": ("gpt", 2, ("strategy=split", "train.precision=bf16")),
    "split_sequence": ("bert", 2, ("strategy=split_sequence",)),
    "split_dp": ("moe_gpt", 4, ("strategy=split_dp", "strategy.graph.replicate.of.split.degree=2")),
    "pipeline": ("gpt", 4, ("strategy=pipeline", "optimizer=lamb")),
    "zero_bubble": ("gpt", 4, ("strategy=zero_bubble",)),
    "zero1_pipeline": ("bert", 4, ("strategy=zero1_pipeline", "train.global_batch=16")),
}
# The reason for a missing plan in the output of a comparison: all indented lines below the name.
_REFUSAL = r"^{} cannot be:\n((?:  [^\n]*\n)+)"
# Durations in the decisions of a plan, which differ from run to run.
_TOOK = re.compile(r"\b\d+(\.\d+)? (ms|s)\b")


def main() -> int:
    """Run this script, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    writes = verbs.add_parser("write", help="leave this tree's plans and losses in a folder")
    writes.add_argument("folder", type=Path)
    writes.add_argument("--command", default=str(Path(sys.executable).with_name("whale-train")))
    writes.add_argument("--without", nargs="*", default=[], help="strategies to leave out")
    writes.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    compares = verbs.add_parser("compare", help="print what differs between two such folders")
    compares.add_argument("folders", type=Path, nargs=2)
    options = parser.parse_args()
    if options.verb == "compare":
        return compare(*options.folders)
    if "plans" in options.parts:
        write_plans(options.folder, options.command, set(options.without))
    if "losses" in options.parts:
        write_losses(options.folder, options.command)
    return 0


def write_plans(folder: Path, command: str, without: set[str]) -> None:
    """Write the plan of every strategy, or the reason of its refusal, into `folder`.

    folder: the folder, with a subfolder for each model and inventory.
    command: the path of the `whale-train` program.
    without: names of strategies to leave out.
    """
    console = Console(soft_wrap=True)
    strategies = Path(__file__).parents[1] / "conf" / "strategy"
    names = sorted(path.stem for path in strategies.glob("*.yaml") if path.stem not in without)
    for model, of_model in MODELS.items():
        for cluster, of_cluster in CLUSTERS.items():
            together = f"compare=[{','.join(names)}]"
            run, said, out = answer(command, [*of_model, *of_cluster, "mode=plan", together])
            target = folder / "plans" / model / cluster
            target.mkdir(parents=True, exist_ok=True)
            for name in names:
                plan = run / "plans" / f"{name}.json"
                why = {"refused": said}
                if refusal := re.search(_REFUSAL.format(name), out, re.MULTILINE):
                    why = {"refused": " ".join(refusal[1].split())}
                text = plan.read_text() if plan.exists() else json.dumps(why)
                (target / f"{name}.json").write_text(text)
            shutil.rmtree(run, ignore_errors=True)
            console.print(f"{model} on {cluster}: {len(names)} strategies")


def write_losses(folder: Path, command: str) -> None:
    """Write the losses and gradient norms of every job into `folder`.

    command: the path of the `whale-train` program.
    """
    console = Console(soft_wrap=True)
    (folder / "losses").mkdir(parents=True, exist_ok=True)
    for name, (model, devices, overrides) in JOBS.items():
        where = ["hardware=cpu", f"hardware.devices={devices}"]
        run, said, _ = answer(command, [*MODELS[model], *where, *_SHORT, *overrides])
        metrics = run / "metrics.jsonl"
        steps = metrics.read_text().splitlines() if metrics.exists() else []
        records = [{key: json.loads(x)[key] for key in ("loss", "grad_norm")} for x in steps]
        (folder / "losses" / f"{name}.json").write_text(json.dumps(records or {"failed": said}))
        shutil.rmtree(run, ignore_errors=True)
        console.print(f"losses of {name}: {len(records)} steps")


def answer(command: str, given: list[str]) -> tuple[Path, str, str]:
    """Run the command, and return the run directory, the error text and the output.

    command: the path of the `whale-train` program.
    given: the overrides.

    The error text is '' where the command succeeded.
    """
    run = Path(tempfile.mkdtemp(prefix="whale-same-"))
    environment = os.environ | {"WHALE_TRAIN_CALIBRATIONS": str(run / "none"), "COLUMNS": "200"}
    arguments = [command, *given, f"hydra.run.dir={run}"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    errors = "" if done.returncode == 0 else done.stderr.replace(str(run), "RUN")
    return run, errors, done.stdout


def compare(before: Path, after: Path) -> int:
    """Print the differences between the files of two folders. Return 1 if there is any, else 0."""
    console = Console(soft_wrap=True)
    files = sorted({p.relative_to(x) for x in (before, after) for p in x.rglob("*.json")})
    different = 0
    for file in files:
        sides = [read(folder / file) for folder in (before, after)]
        lines = list(differences("", *sides))
        different += bool(lines)
        for line in lines:
            console.print(f"{file}: {line}", markup=False)
    console.print(f"{len(files)} files, {different} of them different")
    return int(different > 0)


def read(path: Path) -> Any:
    """Return the content of a file of `write`, with durations masked; None for a missing file."""
    if not path.exists():
        return None
    content = json.loads(path.read_text())
    if isinstance(content, dict) and "decisions" in content:
        content["decisions"] = json.loads(_TOOK.sub("N s", json.dumps(content["decisions"])))
    return content


def differences(place: str, before: Any, after: Any) -> Iterator[str]:
    """Yield a line for every place at which two JSON values differ.

    place: the path of both values, for the lines.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from differences(f"{place}.{key}", before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(f"{place}[{number}]", one, other)
    elif before != after:
        yield f"{place}: {json.dumps(before)[:200]} -> {json.dumps(after)[:200]}"


if __name__ == "__main__":
    sys.exit(main())
