"""Write captions of pictures that no run has seen, with the weights of a run.

    python caption.py runs/captions/model [--show 5]

It prints how many captions of `pairs/held_out.tar` are right, word for word.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer

from whale_train.models.m6 import M6

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # what data.mean and data.std are


def load(folder, **sizes):
    """Return the model and the tokenizer of a run's folder of weights."""
    weights = load_file(folder / "model.safetensors")
    vocabulary, text = len(weights["token.weight"]), len(weights["position.weight"])
    model = M6(vocab_size=vocabulary, sequence_length=text, **sizes)
    model.load_state_dict(weights)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def pairs(shard):
    """Yield the picture, float32 [3, 32, 32], and the caption of every pair of a shard."""
    with tarfile.open(shard) as tar:
        for picture, text in zip(*[iter(tar)] * 2, strict=True):
            image = Image.open(io.BytesIO(tar.extractfile(picture).read()))
            pixels = (np.asarray(image, np.float32) / 255 - MEAN) / STD
            yield (
                pixels.transpose(2, 0, 1).astype(np.float32),
                tar.extractfile(text).read().decode(),
            )


@torch.no_grad()
def greedy(model, pixels, begins, task, end, most):
    """Return the tokens `begins` [batch, tokens] with up to `most` likeliest ones after them."""
    text, tasks = begins, torch.full((len(begins),), task)
    for _ in range(most):
        logits = model(text, pixel_values=pixels, task=tasks).logits[:, -1]
        text = torch.cat((text, logits.argmax(1, keepdim=True)), 1)
        if (text == end).any(1).all():
            break
    return text


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--show", type=int, default=5)
    given = parser.parse_args()
    model, words = load(given.model)
    pixels, captions = zip(*pairs("pairs/held_out.tar"), strict=True)
    begins = torch.full((len(captions), 1), words.token_to_id("<bos>"))
    end = words.token_to_id("<eos>")
    text = greedy(model, torch.from_numpy(np.stack(pixels)), begins, 1, end, 12)
    said = [words.decode(x[1:].tolist(), skip_special_tokens=False) for x in text]
    said = [x.partition(" <eos>")[0] for x in said]
    for wanted, written in list(zip(captions, said, strict=True))[: given.show]:
        print(f"{wanted!r}: {written!r}")
    right = sum(map(str.__eq__, captions, said))
    print(json.dumps({"right": right, "of": len(said), "accuracy": right / len(said)}))


if __name__ == "__main__":
    main()
