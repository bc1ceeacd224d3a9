#!/bin/sh
# transformers 5.23.0 with torch 2.13.0, seen on 2026-11-28.
#
# One expects: position ids that begin anew for every document of a packed sample, given without an
# attention mask, to keep documents apart in every model that takes `position_ids`, since Llama, GPT-2 and
# others make their mask of them.
# What happens: OPT takes `position_ids` too, embeds them, and lets documents look at each other, without
# a word. A packed fine-tuning of OPT is another one than that of Llama with the same data.
# What to do: compare the logits of a packed sample with those of its documents alone, or look in the
# exported graph for a mask that is made of the position ids.
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
models = {
    "Llama": transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **long, intermediate_size=64)
    ),
    "OPT": transformers.OPTForCausalLM(
        transformers.OPTConfig(**sizes, **long, ffn_dim=64, word_embed_proj_dim=32)
    ),
}
documents = [torch.randint(4, 60, (1, length)) for length in (7, 9)]
packed = torch.cat(documents, 1)
positions = torch.cat([torch.arange(7), torch.arange(9)])[None]
off = {}
for name, model in models.items():
    model.eval()
    with torch.no_grad():
        together = model(input_ids=packed, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(input_ids=x).logits for x in documents], 1)
    off[name] = float((together - alone).abs().max())
    print(f"{name}: packed documents differ from documents alone by {off[name]:.1e}")
raise SystemExit(0 if off["Llama"] < 1e-5 and off["OPT"] > 1e-3 else 1)
PY
