"""Draw shapes, write their captions, and keep both as pairs in WebDataset shards.

    python make_pairs.py [--samples 6000] [--seed 0] [--to .]

A picture has one shape of a colour, a size and a place. A ninth of the combinations is in no
training shard: `pairs/held_out.tar` has one picture of each of them. `words/` is a tokenizer of the
captions' words.
"""

import argparse
import io
import json
import tarfile
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers, processors

COLOURS = {
    "red": (220, 50, 40),
    "green": (50, 180, 70),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 50),
    "purple": (150, 60, 190),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = {"small": 4, "large": 6}
PLACES = {
    f"{row} {column}": (x, y)
    for (row, y), (column, x) in product(
        (("top", 7), ("middle", 16), ("bottom", 25)), (("left", 7), ("centre", 16), ("right", 25))
    )
}
COMBINATIONS = tuple(product(SIZES, COLOURS, SHAPES, PLACES))
SPECIAL = ("<pad>", "<sep>", "<bos>", "<eos>", "<mask>", "<unk>")
PER_SHARD = 1000


def caption(combination):
    size, colour, shape, place = combination
    return f"a {size} {colour} {shape} at the {place}"


def split(seed):
    """Return the combinations to train on, and those held back."""
    order = np.random.default_rng(seed).permutation(len(COMBINATIONS))
    chosen = [COMBINATIONS[number] for number in order]
    return chosen[len(chosen) // 9 :], chosen[: len(chosen) // 9]


def drawn(combination, rng):
    """Return a picture of 32 x 32 pixels, its shape moved by a pixel at most, on dark noise."""
    return painted(combination, rng.integers(0, 40, (32, 32, 3), np.uint8), rng.integers(-1, 2, 2))


def painted(combination, background, move):
    """Return the picture of a combination on a background, its shape moved by pixels."""
    size, colour, shape, place = combination
    image, radius = Image.fromarray(background), SIZES[size]
    x, y = np.add(PLACES[place], move).tolist()
    draw, fill = ImageDraw.Draw(image), COLOURS[colour]
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill)
    elif shape == "square":
        draw.rectangle(box, fill)
    elif shape == "triangle":
        draw.polygon(((x, y - radius), (x - radius, y + radius), (x + radius, y + radius)), fill)
    else:
        draw.rectangle((x - radius, y - 1, x + radius, y + 1), fill)
        draw.rectangle((x - 1, y - radius, x + 1, y + radius), fill)
    return image


def write_shard(path, combinations, rng):
    with tarfile.open(path, "w") as tar:
        for number, combination in enumerate(combinations):
            picture = io.BytesIO()
            drawn(combination, rng).save(picture, "png")
            for extension, content in (
                ("png", picture.getvalue()),
                ("txt", caption(combination).encode()),
            ):
                member = tarfile.TarInfo(f"{path.stem}-{number:06}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_tokenizer(folder, more=()):
    """Write a tokenizer of the captions' words and of `more`, in that order."""
    texts = map(caption, COMBINATIONS)
    words = dict.fromkeys(word for text in texts for word in text.split())
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *words, *more))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = [(name, vocabulary[name]) for name in ("<bos>", "<eos>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=around
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name.strip('<>')}_token": name for name in SPECIAL if name != "<sep>"}
    names = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--to", type=Path, default=Path())
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    training, held_out = split(given.seed)
    (given.to / "pairs").mkdir(parents=True, exist_ok=True)
    chosen = [training[number] for number in rng.integers(0, len(training), given.samples)]
    for shard, start in enumerate(range(0, len(chosen), PER_SHARD)):
        path = given.to / f"pairs/train-{shard:03}.tar"
        write_shard(path, chosen[start : start + PER_SHARD], rng)
    write_shard(given.to / "pairs/held_out.tar", held_out, rng)
    write_tokenizer(given.to / "words")
    print(f"{given.samples} pairs of {len(training)} combinations; {len(held_out)} held back")


if __name__ == "__main__":
    main()
