#!/bin/sh
# peft 0.21.2 with transformers 5.23.0 and torch 2.13.0, seen on 2026-11-27.
#
# One expects: `target_modules="all-linear"` of a mixture of experts to add to its nn.Linear modules:
# the projections of attention.
# What happens: it also adds to the router and to the stacks of experts, which are parameters and no
# nn.Linear (each wrapped as a `ParamWrapper`). The additions of a stack are as many as its experts, so
# they are most of what is trained; and a router that is trained moves which expert a token goes to.
# What to do: name the projections (`["q_proj", "v_proj"]`), or `exclude_modules`, and print the wrapped.
#
# Exits 0 while peft behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 peft==0.21.2
HF_HUB_OFFLINE=1 HF_HOME="$folder" "$folder/venv/bin/python" -W ignore - <<'PY'
import collections

import peft
from transformers import MixtralConfig, MixtralForCausalLM

config = MixtralConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=8, vocab_size=64,
)  # fmt: skip
model = peft.get_peft_model(
    MixtralForCausalLM(config), peft.LoraConfig(r=2, target_modules="all-linear")
)
trained = collections.Counter()
for name, parameter in model.named_parameters():
    if parameter.requires_grad:
        kind = "experts" if "experts" in name else "router" if "gate" in name else "attention"
        trained[kind] += parameter.numel()
for kind, count in trained.items():
    print(f"{kind}: {count:,} trained numbers")
raise SystemExit(0 if trained["router"] and trained["experts"] > trained["attention"] else 1)
PY
