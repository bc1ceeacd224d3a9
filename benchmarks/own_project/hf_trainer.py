"""The same project with transformers' Trainer: `torchrun --nproc-per-node 2 hf_trainer.py`."""

from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

tokenizer = AutoTokenizer.from_pretrained("tokenizer")
files = {"train": "train.jsonl", "valid": "valid.jsonl"}
texts = load_dataset("json", data_files=files, cache_dir="hf_cache").select_columns("text")


def tokens(rows):
    ids = [[*x, tokenizer.eos_token_id] for x in tokenizer(rows["text"])["input_ids"]]
    return {"input_ids": ids}


def packed(rows):
    ids = list(chain(*rows["input_ids"]))
    blocks = [ids[at : at + 128] for at in range(0, len(ids) // 128 * 128, 128)]
    # Trainer divides by all labels, also by the first, which no token predicts.
    return {"input_ids": blocks, "labels": [[-100, *x[1:]] for x in blocks]}


data = texts.map(tokens, batched=True, remove_columns="text")
data = data.map(packed, batched=True, batch_size=None)
set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        n_layer=4, n_embd=128, n_head=4, n_positions=128, vocab_size=4096, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )
)  # fmt: skip
arguments = TrainingArguments(
    "hf_run", use_cpu=True, ddp_backend="gloo", max_steps=200, per_device_train_batch_size=8,
    learning_rate=3e-4, weight_decay=0.1, lr_scheduler_type="cosine", max_grad_norm=1.0,
    train_sampling_strategy="sequential", eval_strategy="steps", eval_steps=100, save_steps=100,
    logging_steps=1, report_to="tensorboard",
)  # fmt: skip
trainer = Trainer(
    model, arguments, default_data_collator, data["train"], data["valid"],
    processing_class=tokenizer,
)  # fmt: skip
trainer.train()
