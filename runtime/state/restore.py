"""A checkpoint read into what a rank holds, whatever plan it was saved under.

The launcher has checked the files (`launcher/resume.py`): what is found missing here was broken
since.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whale_train.checkpoints.checkpoint_state import CheckpointState
from whale_train.checkpoints.safetensors_files import read_json, read_text
from whale_train.runtime.state.delinking import Delinking
from whale_train.runtime.state.held import RankState
from whale_train.runtime.state.random_states import RandomStates
from whale_train.runtime.state.tensor_files import TensorReader
from whale_train.strategies.plan.plan import Plan


def restore(
    checkpoint: Path,
    state: RankState,
    random: RandomStates,
    plan: Plan,
    rank: int,
    places: Mapping[str, str],
) -> CheckpointState:
    """Fill all that `rank` holds, and return what `state.json` says. `places` are given where
    layers that the checkpoint has the same weights of go on by themselves (`delinking.py`). Moments
    of a parameter that was not trained stay as they are before a first update.

    Random states are those that were saved where the plan is the one they were saved under; under
    another there is no rank that drew the same, and the default generator, seeded for this run, is
    seeded anew by the step. Raises BrokenCheckpoint where something is missing.
    """
    scalars = CheckpointState.read(checkpoint)
    saved_under = read_text(checkpoint / "plan.json")
    readers = {folder: TensorReader(checkpoint / folder) for folder in ("model", "optimizer")}
    delinking = Delinking(places)
    counts: dict[int, float] = {}
    for block in state.blocks():
        name, factor = delinking.source(block.folder, block.name)
        if block.folder == "optimizer" and not readers[block.folder].has_moments(name):
            continue
        readers[block.folder].read(name, block.block, block.tensor)
        if factor != 1.0:
            block.tensor.mul_(factor)
        if block.counter is not None:  # ZeRO has one of all parameters: the largest
            counts[id(block.counter)] = max(counts.get(id(block.counter), 0.0), float(block.tensor))
            _set_count(block.counter, counts[id(block.counter)])
    state.read()
    drawn = checkpoint / "random" / f"rank_{rank}.json"
    if _is_same(saved_under, plan) and drawn.is_file():
        random.write(read_json(drawn))
    else:
        torch.manual_seed(torch.initial_seed() + 7_368_787 * scalars.step)
    return scalars


def _is_same(text: str, plan: Plan) -> bool:
    """Return whether a saved plan computes what `plan` does; one that cannot be read does not."""
    try:
        return _computed(Plan.from_json(text)) == _computed(plan)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _computed(plan: Plan) -> Plan:
    """Return the plan without what nothing that is computed depends on: the cards it was for, and
    why it is as it is."""
    ranks = tuple(replace(rank, uuid=None) for rank in plan.ranks)
    return replace(plan, ranks=ranks, decisions=())


def _set_count(counter: dict[str, Any], count: float) -> None:
    """Set an optimizer's number of updates, a tensor or a number of Python's."""
    kept = counter["step"]
    if isinstance(kept, torch.Tensor):
        kept.fill_(count)
    else:
        counter["step"] = int(count)
