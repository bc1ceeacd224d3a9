"""Train one user's project with whale-train, transformers' Trainer and Lightning's command line.

    python benchmarks/own_project/compare.py [--sides whale hf lightning]

The project has a GPT-2 of 4 layers, the user's own text and tokenizer, AdamW without weight decay
on norms and biases, a cosine schedule, clipping, evaluation, checkpoints, a tracker and two
processes. whale-train and Trainer start from the same weights and see the same samples in the same
order. Lightning seeds and orders by its own rules. The output has the number of lines that a user
writes, without comments and blank lines, and the losses on the validation text. Lightning needs
`pip install 'lightning[pytorch-extra]' tensorboard`.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
FILES = {
    "whale": ("conf/experiment/own_project.yaml",),
    "hf": ("hf_trainer.py",),
    "lightning": ("lightning_project.py", "lightning.yaml"),
}
PROCESSES = 2


def write_project(folder: Path) -> None:
    """Write texts from the source of Python's standard library, and a tokenizer trained on
    them."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    pieces = [
        piece
        for path in sources
        for piece in path.read_text(encoding="utf-8", errors="ignore").split("\n\n\n")
        if len(piece) > 200
    ]
    texts = {"valid": pieces[::20], "train": [x for i, x in enumerate(pieces) if i % 20]}
    for name, rows in texts.items():
        lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>"]
    learning = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=special, initial_alphabet=alphabet
    )
    own.train_from_iterator(texts["train"], learning)
    (folder / "tokenizer").mkdir()
    own.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0]}
    path = folder / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")


def num_lines(files: tuple[str, ...]) -> int:
    """Return the number of lines in `files`, without blank lines, comments and the module's
    docstring."""
    count = 0
    for file in files:
        text = re.sub(r'^""".*?"""', "", (HERE / file).read_text(encoding="utf-8"), flags=re.S)
        lines = (line.strip() for line in text.splitlines())
        count += sum(bool(line) and not line.startswith("#") for line in lines)
    return count


def run(command: list[str], folder: Path) -> str:
    """Run a command in the project's folder, and return the output. Raises CalledProcessError where
    the command fails."""
    threads = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **threads},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        sys.stderr.write(text)
        raise subprocess.CalledProcessError(done.returncode, command)
    return text


def whale(folder: Path) -> dict[int, float]:
    """Train with whale-train, and return the losses on the validation text by step."""
    shutil.copytree(HERE / "conf", folder / "conf")
    command = [str(Path(sys.executable).parent / "whale-train"), "--config-dir", "conf"]
    options = ["hardware=cpu", f"hardware.devices={PROCESSES}", "hydra.run.dir=whale_run"]
    run([*command, "experiment=own_project", "train.evaluation_samples=100000", *options], folder)
    lines = (folder / "whale_run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return {row["step"]: row["valid_loss"] for row in rows if "valid_loss" in row}


def hf(folder: Path) -> dict[int, float]:
    """Train with transformers' Trainer, and return the losses on the validation text by step."""
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(PROCESSES)]
    run([sys.executable, *start, str(HERE / "hf_trainer.py")], folder)
    (state,) = folder.glob("hf_run/checkpoint-200/trainer_state.json")
    log = json.loads(state.read_text(encoding="utf-8"))["log_history"]
    return {row["step"]: row["eval_loss"] for row in log if "eval_loss" in row}


def lightning(folder: Path) -> dict[int, float]:
    """Train with Lightning, and return the losses on the validation text by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = [sys.executable, str(HERE / "lightning_project.py"), "fit", "-c"]
    run([*command, str(HERE / "lightning.yaml")], folder)
    (events,) = folder.glob("lightning_run/**/events.*")
    read = EventAccumulator(str(events))
    read.Reload()
    return {event.step + 1: event.value for event in read.Scalars("valid_loss")}


SIDES: dict[str, Callable[[Path], dict[int, float]]] = {
    "whale": whale,
    "hf": hf,
    "lightning": lightning,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_project(folder)
        print(f"{'side':<12}{'lines':>6}  loss after 100 and 200 steps")
        for side in options.sides:
            losses = SIDES[side](folder)
            shown = "  ".join(f"{losses[step]:.5f}" for step in (100, 200))
            print(f"{side:<12}{num_lines(FILES[side]):>6}  {shown}", flush=True)


if __name__ == "__main__":
    main()
