"""Measure whether steps and memory grow with the corpus that `data=text_files` reads.

    python benchmarks/corpus.py [--gigabytes 0.01 1 10] [--pack concat] [--turns 2]

The script writes stores of random tokens in the format of tokenising, with documents of 800 tokens
on average. For each size and turn, two new processes train a GPT of one narrow layer:

- in batches of 64 x 1,024 tokens, to time the reading of a batch and the step;
- in batches of 1 x 1,024 tokens, to measure the peak memory, little of which is the model's.

The first size is the baseline, a store that fits into the page cache. Before a process starts, its
store is dropped from the page cache, so that the process reads from the disk.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table
from sides import CPU, Ours, resolved
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from whale_train.data.sources import text_files
from whale_train.data.tokens.packed_layouts import layout_of
from whale_train.data.tokens.token_store import Special, StoreWriter, TokenStore
from whale_train.runtime.comms.process_groups import file_rendezvous, join, leave
from whale_train.runtime.process import rank_main as worker

_VOCABULARY = 2048
_LENGTH, _BATCH = 1024, 64
_BLOCK = 20_000_000  # number of tokens written at once
_WARM = 2  # number of first steps that do not count


def write_store(folder: Path, gigabytes: float, pack: str) -> None:
    """Write a store whose tokens take `gigabytes` GB, with the layout of the packing `pack`."""
    rng = np.random.default_rng(0)
    writer = StoreWriter(folder, _VOCABULARY, Special(eos=0))
    left = int(gigabytes * 1e9 / 2)
    while left:
        count = min(left, _BLOCK)
        tokens = rng.integers(1, _VOCABULARY, count, np.uint16)
        cuts = np.cumsum(rng.geometric(1 / 800, count // 400))
        writer.add(np.split(tokens, cuts[cuts < count]), None, ends=True)
        left -= count
    writer.close(0)
    layout_of(TokenStore(folder), pack, _LENGTH)


def drop_pages(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def measured(folder: Path, pack: str, batch: int, steps: int) -> dict[str, float]:
    """Train on the store in `folder`, and return the median seconds of reading a batch (`read_s`)
    and of a step (`step_s`), and this process's peak memory in bytes (`peak`)."""
    overrides = [
        *("hardware=cpu", "hardware.devices=1", "model=gpt", f"model.vocab_size={_VOCABULARY}"),
        *("model.depth=1", "model.width=32", "model.heads=2", f"model.sequence_length={_LENGTH}"),
        *("data=text_files", "data.path=unused", f"data.tokenizer={folder.parent}/tokenizer"),
        *(f"data.sequence_length={_LENGTH}", f"data.pack.mode={pack}"),
        *(f"train.global_batch={batch}", "train.accumulate=1"),
    ]
    with (
        tempfile.TemporaryDirectory() as run_dir,
        mock.patch.object(text_files, "open_store", return_value=TokenStore(folder)),
        mock.patch.object(text_files, "corpus_files", return_value=("unused",)),
    ):
        request, plan = resolved(overrides, steps)
        prepared = worker.prepare(request)
        join(file_rendezvous(Path(run_dir)), 0, 1, CPU)
        side = Ours(Path(run_dir), plan, prepared, 0)
        step_s = []
        for step in range(steps):
            started = time.perf_counter()
            side.step(step, grad_norm=True)
            step_s.append(time.perf_counter() - started)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        training, read_s = prepared.data.training, []
        rng = np.random.default_rng(1)
        for _ in range(20):
            rows = rng.integers(0, training.num_samples, batch)
            started = time.perf_counter()
            training.samples(rows)
            read_s.append(time.perf_counter() - started)
        del side
        leave()
    return {"read_s": median(read_s), "step_s": median(step_s[_WARM:]), "peak": peak}


def in_a_process(folder: Path, pack: str, batch: int, steps: int) -> dict[str, float]:
    """Return the result of `measured` in a new process, with the store dropped from the page
    cache."""
    drop_pages(folder)
    arguments = ["--child", str(folder), "--pack", pack, "--batch", str(batch)]
    command = [sys.executable, __file__, *arguments, "--steps", str(steps)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with the vocabulary of the stores."""
    words = {f"t{number}": number for number in range(_VOCABULARY)}
    own = Tokenizer(models.WordLevel(words, unk_token="t1"))
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="t0").save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[0.01, 1.0, 10.0])
    parser.add_argument("--pack", choices=["concat", "best_fit"], default="concat")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="for the stores; by default a temporary one")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=_BATCH, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child, options.pack, options.batch, options.steps)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        write_tokenizer(Path(place) / "tokenizer")
        folders = {size: Path(place) / f"{size:g}" for size in options.gigabytes}
        for size, folder in folders.items():
            write_store(folder, size, options.pack)
        figures: dict[float, list[dict[str, float]]] = {size: [] for size in folders}
        for _ in range(options.turns):
            for size, folder in folders.items():
                timed = in_a_process(folder, options.pack, _BATCH, options.steps)
                small = in_a_process(folder, options.pack, 1, 10 * options.steps)
                figures[size].append({**timed, "peak": small["peak"]})
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("tokens", "read 64 x 1,024", "step", "of the first", "peak", "of the first"):
        table.add_column(column, justify="right")
    middle = {
        size: {key: median(one[key] for one in turns) for key in turns[0]}
        for size, turns in figures.items()
    }
    first = next(iter(middle.values()))
    for size, one in middle.items():
        table.add_row(
            f"{size:g} GB",
            f"{one['read_s'] * 1e3:.1f} ms",
            f"{one['step_s'] * 1e3:.0f} ms",
            f"{one['step_s'] / first['step_s'] - 1:+.1%}",
            f"{one['peak'] / 1e6:.1f} MB",
            f"{one['peak'] / first['peak'] - 1:+.1%}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
