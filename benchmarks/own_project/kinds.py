"""Define the kinds of data of `every_plan.py`: the files, the overrides and the plain readers.

A plain loop reads arrays, rows of a Hugging Face dataset and rows of a user's dataset without
whale-train. Samples of other kinds, and random samples of a user's dataset, are read by number
through whale-train's datasets.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from my_code import Counting, Layers
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from whale_train import compose
from whale_train.data.open import open_dataset
from whale_train.models.gpt import GPT
from whale_train.models.image_classifier import ImageClassifier

Numbers = NDArray[np.int64]
Batch = dict[str, Tensor]
ReadSamples = Callable[[Numbers, Numbers], Mapping[str, NDArray[Any]]]
LENGTH = 16  # tokens of a sample
SPECIAL = ("<end>", "<pad>", "<mask>", "<user>", "<assistant>")
WORDS = ("the", "a", "cat", "dog", "bird", "sat", "ran", "on", "under", "mat", "and", "then", "it")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end>{% if not loop.last %} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %} <assistant>{% endif %}"
)


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that the model's forward computes."""
    loss: Tensor = model(**batch).loss
    return loss


def logits_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy for a model whose forward returns logits."""
    return functional.cross_entropy(model(batch["pixel_values"]), batch["labels"])


def loss_of_documents(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss over the tokens of all documents, with a forward for each document.

    A document begins at each position whose `position_ids` are 0.
    """
    total, count = torch.zeros(()), 0
    for tokens, labels, positions in zip(
        batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
    ):
        starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
        for start, stop in pairwise(starts):
            targets = labels[start + 1 : stop]
            if (targets != -100).any():
                logits = model(input_ids=tokens[None, start:stop]).logits[0, :-1]
                total = total + functional.cross_entropy(logits, targets, reduction="sum")
                count += int((targets != -100).sum())
    return total / count


def of_dataset(overrides: Sequence[str]) -> tuple[int, ReadSamples]:
    """Return the number of samples in the dataset that `overrides` choose, and the dataset's
    reader."""
    dataset = open_dataset(compose(*overrides).data)
    return dataset.num_samples, dataset.samples


def of_arrays(overrides: Sequence[str]) -> tuple[int, ReadSamples]:
    """Return the number of rows in `arrays.npz`, and a reader of the rows."""
    arrays = dict(np.load("arrays.npz"))
    return len(arrays["labels"]), lambda rows, _: {name: x[rows] for name, x in arrays.items()}


def of_own(overrides: Sequence[str]) -> tuple[int, ReadSamples]:
    """Return the number of samples in the user's dataset, and a reader that pads them."""
    dataset = Counting()

    def read(rows: Numbers, _: Numbers) -> dict[str, Numbers]:
        batch = {"input_ids": np.zeros((len(rows), LENGTH), np.int64)}
        batch["labels"] = np.full_like(batch["input_ids"], -100)
        for at, row in enumerate(rows):
            for name, values in dataset[int(row)].items():
                batch[name][at, : len(values)] = values
        return batch

    return len(dataset), read


@dataclass(frozen=True)
class Kind:
    """A kind of data, with a model for it.

    overrides: the overrides that choose the data and the model.
    build: creates the model.
    loss: computes the loss of a batch in a plain loop.
    samples: returns, for the overrides, the number of samples and their reader. The reader takes
        the numbers of samples, and for each sample the number that seeds its random parts.
    micro_batches: number of micro-batches of a pipeline; 1 where the model has statistics over the
        whole batch.
    """

    overrides: tuple[str, ...]
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor] = model_loss
    samples: Callable[[Sequence[str]], tuple[int, ReadSamples]] = of_dataset
    micro_batches: int = 2


def hugging_face(architecture: str, **config: Any) -> tuple[tuple[str, ...], Any]:
    """Return the overrides for a model of transformers, and a function that creates the same
    model."""
    kind = getattr(transformers, architecture)
    text = ", ".join(f"{key}: {value}" for key, value in config.items())
    asked = ("model=hf", f"model.architecture={architecture}", f"model.config={{{text}}}")
    return asked, lambda: kind(kind.config_class(**config))


_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": LENGTH, "vocab_size": 32}
GPT2, make_gpt2 = hugging_face(
    "GPT2LMHeadModel", **_SMALL, **_NO_DROPOUT, bos_token_id=0, eos_token_id=0
)
BERT, make_bert = hugging_face(
    "BertForMaskedLM",
    **{"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": LENGTH},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
)
T5, make_t5 = hugging_face(
    "T5ForConditionalGeneration",
    **{"vocab_size": 32, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    **{"dropout_rate": 0.0, "decoder_start_token_id": 1, "pad_token_id": 1, "eos_token_id": 0},
)
LAYERS = ("model._target_=my_code.Layers", "model.loss=cross_entropy")
TEXT = (
    *("data=text_files", "data.tokenizer=tokenizer", "data.cache=cache"),
    f"data.sequence_length={LENGTH}",
)
ISOLATED = "documents: isolated"
PADDED = f"{{input_ids: {{length: {LENGTH}}}, labels: {{length: {LENGTH}, value: -100}}}}"
FIELDS = "[pixel_values, labels]"
_PAIRS = ("data.objective=seq2seq", "data.field={source: question, target: answer}")
_IMAGES = ("data=images", "data.num_classes=10", "data.channels=1", "data.size=8")

KINDS = {
    "text, joined and cut": Kind((*GPT2, *TEXT, "data.path=corpus.jsonl"), make_gpt2),
    "text, isolated": Kind(
        (*GPT2, *TEXT, "data.path=corpus.jsonl", f"data.pack={{mode: concat, {ISOLATED}}}"),
        make_gpt2,
        loss_of_documents,
    ),
    "text, best fit": Kind(
        (*GPT2, *TEXT, "data.path=corpus.jsonl", "data.pack={mode: best_fit}"), make_gpt2
    ),
    "text, masked": Kind(
        (*BERT, *TEXT, "data.path=corpus.jsonl", "data.objective=masked"), make_bert
    ),
    "text, two fields": Kind((*T5, *TEXT, "data.path=pairs.jsonl", *_PAIRS), make_t5),
    "chats": Kind(
        (*GPT2, *TEXT, "data.path=chats.jsonl", "data.field=messages", "data.pack={mode: none}"),
        make_gpt2,
    ),
    "own dataset, padded": Kind(
        (*GPT2, "data._target_=my_code.Counting", f"data.pad={PADDED}"),
        *(make_gpt2, model_loss, of_own),
    ),
    "own dataset, random": Kind(
        (*LAYERS, "data._target_=my_code.Noisy", f"data.fields={FIELDS}", "data.workers=2"),
        *(Layers, logits_loss),
    ),
    "arrays": Kind(
        (*LAYERS, "data=arrays", "data.path=arrays.npz"), *(Layers, logits_loss, of_arrays)
    ),
    "hf_dataset": Kind(
        (*LAYERS, "data=hf_dataset", "data.path=rows"), *(Layers, logits_loss, of_arrays)
    ),
    "digits": Kind(
        ("model=image_classifier", "model.width=4", "data=digits", "data.evaluation_fraction=0.99"),
        lambda: ImageClassifier(width=4),
        micro_batches=1,
    ),
    "images": Kind(
        (*LAYERS, *_IMAGES, "data.num_samples=20", "data.evaluation_fraction=0"),
        *(Layers, logits_loss),
    ),
}
_GPT = {"vocab_size": 32, "sequence_length": LENGTH, "width": 32, "depth": 2, "heads": 2}
_OUR_GPT = ("model=gpt", *(f"model.{key}={value}" for key, value in _GPT.items()))
TOKENS = Kind((*_OUR_GPT, *TEXT, "data.path=corpus.jsonl"), lambda: GPT(**_GPT))


def write_files(folder: Path) -> None:
    """Write the files of all kinds of data: tokenizer, texts, chats, pairs, arrays and rows."""
    names = [*SPECIAL, "<unk>", *WORDS]
    own = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    own.add_special_tokens([*SPECIAL])
    (folder / "tokenizer").mkdir()
    own.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE},
        **{"eos_token": "<end>", "pad_token": "<pad>", "mask_token": "<mask>"},
    }
    path = folder / "tokenizer" / "tokenizer_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    draw = np.random.default_rng(7)

    def text(most: int) -> str:
        return " ".join(draw.choice(WORDS, draw.integers(1, most + 1)))

    chats = [
        [{"role": ("user", "assistant")[turn % 2], "content": text(4)} for turn in range(4)]
        for _ in range(20)
    ]
    rows = {
        "corpus": [{"text": text(14)} for _ in range(40)],
        "pairs": [{"question": text(12), "answer": text(12)} for _ in range(20)],
        "chats": [{"messages": chat} for chat in chats],
    }
    for name, content in rows.items():
        lines = "".join(json.dumps(row) + "\n" for row in content)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    values = draw.normal(size=(20, 64)).astype(np.float32)
    arrays = {"pixel_values": values, "labels": draw.integers(0, 10, 20)}
    np.savez(folder / "arrays.npz", **arrays)
    from datasets import Dataset

    Dataset.from_dict(arrays).save_to_disk(folder / "rows")
