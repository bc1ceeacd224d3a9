"""`data=text_files`: the tokens of documents, their labels, and training on them under plans."""

import gzip
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from pyarrow import parquet
from tests.distributed.cases import TOLERANCE
from tests.distributed.equality import Jobs
from tests.pairs import some
from transformers import AutoConfig, GenerationConfig, GPT2Config, GPT2LMHeadModel

from whale_train import compose, plan
from whale_train.data.dataset import Dataset
from whale_train.data.open import open_dataset
from whale_train.data.sources.text_files import TextFilesOptions
from whale_train.data.tokens import make_store
from whale_train.data.tokens.make_store import StoreRequest
from whale_train.errors import ConfigError
from whale_train.launcher.planning.check_data import explain_data
from whale_train.runtime.state.special_tokens import align_special_tokens
from whale_train.tokenising import main as tokenising

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "then",
    "it",
    "ran",
    "off",
    "to",
    "see",
    "what",
    "was",
    "up",
]
SPECIAL = ["<end>", "<pad>", "<mask>", "<user>", "<assistant>"]
END, PAD, MASK = range(3)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end>{% if not loop.last %} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %} <assistant>{% endif %}"
)
# Documents of 1 to 14 words, and one longer than a sample.
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 1 + i % 14]) for i in range(40)]
TEXTS += [" ".join((WORDS * 5)[:61])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of words, `tokenizer`, and the documents, `corpus.jsonl`."""
    folder = tmp_path_factory.mktemp("corpus")
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, "<unk>", *dict.fromkeys(WORDS)])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(SPECIAL)
    (folder / "tokenizer").mkdir()
    words.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"eos_token": "<end>", "pad_token": "<pad>", "mask_token": "<mask>"},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    write_rows(folder / "corpus.jsonl", [{"id": i, "text": x} for i, x in enumerate(TEXTS)])
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenise here, where transformers is imported already."""

    def make(request: StoreRequest, folder: Path, watch: object) -> None:
        try:
            tokenising.make(request, folder, folder.with_suffix(".progress"))
        except tokenising.BadRow as row:
            raise AssertionError(str(row)) from row

    monkeypatch.setattr(make_store, "_make", make)


def write_arrow(writer: Any, table: pa.Table) -> None:
    with writer:
        writer.write_table(table)


def opened(folder: Path, **options: Any) -> Dataset:
    given = {"path": str(folder / "corpus.jsonl"), "tokenizer": str(folder / "tokenizer")}
    return open_dataset(TextFilesOptions(**{**given, "cache": str(folder / "cache"), **options}))


def all_samples(dataset: Dataset) -> dict[str, np.ndarray[Any, Any]]:
    return dataset.samples(np.arange(dataset.num_samples))


def numbers_of(text: str) -> list[int]:
    names = [*SPECIAL, "<unk>", *dict.fromkeys(WORDS)]
    return [names.index(word) for word in text.split()]


def stream(texts: list[str] = TEXTS) -> list[int]:
    """All documents, each ended by <end>."""
    return [number for text in texts for number in [*numbers_of(text), END]]


def concatenated(length: int) -> np.ndarray[Any, Any]:
    whole = len(stream()) // length
    return np.array(stream()[: whole * length]).reshape(whole, length)


@pytest.mark.usefixtures("in_this_process")
def test_every_kind_of_file_has_the_same_tokens(folder: Path) -> None:
    rows = pa.table({"text": TEXTS, "more": list(range(len(TEXTS)))})
    several = folder / "several"
    several.mkdir()
    kinds: dict[str, Callable[[Path], object]] = {
        "rows.parquet": lambda path: parquet.write_table(rows, path),
        "rows.arrow": lambda path: write_arrow(pa.ipc.new_file(path, rows.schema), rows),
        "stream.arrow": lambda path: write_arrow(pa.ipc.new_stream(path, rows.schema), rows),
        "rows.jsonl.gz": lambda path: path.write_bytes(
            gzip.compress((folder / "corpus.jsonl").read_bytes())
        ),
    }
    for name, write in kinds.items():
        write(folder / name)
    for number, text in enumerate(TEXTS):
        (several / f"{number:02}.txt").write_text(text)
    expected = concatenated(16).tolist()
    for name in ("corpus.jsonl", *kinds, "several", "several/*.txt"):
        found = all_samples(opened(folder, path=str(folder / name), sequence_length=16))
        assert found["input_ids"].tolist() == found["labels"].tolist() == expected, name


@pytest.mark.usefixtures("in_this_process")
def test_a_long_text_is_read_in_pieces(folder: Path) -> None:
    text = "\n".join(TEXTS * 1500)  # more than a piece; a document all the same
    path = folder / "long.txt"
    path.write_text(text)
    dataset = opened(folder, path=str(path), sequence_length=64)
    found = all_samples(dataset)["input_ids"].ravel()
    expected = [*numbers_of(text), END]
    assert found.tolist() == expected[: len(found)]
    assert len(expected) - len(found) < 64


@pytest.mark.usefixtures("in_this_process")
def test_a_tokenizer_that_was_saved_cutting_texts_cuts_none(folder: Path, tmp_path: Path) -> None:
    cutting = tmp_path / "cutting"
    shutil.copytree(folder / "tokenizer", cutting)
    words = tokenizers.Tokenizer.from_file(str(cutting / "tokenizer.json"))
    words.enable_truncation(3)
    words.enable_padding(length=3)
    words.save(str(cutting / "tokenizer.json"))
    whole = opened(folder, sequence_length=8)
    same = opened(folder, sequence_length=8, tokenizer=str(cutting), cache=str(tmp_path / "cache"))
    np.testing.assert_array_equal(all_samples(same)["input_ids"], all_samples(whole)["input_ids"])


def test_a_new_model_is_saved_with_its_tokenizers_special_tokens(
    folder: Path, tmp_path: Path
) -> None:
    """Which `generate` ends by; a config's own are GPT-2's, beyond this vocabulary."""
    config = GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=50)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert config.eos_token_id == config.bos_token_id == 50256
    shutil.copytree(folder / "tokenizer", tmp_path, dirs_exist_ok=True)
    align_special_tokens(tmp_path, ["pad_token_id"])
    for kind in (AutoConfig, GenerationConfig):
        saved = kind.from_pretrained(tmp_path)
        assert (saved.eos_token_id, saved.bos_token_id) == (END, None)
        assert saved.pad_token_id is None
    align_special_tokens(tmp_path, [])
    assert AutoConfig.from_pretrained(tmp_path).pad_token_id == PAD


@pytest.mark.usefixtures("in_this_process")
def test_isolated_documents_begin_anew(folder: Path) -> None:
    pack = {"mode": "best_fit", "documents": "isolated"}
    found = all_samples(opened(folder, sequence_length=16, pack=pack))
    seen: list[list[int]] = []
    for ids, labels, positions in zip(*found.values(), strict=True):
        starts = [*np.flatnonzero(positions == 0), 16]
        for start, stop in pairwise(starts):
            assert positions[start:stop].tolist() == list(range(stop - start))
            own = ids[start:stop].tolist()
            if set(own) != {PAD}:  # the filling is a document of its own
                assert labels[start:stop].tolist() == [-100, *own[1:]]
                seen.append(own)
            else:
                assert (labels[start:stop] == -100).all()
    documents = [[*numbers_of(text), END] for text in TEXTS]
    pieces = [x[at : at + 16] for x in documents for at in range(0, len(x), 16)]
    assert sorted(seen) == sorted(pieces)


@pytest.mark.usefixtures("in_this_process")
def test_answers_alone_are_learned(folder: Path) -> None:
    chats = [
        [("user", "the cat"), ("assistant", "sat on"), ("user", "a"), ("assistant", "mat")],
        [("user", "it"), ("assistant", "ran off to")],
    ]
    rows = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in chats]
    write_rows(folder / "chats.jsonl", rows)
    options = {"path": str(folder / "chats.jsonl"), "field": "messages", "sequence_length": 16}
    found = all_samples(opened(folder, **options, pack={"mode": "none"}))
    text = "<user> the cat <end> <assistant> sat on <end> <user> a <end> <assistant> mat <end>"
    assert found["input_ids"][0].tolist() == [*numbers_of(text), PAD, PAD, PAD][:16]
    counted = [numbers_of(x) for x in ("sat on <end>", "mat <end>")]
    assert found["labels"][0].tolist() == [
        *(*[-100] * 5, *counted[0], *[-100] * 4, *counted[1]),
        *[-100] * 2,
    ]
    assert [x for x in found["labels"][1] if x >= 0] == numbers_of("ran off to <end>")


@pytest.mark.usefixtures("in_this_process")
def test_two_texts_a_sample(folder: Path) -> None:
    write_rows(folder / "pairs.jsonl", [{"q": "the cat", "a": "sat"}, {"q": "it", "a": "ran off"}])
    field = {"source": "q", "target": "a"}
    options = {"objective": "seq2seq", "field": field, "sequence_length": 4, "target_length": 3}
    found = all_samples(opened(folder, path=str(folder / "pairs.jsonl"), **options))
    the, cat, sat, it, ran, off = numbers_of("the cat sat it ran off")
    assert found["input_ids"].tolist() == [[the, cat, END, PAD], [it, END, PAD, PAD]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert found["labels"].tolist() == [[sat, END, -100], [ran, off, END]]


@pytest.mark.usefixtures("in_this_process")
def test_masks_are_drawn_anew_every_epoch(folder: Path) -> None:
    write_rows(folder / "many.jsonl", [{"text": " ".join(WORDS * 40)} for _ in range(50)])
    options = {"objective": "masked", "sequence_length": 64, "mask_share": 0.3}
    dataset = opened(folder, path=str(folder / "many.jsonl"), **options)
    plain = all_samples(opened(folder, path=str(folder / "many.jsonl"), sequence_length=64))
    indices = np.arange(dataset.num_samples)
    first, again, later = (dataset.samples(indices, indices + x) for x in (0, 0, 10_000))
    assert (first["labels"] == again["labels"]).all()
    assert (first["labels"] != later["labels"]).any()
    tokens, chosen = plain["input_ids"], first["labels"] != -100
    assert (first["labels"][chosen] == tokens[chosen]).all()
    assert (first["input_ids"][~chosen] == tokens[~chosen]).all()
    assert not chosen[tokens == END].any()
    # Of some 30,000 tokens; four deviations of the binomial distributions.
    assert abs(chosen[tokens != END].mean() - 0.3) < 0.011
    now = first["input_ids"][chosen]
    assert abs((now == MASK).mean() - 0.8) < 0.017 + 0.1 / 20  # a random token may be the mask
    assert abs((now == tokens[chosen]).mean() - 0.1) < 0.013 + 0.1 / 20


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            ["the cat", "sat", [{"role": "user", "content": "the"}]],
            r"row 2 \(from 0 on\), has a chat in text, and the first row has a text",
        ),
        (
            ["the cat", "sat", "on \ud83d a"],
            r"row 2 \(from 0 on\), has half of a letter of UTF-16 \(0xd83d\)",
        ),
    ],
)
def test_a_row_of_another_kind_is_named_in_any_batch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Any], said: str
) -> None:
    monkeypatch.setattr(tokenising, "_BATCH_DOCUMENTS", 2)
    write_rows(tmp_path / "rows.jsonl", [{"text": row} for row in rows])
    with pytest.raises(AssertionError, match=said):
        opened(folder, path=str(tmp_path / "rows.jsonl"), sequence_length=2)


@pytest.mark.usefixtures("in_this_process")
def test_a_tokenizer_may_leave_numbers_out(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tokenizer", tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["cat"] = 70_000
    file.write_text(json.dumps(content))
    dataset = opened(folder, tokenizer=str(tmp_path / "tokenizer"), sequence_length=8)
    samples = all_samples(dataset)["input_ids"]
    expected = np.where(concatenated(8) == numbers_of("cat")[0], 70_000, concatenated(8))
    assert samples.tolist() == expected.tolist()
    assert [x.upper_bound for x in dataset.fields] == [70_001, 70_001]


def test_a_store_is_made_once_and_known_by_its_content(folder: Path, tmp_path: Path) -> None:
    """By the process that makes stores."""
    cache, copy = tmp_path / "cache", tmp_path / "elsewhere.jsonl"
    told: list[tuple[int, int]] = []
    options = {"tokenizer": str(folder / "tokenizer"), "sequence_length": 16, "cache": str(cache)}

    def look(path: Path) -> list[Path]:
        given = TextFilesOptions(path=str(path), **options)
        dataset = open_dataset(given, lambda done, total: told.append((done, total)))
        assert all_samples(dataset)["input_ids"].tolist() == concatenated(16).tolist()
        return [path for path in cache.iterdir() if path.is_dir()]

    made = look(folder / "corpus.jsonl")
    size = (folder / "corpus.jsonl").stat().st_size
    assert told[-1] == (size, size)
    told.clear()
    copy.write_bytes((folder / "corpus.jsonl").read_bytes())
    assert look(copy) == made
    assert not told
    copy.write_bytes(copy.read_bytes() + b'{"text": 3}\n')
    with pytest.raises(ConfigError, match=r"line 42|row 41 \(from 0 on\), has no text in text"):
        look(copy)
    assert [path for path in cache.iterdir() if path.is_dir()] == made
    (tmp_path / "empty").mkdir()
    options["tokenizer"] = str(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is a folder without a tokenizer"):
        look(folder / "corpus.jsonl")


PLANS = ["split", "zero3", "pipeline strategy.graph.pipeline.stages=2", "dp"]
MODEL = (
    "model=hf model.architecture=GPT2LMHeadModel|model.config={n_layer: 2, n_embd: 32, n_head: 2, "
    "n_positions: 32, vocab_size: 22, resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0, "
    "bos_token_id: 0, eos_token_id: 0}"
)


@pytest.mark.parametrize("plan", some(PLANS, ["split", "dp"]))
def test_training_on_packed_documents(folder: Path, jobs: Jobs, tmp_path: Path, plan: str) -> None:
    """The losses of a plain loop over the documents, each alone: filled up to one length, with
    labels that the loss does not count."""
    documents = [[*numbers_of(text), END] for text in TEXTS]
    arrays = {"input_ids": np.zeros((40, 16), np.int64), "labels": np.full((40, 16), -100)}
    for row, document in enumerate(documents[:40]):
        arrays["input_ids"][row, : len(document)] = document
        arrays["labels"][row, 1 : len(document)] = document[1:]
    np.savez(tmp_path / "alone.npz", **arrays)
    write_rows(tmp_path / "short.jsonl", [{"text": text} for text in TEXTS[:40]])
    model, config = MODEL.split("|")
    common = [*model.split(), config, "optimizer=sgd", "train.steps=3", "data.shuffle=false"]
    # All documents a step, so that it does not matter how they are laid out in samples.
    alone = ["data=arrays", f"data.path={tmp_path / 'alone.npz'}", "train.global_batch=40"]
    expected = jobs.run([*common, *alone, "hardware=cpu", "strategy=single"], plainly=True)
    of_tokenizer = [f"data.tokenizer={folder / 'tokenizer'}", f"data.cache={folder / 'cache'}"]
    text = ["data=text_files", f"data.path={tmp_path / 'short.jsonl'}", *of_tokenizer]
    options = ["data.sequence_length=32", "data.pack={mode: best_fit, documents: isolated}"]
    samples = open_dataset(
        TextFilesOptions(
            path=str(tmp_path / "short.jsonl"),
            tokenizer=str(folder / "tokenizer"),
            cache=str(folder / "cache"),
            sequence_length=32,
            pack={"mode": "best_fit", "documents": "isolated"},
        )
    ).num_samples
    assert samples < 20
    where = [f"train.global_batch={samples}", "hardware=cpu", "hardware.devices=2"]
    found = jobs.run([*common, *text, *options, *where, *f"strategy={plan}".split()])
    np.testing.assert_allclose(found.losses, expected.losses, rtol=TOLERANCE)


def test_rows_of_a_vocabulary_that_no_token_has_are_noted(folder: Path) -> None:
    model, config = MODEL.split("|")
    of_tokenizer = [f"data.tokenizer={folder / 'tokenizer'}", f"data.cache={folder / 'cache'}"]
    text = ["data=text_files", f"data.path={folder / 'corpus.jsonl'}", *of_tokenizer]
    for size, noted in ((22, []), (43, []), (44, ["44"])):
        sized = config.replace("vocab_size: 22", f"vocab_size: {size}")
        request = compose(*model.split(), sized, *text, "data.sequence_length=16", hardware="cpu")
        decisions = plan(request).decisions
        assert [x.chosen for x in decisions if x.key == "model.config.vocab_size"] == noted


def test_the_mask_of_a_source_is_not_held_against_longer_targets(folder: Path) -> None:
    write_rows(folder / "longer.jsonl", [{"q": "the", "a": "cat sat on a mat"}])
    of_tokenizer = [f"data.tokenizer={folder / 'tokenizer'}", f"data.cache={folder / 'cache'}"]
    text = ["data=text_files", f"data.path={folder / 'longer.jsonl'}", *of_tokenizer]
    pair = ["data.objective=seq2seq", "data.field={source: q, target: a}"]
    request = compose(*text, *pair, "data.sequence_length=8", hardware="cpu")
    assert "data.labels" not in [x.key for x in explain_data(request, open_dataset(request.data))]
