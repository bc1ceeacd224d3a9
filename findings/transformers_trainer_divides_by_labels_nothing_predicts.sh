#!/bin/sh
# transformers 5.23.0 with torch 2.13.0, seen on 2026-11-28.
#
# One expects: the loss of a causal language model in `Trainer` to be the mean over the tokens that are
# predicted, as it is when the model is called by itself. A block of L tokens predicts L - 1.
# What happens: Trainer counts all labels of the batch and has the model divide by that number, so that
# blocks of L tokens have a loss, gradients and evaluation loss that are (L - 1) / L of the model's own.
# For L = 8 it is one eighth off. Losses of packed data cannot be compared with other trainers' digits.
# What to do: give the first label of every block -100, as nothing predicts it.
#
# Exits 0 while transformers behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'PY'
import logging

import torch
import transformers

logging.disable(logging.ERROR)
LENGTH = 8
torch.manual_seed(0)
config = transformers.GPT2Config(
    n_layer=1, n_embd=16, n_head=2, vocab_size=40, n_positions=LENGTH,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
)
model = transformers.GPT2LMHeadModel(config)
blocks = [torch.randint(0, 40, (LENGTH,)) for _ in range(4)]
rows = [{"input_ids": x, "labels": x} for x in blocks]
with torch.no_grad():
    own = float(model(input_ids=torch.stack(blocks), labels=torch.stack(blocks)).loss)
arguments = transformers.TrainingArguments(
    "run", use_cpu=True, max_steps=1, per_device_train_batch_size=4, logging_steps=1,
    learning_rate=1e-30, report_to="none", disable_tqdm=True, save_strategy="no",
)
trainer = transformers.Trainer(model, arguments, train_dataset=rows)
trainer.train()
logged = trainer.state.log_history[0]["loss"]
ratio = logged / own
print(f"the model's own loss {own:.4f}, Trainer's {logged:.4f}: {ratio:.4f} of it, {LENGTH - 1}/{LENGTH}")
raise SystemExit(0 if abs(ratio - (LENGTH - 1) / LENGTH) < 1e-3 else 1)
PY
