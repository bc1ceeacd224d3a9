"""The global order of the samples: which ones an optimizer step takes.

The order depends on the seed, the dataset's size and the global batch, and on nothing of the plan.
So every plan trains on the same batches.
"""

import numpy as np

from whale_train.data.dataset import Dataset, Indices
from whale_train.data.mixture import MixedDataset
from whale_train.data.permutation import permute
from whale_train.data.random_bits import random_bits, stream_key
from whale_train.data.stream import StreamDataset


def step_indices(
    num_samples: int, global_batch: int, step: int, seed: int, shuffle: bool
) -> Indices:
    """Return the dataset indices of the global batch of step `step` (0-based).

    They are int64 `[global_batch]`. Epochs follow each other without a gap: a batch may end one
    epoch and begin the next, and no sample is left out. With `shuffle`, each epoch is its own
    permutation of all samples; otherwise it is 0, 1, 2, ... The cost grows with the batch, not with
    the dataset or the step.
    """
    return indices_from(step * global_batch, num_samples, global_batch, seed, shuffle)


def indices_from(position: int, num_samples: int, count: int, seed: int, shuffle: bool) -> Indices:
    """Return the dataset indices of `count` samples from `position` of the whole run on.

    They are int64 `[count]`, in the order of `step_indices`. A resumed run continues at its
    position, even with another batch size.
    """
    positions = position + np.arange(count, dtype=np.int64)
    epochs, places = np.divmod(positions, num_samples)
    if not shuffle:
        return places
    return permute(places, num_samples, random_bits(stream_key("order", seed), epochs))


def samples_at(dataset: Dataset, position: int, count: int, seed: int, shuffle: bool) -> Indices:
    """Return the indices of `count` training samples of `dataset` from `position` of the whole run
    on, int64 `[count]`."""
    if isinstance(dataset, MixedDataset):
        return dataset.order.indices_at(position + np.arange(count, dtype=np.int64), seed, shuffle)
    if isinstance(dataset, StreamDataset):
        shuffle = False
    return indices_from(position, dataset.num_samples, count, seed, shuffle)


def evaluation_batches(num_samples: int, global_batch: int) -> list[tuple[float, Indices]]:
    """Return (weight, indices) of batches that together evaluate samples 0 to `num_samples` - 1.

    The indices are int64 `[global_batch]`. The weighted sum over the batches of anything that adds
    up over samples is the sum over all samples, once each.

    The samples left after whole batches are repeated in a last batch, as often as it has room for
    all of them. The remaining room is filled with one of these samples. One more batch, of that
    sample alone, subtracts it again. Repeating as much as possible keeps the subtracted part
    smaller than the rest, so that few digits cancel.
    """
    num_full, rest = divmod(num_samples, global_batch)
    every = np.arange(num_samples, dtype=np.int64)
    batches = [(1.0, part) for part in every[: num_samples - rest].reshape(num_full, global_batch)]
    if rest:
        times, room = divmod(global_batch, rest)
        left = every[num_samples - rest :]
        filling = np.full(global_batch, left[0])
        batches.append((1 / times, np.concatenate([np.tile(left, times), filling[:room]])))
        if room:
            batches.append((-room / (times * global_batch), filling))
    return batches
