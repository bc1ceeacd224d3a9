#!/bin/sh
# transformers 5.23.0 with tokenizers 0.23.3, seen on 2026-11-28.
#
# One expects: `tokenizer.backend_tokenizer`, or `Tokenizer.from_file("tokenizer.json")`, to give the token
# numbers that calling the tokenizer of transformers gives, only faster.
# What happens: a tokenizer.json keeps truncation and padding that were on when it was written (many
# published embedding models have them: 128 tokens or so). The backend cuts every text to that length
# and fills short ones up, without a word, until transformers' object is called for the first time,
# which turns both off in the backend itself: the same line gives other numbers before and after.
# What to do: call no_truncation() and no_padding() on the backend before it is used.
#
# Exits 0 while both behave so, 1 when they no longer do.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - 2>/dev/null <<'PY'
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {word: number for number, word in enumerate("[PAD] a b c d e".split())}
own = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
own.pre_tokenizer = pre_tokenizers.Whitespace()
own.enable_truncation(3)
own.enable_padding(length=3, pad_id=0, pad_token="[PAD]")
own.save("tokenizer.json")

tokenizer = PreTrainedTokenizerFast(tokenizer_file="tokenizer.json", pad_token="[PAD]")
backend = tokenizer.backend_tokenizer
before = [backend.encode(text).ids for text in ("a b c d e", "a")]
called = tokenizer("a b c d e")["input_ids"]
after = [backend.encode(text).ids for text in ("a b c d e", "a")]
print(f"the backend, of five words and of one: {before}")
print(f"transformers, of five words:           {called}")
print(f"the backend after that call:           {after}")
as_seen = before == [[1, 2, 3], [1, 0, 0]] and after == [[1, 2, 3, 4, 5], [1]]
raise SystemExit(0 if as_seen else 1)
PY
