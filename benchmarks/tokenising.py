"""Time the tokenising of one corpus, into our store of tokens and with `datasets.map`.

    python benchmarks/tokenising.py [--megabytes 1000] [--turns 2]

Both sides have the same tokenizer (a byte-level BPE of 32,768 tokens, trained on the texts), the
same jsonl file, one process or thread for each core, and no cache. The sides take turns. Our side
ends with a store from which samples can be read. The side of `datasets` ends with lists of token
ids that are not packed yet.
"""

import argparse
import json
import os
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "true"

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from whale_train.data.tokens.make_store import StoreRequest, open_store
from whale_train.machine.limits import cores


def write(folder: Path, megabytes: float) -> None:
    """Write a corpus, which repeats the source of Python's standard library, and a tokenizer
    trained on that source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = [
        x.read_text(encoding="utf-8", errors="ignore") for x in sorted(root.rglob("*.py"))[:800]
    ]
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learning = trainers.BpeTrainer(
        vocab_size=32_768, special_tokens=["<end>"], initial_alphabet=alphabet
    )
    own.train_from_iterator(texts, learning)
    (folder / "tokenizer").mkdir()
    own.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    path = folder / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    left, number = megabytes * 1e6, 0
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        while left > 0:
            text = texts[number % len(texts)]
            for start in range(0, len(text), 4000):
                line = json.dumps({"id": number, "text": text[start : start + 4000]}) + "\n"
                file.write(line)
                left -= len(line)
            number += 1


def ours(folder: Path) -> int:
    """Tokenise into our store, and return the number of tokens."""
    request = StoreRequest((str(folder / "corpus.jsonl"),), ("text",), str(folder / "tokenizer"))
    store = open_store(request, folder / "cache")
    shutil.rmtree(folder / "cache")
    return store.description.num_tokens


def theirs(folder: Path) -> int:
    """Tokenise with `datasets.map`, and return the number of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    end = tokenizer.eos_token_id
    cache = str(folder / "hf_cache")
    rows = datasets.load_dataset(
        "json", data_files=str(folder / "corpus.jsonl"), split="train", cache_dir=cache
    )

    def encoded(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = [[*x, end] for x in tokenizer(batch["text"])["input_ids"]]
        return {"input_ids": ids}

    done = rows.map(encoded, batched=True, num_proc=cores(), remove_columns=rows.column_names)
    count = sum(len(chunk.flatten()) for chunk in done.data.column("input_ids").chunks)
    shutil.rmtree(cache)
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=1000.0)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    sides: dict[str, Callable[[Path], int]] = {"ours": ours, "datasets.map": theirs}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder, options.megabytes)
        size = (folder / "corpus.jsonl").stat().st_size
        print(f"{size / 1e6:.0f} MB of jsonl, {cores()} cores")
        for _ in range(options.turns):
            for name, side in sides.items():
                started = time.perf_counter()
                tokens = side(folder)
                seconds = time.perf_counter() - started
                rate = size / 1e6 / seconds
                print(f"{name:<14}{seconds:8.1f} s {rate:8.1f} MB/s  {tokens:,} tokens", flush=True)


if __name__ == "__main__":
    main()
