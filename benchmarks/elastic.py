"""Show that logical workers compute the same bits on any number of processes, and what that costs.

python benchmarks/elastic.py
python benchmarks/elastic.py --no-times
python benchmarks/elastic.py --no-bits --processes 1 --rounds 40

The first table trains models with batch norms, dropout, embeddings and attention for some steps by
`whale-train strategy=elastic_dp strategy.logical_workers=8`, on 1, 2, 3, 4 and 8 processes, and in
one run that changes from 4 to 2 to 3 processes. It shows the SHA-256 of the parameters after the
last step, and says whether those after every step are equal. Data parallelism on 1, 2 and 4
processes is shown beside it.

The second table times a step of a GPT of ten million parameters, side by side: on 8 processes, with
data parallelism and with a logical worker on each; and on one process, with the gradients of 8
micro-batches accumulated and with 8 logical workers, between which it changes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import sides
from interleave import Turns, interleaved, show
from overhead import SHAPE
from rich.console import Console
from rich.table import Table

from whale_train.runtime.process.preload import preload

WORKERS = 8
COUNTS = (1, 2, 3, 4, 8)
CHANGES = (4, 2, 3)
BERT = "{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64}"
MODELS = {
    "ResNet: batch norms": ("model=image_classifier", "model.width=8", "data=digits"),
    "BERT: embeddings, attention, dropout": (
        *("model=hf", "model.architecture=BertForMaskedLM", f"model.config={BERT}"),
        *("data=text", "data.sequence_length=16"),
    ),
    "GPT: embeddings, attention": ("model=gpt", "model.width=32", "data.sequence_length=16"),
}


def main() -> None:
    words = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("--bits", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--times", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--steps", type=int, default=9, help="steps of each run")
    parser.add_argument(
        "--processes",
        type=int,
        nargs="+",
        choices=(WORKERS, 1),
        default=[WORKERS, 1],
        help="to time",
    )
    parser.add_argument("--rounds", type=int, default=20, help="turns a side")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="whale-bench-") as folder:
        if options.bits:
            show_bits(Path(folder), options.steps)
        if options.times:
            preload()
            show_times(Path(folder), options.processes, options.rounds)


def show_bits(folder: Path, steps: int) -> None:
    """Print the hashes of all models after `steps` steps."""
    table = Table("model", "processes", "dp", "elastic_dp", "at every step", title="SHA-256")
    for number, (model, overrides) in enumerate(MODELS.items()):
        first: list[str] = []
        for count in COUNTS:
            run = folder / f"{number}_{count}"
            plain = hashes(run / "dp", [*overrides, "strategy=dp"], count, steps)
            got = hashes(run / "elastic", [*overrides, *elastic()], count, steps)
            first = first or got
            same = "equal" if got == first else "UNEQUAL"
            table.add_row(model, str(count), plain[-1][:16], got[-1][:16], same)
        got = []
        for turn, count in enumerate(CHANGES, 1):
            until = steps * turn // len(CHANGES)
            got = hashes(folder / f"{number}", [*overrides, *elastic()], count, until, resumes=True)
        same = "equal" if got == first else "UNEQUAL"
        path = " -> ".join(map(str, CHANGES))
        table.add_row(model, path, "", got[-1][:16], same, end_section=True)
    Console(width=150).print(table)


def elastic() -> Sequence[str]:
    return "strategy=elastic_dp", f"strategy.logical_workers={WORKERS}"


def hashes(
    run_dir: Path, overrides: Sequence[str], processes: int, steps: int, *, resumes: bool = False
) -> list[str]:
    """Return the SHA-256 of the parameters after each of the first `steps` steps of a run."""
    command = [
        *(sys.executable, "-m", "whale_train.launcher.cli", *overrides, "hardware=cpu"),
        *(f"hardware.devices={processes}", f"hydra.run.dir={run_dir}", f"train.steps={steps}"),
        *(f"train.global_batch={2 * WORKERS}", "train.parameters_sha256=true"),
        *("train.report=false", f"checkpoint.final={str(resumes).lower()}"),
        *(("train.resume=auto",) if resumes else ()),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["parameters_sha256"] for line in lines]


def show_times(folder: Path, counts: Sequence[int], rounds: int) -> None:
    """Print the times of a step, on each of `counts` processes."""
    common = [
        *("model=gpt", *(f"model.{key}={value}" for key, value in SHAPE.items())),
        *(f"data.sequence_length={SHAPE['sequence_length']}", "hardware=cpu", "optimizer=adamw"),
    ]
    pairs = {
        WORKERS: {"dp": ["strategy=dp"], "elastic_dp": [*elastic()]},
        1: {
            "accumulated": ["strategy=dp", f"train.accumulate={WORKERS}"],
            "elastic_dp": [*elastic()],
        },
    }
    for processes in counts:
        compared = pairs[processes]
        turns = Turns(rounds, 3, warm_up=2)
        made = []
        for name, overrides in compared.items():
            wanted = [*common, *overrides, f"hardware.devices={processes}"]
            wanted.append(f"train.global_batch={2 * WORKERS}")
            request, plan = sides.resolved(wanted, turns.total_steps)
            made.append(sides.ours(name, request, plan, folder))
        results = interleaved(made, processes, 1, turns)
        title = f"GPT of 10 M, AdamW, {processes} processes, {2 * WORKERS} sequences"
        show(title, results, [side.name for side in made[:1]], Console(width=150))


if __name__ == "__main__":
    main()
