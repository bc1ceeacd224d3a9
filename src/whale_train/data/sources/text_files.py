"""`data=text_files`: the user's own text, tokenised, in samples of one length.

Documents are tokenised once on each machine (`data/tokens/make_store.py`). The tokens of a sample
depend on its number alone, so that any plan reads the same batches and can resume from any step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from whale_train.data.dataset import (
    Batch,
    Dataset,
    EvaluationSets,
    Indices,
    Note,
    RowDataset,
    hold_back,
)
from whale_train.data.mixture import BLOCK, MixedDataset, shares_of
from whale_train.data.paths import UserPath
from whale_train.data.random_bits import random_bits, stream_key
from whale_train.data.tokens.corpus_files import corpus_files
from whale_train.data.tokens.make_store import StoreRequest, Watch, cache_folder, open_store
from whale_train.data.tokens.packed_layouts import layout_of
from whale_train.data.tokens.packing import Layout, PackMode
from whale_train.data.tokens.stored_array import differences
from whale_train.data.tokens.text_encoder import TOKENIZER_KEY, tokenizer_folder
from whale_train.data.tokens.token_store import TokenStore
from whale_train.errors import ConfigError, Fault
from whale_train.strategies.graph.operation_graph import InputField

_MASK_SHARE = 0.15  # BERT's
IGNORED_LABEL = -100  # torch's cross_entropy leaves it out
# The fractions of the predicted tokens that are replaced by the mask, and by another token. The
# rest is unchanged (Devlin et al., "BERT", NAACL 2019, section 3.1).
_MASKED, _REPLACED = 0.8, 0.1

_Text = Annotated[str, Field(min_length=1)]
_Paths = Annotated[
    tuple[UserPath, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
]


class PackOptions(BaseModel):
    """Options of packing, under `data.pack`.

    mode: how documents become samples: concatenated and cut (concat), packed whole as far as they
        fit, with padding (best_fit), or one document a sample (none).
    documents: whether a document attends to earlier documents of its sample (joined), or not
        (isolated: position ids begin anew, and a document's first token is no target).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: PackMode | Literal["none"] = "concat"
    documents: Literal["joined", "isolated"] = "joined"


class FieldPair(BaseModel):
    """Options of the two fields of `data.objective=seq2seq`, under `data.field`.

    source: the field of the source text.
    target: the field of the text to predict.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: _Text
    target: _Text


# A discriminator, so that faults are about the given kind of value alone.
_Field = Annotated[
    Annotated[_Text, Tag("text")] | Annotated[FieldPair, Tag("pair")],
    Discriminator(lambda value: "pair" if isinstance(value, dict | FieldPair) else "text"),
]


class SourceOptions(BaseModel):
    """Options of a source, an entry of `data.sources`.

    path: as `data.path`.
    weight: the source's fraction of the samples, relative to the other sources' weights.
    field: as `data.field`; None takes that.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: _Paths
    weight: float = Field(1.0, gt=0)
    field: _Field | None = None


class TextFilesOptions(BaseModel):
    """Options of `data=text_files`.

    path: a file, a folder or a pattern of jsonl, parquet, arrow or txt files, or a list of them;
        None where there are `sources`.
    sources: several sources in place of `path`, each with a weight.
    tokenizer: a tokenizer's folder, or `owner/name` of the Hugging Face hub; it must be given.
    field: the field of the text in a row, or of a chat's messages; for seq2seq two fields.
    objective: what is predicted: the next tokens (causal), masked ones, or the text of a second
        field (seq2seq).
    sequence_length: tokens of a sample.
    target_length: tokens of the text to predict, for seq2seq.
    pack: how documents become samples; None concatenates them, or takes them one by one for
        seq2seq.
    mask_share: fraction of the tokens that are predicted, for masked.
    cache: folder of the token stores; None is a folder in the user's cache.
    shuffle: whether epochs are permuted.
    evaluation_fraction: fraction of the samples that is held back.
    evaluation: evaluation sets by name, each this data with other options; None has none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["text_files"] = "text_files"
    path: _Paths | None = None
    sources: tuple[SourceOptions, ...] = ()
    tokenizer: _Text | None = None
    field: _Field = "text"
    objective: Literal["causal", "masked", "seq2seq"] = "causal"
    sequence_length: int = Field(1024, ge=2)
    target_length: int | None = Field(None, ge=2)
    pack: PackOptions | None = None
    mask_share: float = Field(_MASK_SHARE, gt=0, lt=1)
    cache: UserPath | None = None
    shuffle: bool = True
    evaluation_fraction: float = Field(0.0, ge=0, lt=1)
    evaluation: EvaluationSets | None = None

    @property
    def packing(self) -> PackOptions:
        """Return the options of packing, with the default of the objective."""
        given = self.pack or PackOptions()
        return PackOptions(mode="none") if self.objective == "seq2seq" else given

    def faults(self) -> list[Fault]:
        """Return the faults of options that contradict each other."""
        faults = []
        if (self.path is None) == (not self.sources):
            rule = "and data.sources are both given" if self.path else "must be given"
            remedy = "leave one out" if self.path else "write data.path=VALUE, or data.sources"
            faults.append(Fault("data.path", ", ".join(self.path or ()), rule, remedy))
        if self.tokenizer is None:
            remedy = f"write {TOKENIZER_KEY}=DIR, a folder that save_pretrained() wrote"
            faults.append(Fault(TOKENIZER_KEY, "", "must be given", remedy))
        shares = shares_of([x.weight for x in self.sources]) if self.sources else ()
        for number, (source, share) in enumerate(zip(self.sources, shares, strict=True)):
            if not share:
                rule = f"is less than one part in {BLOCK} of all weights"
                remedy = "use a larger weight, or leave the source out"
                key = f"data.sources[{number}].weight"
                faults.append(Fault(key, f"{source.weight:g}", rule, remedy))
        fields = [x.field or self.field for x in self.sources] or [self.field]
        pair = isinstance(fields[0], FieldPair)
        if any(isinstance(x, FieldPair) != (self.objective == "seq2seq") for x in fields):
            rule = "needs two fields" if self.objective == "seq2seq" else "reads one field"
            remedy = "use 'data.field={source: question, target: answer}'"
            remedy = remedy if not pair else "use data.field=text, or data.objective=seq2seq"
            faults.append(Fault("data.objective", self.objective, rule, remedy))
        if self.objective == "seq2seq" and self.pack is not None:
            rule, remedy = "has no effect on data.objective=seq2seq", "leave it out"
            faults.append(Fault("data.pack", self.pack.mode, rule, remedy))
        if self.objective != "seq2seq" and self.target_length is not None:
            rule, remedy = f"has no effect on data.objective={self.objective}", "use null"
            faults.append(Fault("data.target_length", str(self.target_length), rule, remedy))
        if self.objective != "masked" and self.mask_share != _MASK_SHARE:
            rule, remedy = f"has no effect on data.objective={self.objective}", "leave it out"
            faults.append(Fault("data.mask_share", str(self.mask_share), rule, remedy))
        return faults


def open_text_files(options: TextFilesOptions, watch: Watch | None = None) -> Dataset:
    """Return the dataset of samples of `sequence_length` tokens.

    The fields are int64. Causal: `input_ids` and `labels`, which are equal, except that labels are
    -100 where the loss counts nothing: padding, and all but the answers of chats. Isolated
    documents also have `position_ids`. Masked: `input_ids`, `labels` of the masked tokens, and
    `attention_mask` where samples are padded. Seq2seq: `input_ids`, `attention_mask` and `labels`.

    watch: called with the bytes that are tokenised and the bytes in all.

    Raises ConfigError.
    """
    faults = options.faults()
    if faults:
        raise ConfigError(faults)
    if options.path is not None:
        return _source(options, options.path, options.field, "data.path", watch)
    sources = []
    for number, source in enumerate(options.sources):
        key = f"data.sources[{number}].path"
        field = source.field or options.field
        sources.append(_source(options, source.path, field, key, watch))
    fields = _widest([source.fields for source in sources])
    shares = shares_of([source.weight for source in options.sources])
    notes = tuple(note for source in sources for note in source.notes)
    return MixedDataset(tuple(replace(x, fields=fields) for x in sources), shares, notes)


def _widest(fields: Sequence[tuple[InputField, ...]]) -> tuple[InputField, ...]:
    """Return the fields of several sources, with the smallest of their lower bounds."""
    return tuple(
        replace(same[0], lower_bound=min(field.lower_bound for field in same))
        for same in zip(*fields, strict=True)
    )


def _source(
    options: TextFilesOptions,
    paths: Sequence[str],
    field: str | FieldPair,
    key: str,
    watch: Watch | None,
) -> RowDataset:
    """Return the samples of one source, whose files the config names under `key`."""
    files = tuple(file for path in paths for file in corpus_files(path, key))
    cache, tokenizer = cache_folder(options.cache), str(_tokenizer_folder(options))

    def store_of(name: str) -> TokenStore:
        return open_store(StoreRequest(files, (name,), tokenizer, key), cache, watch)

    if isinstance(field, FieldPair):
        samples = _pairs(options, store_of(field.source), store_of(field.target))
    else:
        samples = _sequences(options, store_of(field))
    if not samples.layout.num_samples:
        raise ConfigError([_too_short(options, key, paths, samples.store)])
    held_back = hold_back(samples.layout.num_samples, options.evaluation_fraction)
    return RowDataset(samples.fields, held_back, samples.read, notes=_notes(options, key, samples))


def _tokenizer_folder(options: TextFilesOptions) -> Path:
    """Return the folder of the tokenizer. Raises ConfigError where the folder does not exist."""
    if options.tokenizer is None:
        raise ConfigError(options.faults())
    return tokenizer_folder(options.tokenizer)


@dataclass(frozen=True, eq=False)
class _Samples:
    """Samples of a store.

    store: the tokens.
    layout: the tokens of each sample.
    fields: tensors of a sample.
    read: function that returns samples by their numbers, int64 `[n]`, and their draws.
    """

    store: TokenStore
    layout: Layout
    fields: tuple[InputField, ...]
    read: Callable[[Indices, Indices], Batch]


def _sequences(options: TextFilesOptions, store: TokenStore) -> _Samples:
    """Return the samples of causal and masked language models."""
    length, packing = options.sequence_length, options.packing
    layout = layout_of(store, packing.mode, length)
    described = store.description
    isolated = packing.documents == "isolated"
    masked = options.objective == "masked"
    is_filled = packing.mode != "concat"
    pad = _filling(store)
    mask = _mask_token(options, store) if masked else 0

    def read(rows: Indices, draws: Indices) -> Batch:
        batch = {
            "input_ids": np.full((len(rows), length), pad, np.int64),
            "labels": np.full((len(rows), length), IGNORED_LABEL, np.int64),
        }
        positions = np.zeros((len(rows), length), np.int64)
        filled = np.zeros((len(rows), length), np.int64)
        for row, sample in enumerate(rows):
            at = 0
            for start, count in layout.segments(int(sample)):
                _fill(batch, row, slice(at, at + count), store, int(start))
                positions[row, at : at + count] = np.arange(count)
                if isolated:
                    batch["labels"][row, at] = IGNORED_LABEL
                at += int(count)
            filled[row, :at] = 1
            positions[row, at:] = np.arange(length - at)
        if masked:
            _mask(batch, draws, options.mask_share, mask, store)
            if is_filled:
                batch["attention_mask"] = filled
        if isolated:
            batch["position_ids"] = positions
        return batch

    bound = max((described.vocabulary - 1, pad, mask)) + 1
    fields = [InputField("input_ids", (length,), "int64", bound)]
    if masked and is_filled:
        fields.append(InputField("attention_mask", (length,), "int64", 2))
    if isolated:
        fields.append(InputField("position_ids", (length,), "int64", length))
    lowest = IGNORED_LABEL if masked or is_filled or isolated or store.has_targets else 0
    fields.append(InputField("labels", (length,), "int64", described.vocabulary, lowest))
    return _Samples(store, layout, tuple(fields), read)


def _fill(
    batch: Mapping[str, NDArray[np.int64]], row: int, at: slice, store: TokenStore, start: int
) -> None:
    """Copy tokens of `store` from `start` on into the columns `at` of a row of a batch, with
    labels."""
    count = at.stop - at.start
    tokens = store.tokens(start, start + count)
    batch["input_ids"][row, at] = tokens
    if store.has_targets:
        tokens = np.where(store.targets(start, start + count), tokens, IGNORED_LABEL)
    batch["labels"][row, at] = tokens


def _mask(batch: Batch, draws: Indices, share: float, mask: int, store: TokenStore) -> None:
    """Replace the tokens that are to be predicted, and set the labels of all others to
    `IGNORED_LABEL`.

    Special tokens are not predicted. `draws`, int64 `[n]`, choose the tokens of each sample.
    """
    tokens = batch["input_ids"]
    length = tokens.shape[1]
    counters = draws[:, None] * length + np.arange(length)
    special = np.isin(tokens, store.description.special.ids)
    chosen = _uniform("masked", counters) < share
    chosen &= ~special & (batch["labels"] != IGNORED_LABEL)
    batch["labels"] = np.where(chosen, tokens, IGNORED_LABEL)
    kind = _uniform("mask", counters)
    others = (_uniform("other", counters) * store.description.vocabulary).astype(np.int64)
    replaced = np.where(kind < _MASKED, mask, np.where(kind < _MASKED + _REPLACED, others, tokens))
    batch["input_ids"] = np.where(chosen, replaced, tokens)


def _uniform(name: str, counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each counter, from the stream `name`."""
    bits = random_bits(stream_key(name, 0), counters) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _pairs(options: TextFilesOptions, source: TokenStore, target: TokenStore) -> _Samples:
    """Return the samples of sequence-to-sequence models."""
    length = options.sequence_length
    lengths = (length, options.target_length or length)
    layouts = (layout_of(source, "none", lengths[0]), layout_of(target, "none", lengths[1]))
    pad = _filling(source)

    def read(rows: Indices, draws: Indices) -> Batch:
        tokens = [
            np.full((len(rows), size), filling, np.int64)
            for size, filling in zip(lengths, (pad, IGNORED_LABEL), strict=True)
        ]
        attention_mask = np.zeros((len(rows), length), np.int64)
        for row, sample in enumerate(rows):
            for into, store, layout in zip(tokens, (source, target), layouts, strict=True):
                for start, count in layout.segments(int(sample)):
                    into[row, :count] = store.tokens(int(start), int(start + count))
            (_, count), *_ = layouts[0].segments(int(sample))
            attention_mask[row, :count] = 1
        return {"input_ids": tokens[0], "attention_mask": attention_mask, "labels": tokens[1]}

    vocabulary = source.description.vocabulary
    fields = (
        InputField("input_ids", (length,), "int64", max(vocabulary, pad + 1)),
        InputField("attention_mask", (length,), "int64", 2),
        InputField("labels", (lengths[1],), "int64", vocabulary, IGNORED_LABEL),
    )
    return _Samples(source, layouts[0], fields, read)


def _filling(store: TokenStore) -> int:
    """Return the token that pads samples: the tokenizer's pad or eos token, or 0."""
    special = store.description.special
    return next((x for x in (special.pad, special.eos) if x is not None), 0)


def _mask_token(options: TextFilesOptions, store: TokenStore) -> int:
    """Return the number of the mask token. Raises ConfigError where the tokenizer has none."""
    mask = store.description.special.mask
    if mask is None:
        rule = "needs a mask token, and the tokenizer has none"
        remedy = f"use a tokenizer with one instead of {options.tokenizer}, or causal"
        raise ConfigError([Fault("data.objective", "masked", rule, remedy)])
    return mask


def _too_short(
    options: TextFilesOptions, key: str, paths: Sequence[str], store: TokenStore
) -> Fault:
    path = ", ".join(paths)
    described = store.description
    if not described.num_documents:
        return Fault(key, path, "holds no text", "name files with documents")
    rule = f"holds {described.num_tokens:,} tokens, less than one sequence of "
    rule += f"data.sequence_length={options.sequence_length}"
    remedy = f"use data.sequence_length={max(2, described.num_tokens)} or less, or more text"
    return Fault(key, path, rule, remedy)


def _notes(options: TextFilesOptions, key: str, samples: _Samples) -> tuple[Note, ...]:
    """Return the plan's notes on the texts of a source."""
    described = samples.store.description
    value = f"{described.num_tokens:,} tokens"
    reason = f"of {described.num_documents:,} documents, in {samples.layout.num_samples:,} samples"
    if described.skipped:
        reason += f"; {described.skipped:,} documents without text are left out"
    notes = [Note(key, value, reason)]
    if options.packing.mode == "none":
        length = options.sequence_length
        longest, num_cut = 0, 0
        for lengths in differences(samples.store.ends):
            longest = max(longest, int(lengths.max()))
            num_cut += int((lengths > length).sum())
        if num_cut:
            reason = (
                f"{num_cut:,} documents are longer, and cut; the longest has {longest:,} tokens"
            )
            notes.append(Note("data.sequence_length", f"{length}", reason))
    if described.special.eos is None and options.objective == "causal":
        reason = "the tokenizer has no eos_token, so that nothing marks the ends of documents"
        notes.append(Note("data.tokenizer", "no end of text", reason))
    return tuple(notes)
