"""Tweets and their authors: which of them tell of a disaster."""

import csv
from zlib import crc32

import numpy as np
import torch
from torch import nn

WORDS, BUCKETS, SIDES = 16, 2048, ("followers", "link")


class Tweets(torch.utils.data.Dataset):
    def __init__(self, file):
        with open(file) as rows:
            self.rows = list(csv.DictReader(rows))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        row, words = self.rows[number], np.zeros(WORDS, np.int64)
        hashed = [1 + crc32(word.encode()) % (BUCKETS - 1) for word in row["text"].split()]
        words[: len(hashed)] = hashed[:WORDS]
        given = [row[name] != "" for name in SIDES]
        side = [np.log1p(float(row[name] or 0)) for name in SIDES]
        side = np.array([*side, *given], np.float32)
        return {"words": words, "side": side, "labels": int(row["label"])}


class Classifier(nn.Module):
    def __init__(self, width=64, uses_side=True):
        super().__init__()
        self.uses_side = uses_side
        self.words = nn.Embedding(BUCKETS, width, padding_idx=0)
        self.side = nn.Linear(2 * len(SIDES), width)
        self.inner, self.head = nn.Linear(2 * width, width), nn.Linear(width, 2)

    def forward(self, words, side):
        text = self.words(words).sum(1)
        beside = self.side(side) if self.uses_side else torch.zeros_like(text)
        return self.head(self.inner(torch.cat((text, beside), 1)).relu())
