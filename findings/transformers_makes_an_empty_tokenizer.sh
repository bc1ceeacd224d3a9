#!/bin/sh
# transformers 5.23.0 with tokenizers, seen on 2026-11-28.
#
# One expects: `AutoTokenizer.from_pretrained` of a folder that has a model and no tokenizer to raise an
# error, as earlier versions did. `model.save_pretrained` alone leaves such a folder.
# What happens: it makes a tokenizer of the model's kind without a vocabulary. It has one token, and
# turns every text into no tokens at all, without a word. A training on it trains on end-of-text
# tokens, or fails far away.
# What to do: look for a tokenizer's files (tokenizer.json, vocab.*, *.model) before loading, and refuse a
# tokenizer that has no more tokens than special ones.
#
# Exits 0 while transformers behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'PY'
import logging

import transformers

logging.disable(logging.ERROR)
config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=50, n_positions=8)
transformers.GPT2LMHeadModel(config).save_pretrained("model")
tokenizer = transformers.AutoTokenizer.from_pretrained("model")
numbers = tokenizer("the cat sat on the mat")["input_ids"]
print(f"{type(tokenizer).__name__}: {len(tokenizer)} token, a text of six words is {numbers}")
raise SystemExit(0 if len(tokenizer) == 1 and numbers == [] else 1)
PY
