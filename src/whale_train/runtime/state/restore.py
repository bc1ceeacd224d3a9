"""Read a checkpoint into the state that a rank holds, whichever plan it was saved under.

The launcher has checked the files (`launcher/resume.py`), so a file that is missing here
disappeared afterwards.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

import torch

from whale_train.checkpoints.checkpoint_state import CheckpointState
from whale_train.checkpoints.safetensors_files import read_text
from whale_train.checkpoints.url_path import Place
from whale_train.runtime.state.delinking import Delinking
from whale_train.runtime.state.held import LocalBlock, RankState
from whale_train.runtime.state.random_states import RankRandom
from whale_train.runtime.state.tensor_files import TensorReader
from whale_train.strategies.plan.plan import Plan


def restore(
    checkpoint: Place,
    state: RankState,
    random: RankRandom,
    plan: Plan,
    places: Mapping[str, str],
) -> CheckpointState:
    """Fill the state that a rank holds from `checkpoint`, and return the content of `state.json`.

    `places` are given where layers that share weights in the checkpoint continue separately
    (`delinking.py`). Moments of a parameter that was not trained stay as before a first update.

    `random` decides which random states fit the rank. Raises BrokenCheckpoint where a tensor or
    file is missing.
    """
    scalars = CheckpointState.read(checkpoint)
    saved_under = read_text(checkpoint / "plan.json")
    readers = {folder: TensorReader(checkpoint / folder) for folder in ("model", "optimizer")}
    delinking = Delinking(places)
    state.make(lambda path: readers["optimizer"].has_moments(f"state.{path}.step"))
    numbers: dict[tuple[int, str], float] = {}
    blocks: list[tuple[LocalBlock, str, float]] = []
    for block in state.blocks():
        name, factor = delinking.source(block.folder, block.name)
        if block.folder != "optimizer" or readers[block.folder].has_moments(name):
            blocks.append((block, name, factor))
    for folder, reader in readers.items():
        of_folder = [(name, x.block, x.tensor) for x, name, _ in blocks if x.folder == folder]
        reader.read_all(of_folder)
    for block, _, factor in blocks:
        if factor != 1.0:
            block.tensor.mul_(factor)
        if block.number is not None:  # ZeRO has one count for all parameters: the largest
            entries, key = block.number
            place = (id(entries), key)
            numbers[place] = max(numbers.get(place, -inf), float(block.tensor))
            _set_number(entries, key, numbers[place])
    state.read()
    random.restore(checkpoint, _plan_in(saved_under), plan, scalars.step)
    return scalars


def restore_weights(folder: Place, state: RankState, renamed: Mapping[str, str]) -> None:
    """Fill the weights that a rank holds from the safetensors files in `folder`.

    Optimizers stay as before a first update. `renamed` maps names of tensors to their names in the
    files, where the two differ. Raises BrokenCheckpoint where a tensor or file is missing.
    """
    reader = TensorReader(folder)
    blocks = [block for block in state.blocks() if block.folder == "model"]
    reader.read_all([(renamed.get(x.name, x.name), x.block, x.tensor) for x in blocks])
    state.read()


def _plan_in(text: str) -> Plan | None:
    """Return the plan in the text of a `plan.json`, or None if it cannot be read."""
    try:
        return Plan.from_json(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _set_number(entries: dict[str, Any], key: str, number: float) -> None:
    """Set the number `key` of an optimizer's state, which is a tensor or a Python number."""
    current = entries[key]
    if isinstance(current, torch.Tensor):
        current.fill_(number)
    else:
        entries[key] = type(current)(number)
