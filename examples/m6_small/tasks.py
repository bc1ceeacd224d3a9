"""Make a sample of one of M6's tasks of a picture and its caption."""

import random

import numpy as np

SEPARATOR, END, MASK = 1, 3, 4  # of the tokenizer that make_pairs.py writes
TEXT, CAPTION, DENOISE, DENOISE_WITH_IMAGE = range(4)


def task(sample, tasks=(TEXT, CAPTION, DENOISE, DENOISE_WITH_IMAGE)) -> dict:
    """Return a sample with one of the tasks, drawn at random.

    To denoise, a copy of the caption with a third of its words masked comes first, as the source.
    """
    words, number = sample["input_ids"], random.choice(tasks)
    if number in (DENOISE, DENOISE_WITH_IMAGE):
        damaged = words[:-1].copy()
        inner = range(1, len(damaged))
        damaged[random.sample(inner, len(inner) // 3)] = MASK
        words = np.concatenate((damaged, [SEPARATOR], words))
    return {
        "pixel_values": sample["pixel_values"],
        "input_ids": words,
        "labels": words,
        "task": number,
    }
