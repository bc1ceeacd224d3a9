"""The same project with Lightning's command line: `lightning_project.py fit -c lightning.yaml`."""

from itertools import chain

import torch
from datasets import load_dataset
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, default_data_collator


class Text(LightningDataModule):
    def __init__(self, train: str, valid: str, tokenizer: str, length: int, batch: int):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str):
        given, tokenizer = self.hparams, AutoTokenizer.from_pretrained(self.hparams.tokenizer)
        files = {"train": given.train, "valid": given.valid}
        texts = load_dataset("json", data_files=files, cache_dir="hf_cache")
        texts = texts.select_columns("text")

        def tokens(rows):
            ids = [[*x, tokenizer.eos_token_id] for x in tokenizer(rows["text"])["input_ids"]]
            return {"input_ids": ids}

        def packed(rows):
            ids, length = list(chain(*rows["input_ids"])), given.length
            starts = range(0, len(ids) // length * length, length)
            blocks = [ids[at : at + length] for at in starts]
            return {"input_ids": blocks, "labels": blocks}

        data = texts.map(tokens, batched=True, remove_columns="text")
        self.data = data.map(packed, batched=True, batch_size=None)

    def loader(self, name: str) -> DataLoader:
        return DataLoader(self.data[name], self.hparams.batch, collate_fn=default_data_collator)

    def train_dataloader(self):
        return self.loader("train")

    def val_dataloader(self):
        return self.loader("valid")


class Gpt(LightningModule):
    def __init__(self, config: dict, lr: float, weight_decay: float, steps: int):
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT2LMHeadModel(GPT2Config(**config))

    def training_step(self, batch, number):
        return self.model(**batch).loss

    def validation_step(self, batch, number):
        self.log("valid_loss", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self):
        decayed = [p for p in self.parameters() if p.dim() > 1]
        spared = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
        given = self.hparams
        optimizer = torch.optim.AdamW(groups, lr=given.lr, weight_decay=given.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    LightningCLI(Gpt, Text)
