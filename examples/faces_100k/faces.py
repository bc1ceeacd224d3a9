"""Drawn faces of 100,000 people, and a network that tells whose face it is."""

import numpy as np
import torch
from torch import nn


class Faces(torch.utils.data.Dataset):
    """Pictures of 16 x 16 pixels, two a person: eyes and a mouth at places of their own."""

    def __init__(self, people=100_000, pictures=2):
        self.people, self.pictures = people, pictures

    def __len__(self):
        return self.people * self.pictures

    def __getitem__(self, number):
        person, picture = number % self.people, number // self.people
        own = np.random.default_rng(person).uniform(-1, 1, (3, 4))
        seen = own + np.random.default_rng((person, picture)).normal(0, 0.02, (3, 4))
        y, x = np.mgrid[-2:2:16j, -2:2:16j]
        image = np.zeros((16, 16))
        for down, across, wide, grey in seen:
            place = (x - across) ** 2 / (0.3 + 0.2 * wide) + (y - down) ** 2 / 0.2
            image += (1.5 + grey) * np.exp(-place)
        return {"pixel_values": image[None].astype(np.float32), "labels": person}


class Net(nn.Module):
    def __init__(self, people=100_000, width=256):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 16, width), nn.LayerNorm(width),
        )  # fmt: skip
        self.head = nn.Linear(width, people)

    def forward(self, pixel_values):
        return self.head(self.backbone(pixel_values))
