#!/bin/sh
# transformers 5.23.0 with torch 2.13.0, seen on 2026-11-28.
#
# One expects: position ids that begin anew for every document of a packed sample, given without an
# attention mask, to keep documents apart, as Llama and others make their mask of them.
# What happens: they do with `use_cache=False` alone. The default of a config is True, with which a forward
# makes an empty cache first, in training too. A mask that has a cache is not made of position ids: the
# documents look at each other, without a word, and the loss is another one.
# What to do: `model.config.use_cache = False` before training on packed samples, and compare the logits of
# a packed sample with those of its documents alone.
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

import torch
import transformers

logging.disable(logging.ERROR)
torch.manual_seed(0)
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60}
long = {"max_position_embeddings": 32}
model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(**sizes, **long, intermediate_size=64)
).eval()
documents = [torch.randint(4, 60, (1, length)) for length in (7, 9)]
packed = torch.cat(documents, 1)
positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
off = {}
with torch.no_grad():
    alone = torch.cat([model(input_ids=x).logits for x in documents], 1)
    for options in ({}, {"use_cache": False}):
        together = model(input_ids=packed, position_ids=positions, **options).logits
        off[bool(options)] = float((together - alone).abs().max())
        said = "with use_cache=False" if options else "as they come"
        print(f"{said}: packed documents differ from documents alone by {off[bool(options)]:.1e}")
raise SystemExit(0 if off[True] < 1e-5 and off[False] > 1e-3 else 1)
PY
