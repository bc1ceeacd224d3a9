"""Pictures as 64 codes of a small vector quantiser, a model that whale-train trains.

    python vq.py codes --model runs/vq/model          # the pairs' pictures as text: codes/*.tar
    python vq.py draw --model runs/vq/model --m6 runs/draw/model

`draw` has an M6 write the codes of captions that no run has seen, makes pictures of them
(`drawn.png`: each beside one of the held-out pictures), and counts what is right in them, by the
nearest picture that `make_pairs.py` would draw.
"""

import argparse
import io
import json
import tarfile
from itertools import product
from pathlib import Path

import numpy as np
import torch
from caption import MEAN, STD, greedy, load, pairs
from make_pairs import COMBINATIONS, caption, painted, write_tokenizer
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

CODES = 64


class VQ(nn.Module):
    """Autoencoder whose middle is one of `CODES` directions for every 4 x 4 pixels."""

    def __init__(self, width=64, depth=8):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 4), nn.ReLU(), nn.Conv2d(width, depth, 1)
        )
        self.codebook = nn.Embedding(CODES, depth)
        self.decoder = nn.Sequential(
            nn.Conv2d(depth, width, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 4)
        )

    def directions(self, pixel_values):
        return functional.normalize(self.encoder(pixel_values).permute(0, 2, 3, 1), dim=-1)

    def codes(self, pixel_values):
        """Return the codes of pictures, int64 [batch, 8, 8]."""
        return self._nearest(self.directions(pixel_values))

    def decode(self, codes):
        """Return the pictures of codes, [batch, 3, 32, 32]."""
        chosen = functional.normalize(self.codebook(codes), dim=-1)
        return self.decoder(chosen.permute(0, 3, 1, 2))

    def _nearest(self, directions):
        return (directions @ functional.normalize(self.codebook.weight, dim=-1).T).argmax(-1)

    def forward(self, pixel_values):
        """Return the loss of the pictures, and that of codes and directions to meet."""
        found = self.directions(pixel_values)
        chosen = functional.normalize(self.codebook(self._nearest(found)), dim=-1)
        passed = found + (chosen - found).detach()
        image = self.decoder(passed.permute(0, 3, 1, 2))
        near = functional.mse_loss(chosen, found.detach())
        return (
            functional.mse_loss(image, pixel_values)
            + near
            + 0.25 * functional.mse_loss(found, chosen.detach())
        )


def quantiser(folder):
    model = VQ()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


@torch.no_grad()
def write_codes(model):
    """Write shards of texts: a caption, the separator, and the codes of its picture."""
    Path("codes").mkdir(exist_ok=True)
    used = set()
    for shard in sorted(Path("pairs").glob("train-*.tar")):
        pixels, captions = zip(*pairs(shard), strict=True)
        codes = model.codes(torch.from_numpy(np.stack(pixels))).flatten(1).tolist()
        used |= {code for row in codes for code in row}
        with tarfile.open(Path("codes") / shard.name, "w") as tar:
            for number, (text, row) in enumerate(zip(captions, codes, strict=True)):
                content = f"{text} <sep> {' '.join(f'c{code}' for code in row)}".encode()
                member = tarfile.TarInfo(f"{number:06}.txt")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    write_tokenizer(Path("words_and_codes"), [f"c{code}" for code in range(CODES)])
    print(json.dumps({"codes_used": len(used), "of": CODES}))


def to_draw(sample) -> dict:
    """Return a text of a caption and codes as a sample of M6: the caption is the source."""
    words = sample["input_ids"]
    return {"input_ids": words, "labels": words, "task": 2}


@torch.no_grad()
def draw(model, m6, words, most):
    """Return the held-out pictures and captions, and the pictures drawn from the captions alone."""
    pixels, captions = zip(*pairs("pairs/held_out.tar"), strict=True)
    pixels, captions = pixels[:most], captions[:most]
    begins = torch.tensor([words.encode(f"{text} <sep>").ids[:-1] for text in captions])
    text = greedy(m6, None, begins, 2, -1, 64)
    first = words.token_to_id("c0")
    codes = (text[:, begins.shape[1] :] - first).clamp(0, CODES - 1)
    return np.stack(pixels), captions, model.decode(codes.view(-1, 8, 8)).numpy()


def as_bytes(pixels):
    """Return pictures as uint8 [batch, 32, 32, 3]."""
    image = pixels.transpose(0, 2, 3, 1) * STD + MEAN
    return (image * 255).clip(0, 255).astype(np.uint8)


def nearest(pictures):
    """Return the combination of the nearest of the nine pictures of each, without the noise."""
    grey = np.full((32, 32, 3), 20, np.uint8)
    named = list(product(COMBINATIONS, product((-1, 0, 1), repeat=2)))
    drawings = np.stack([np.asarray(painted(x, grey, move)) for x, move in named])
    drawings = drawings.reshape(len(named), -1).astype(np.float32)
    flat = pictures.reshape(len(pictures), 1, -1).astype(np.float32)
    return [named[np.square(drawings - one).sum(1).argmin()][0] for one in flat]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("codes", "draw"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--m6", type=Path)
    parser.add_argument("--most", type=int, default=48)
    given = parser.parse_args()
    if given.what == "codes":
        return write_codes(quantiser(given.model))
    pixels, captions, made = draw(
        quantiser(given.model), *load(given.m6, image_size=None), given.most
    )
    given_ones, pictures = as_bytes(pixels), as_bytes(made)
    sheet = [np.concatenate(pair, 1) for pair in zip(given_ones, pictures, strict=True)]
    rows = [np.concatenate(sheet[n : n + 8], 1) for n in range(0, len(sheet) // 8 * 8, 8)]
    if rows:
        image = Image.fromarray(np.concatenate(rows))
        image.resize([2 * x for x in image.size], Image.Resampling.NEAREST).save("drawn.png")
    wanted = {caption(combination): combination for combination in COMBINATIONS}
    hits = np.array([
        [a == b for a, b in zip(wanted[text], one, strict=True)]
        for text, one in zip(captions, nearest(pictures), strict=True)
    ])  # fmt: skip
    size, colour, shape, place = hits.mean(0).round(3).tolist()
    both, whole = (hits[:, 1] & hits[:, 2]).mean(), hits.all(1).mean()
    print(json.dumps({"pictures": len(hits), "size": size, "colour": colour, "shape": shape,
                      "place": place, "colour_and_shape": round(float(both), 3),
                      "all": round(float(whole), 3)}))  # fmt: skip


if __name__ == "__main__":
    main()
