"""A checkpoint read into what a rank holds, whatever plan it was saved under.

The launcher has checked the files (`launcher/resume.py`): what is found missing here was broken
since.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from whale_train.checkpoint_files import BrokenCheckpoint
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
) -> dict[str, Any]:
    """Fill all that `rank` holds, and return what `state.json` says. `places` are given where
    layers that the checkpoint has the same weights of go on by themselves (`delinking.py`).

    Random states are those that were saved where the plan is the one they were saved under; under
    another there is no rank that drew the same, and the default generator, seeded for this run, is
    seeded anew by the step. Raises BrokenCheckpoint where something is missing.
    """
    try:
        scalars: dict[str, Any] = json.loads(
            (checkpoint / "state.json").read_text(encoding="utf-8")
        )
        saved_under = (checkpoint / "plan.json").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BrokenCheckpoint(f"{checkpoint} cannot be read ({error})") from None
    readers = {folder: TensorReader(checkpoint / folder) for folder in ("model", "optimizer")}
    delinking = Delinking(places)
    for block in state.blocks():
        name, factor = delinking.source(block.folder, block.name)
        readers[block.folder].read(name, block.block, block.tensor)
        if factor != 1.0:
            block.tensor.mul_(factor)
        if block.counter is not None:
            _set_count(block.counter, float(block.tensor))
    state.read()
    drawn = checkpoint / "random" / f"rank_{rank}.json"
    if _on_any_host(Plan.from_json(saved_under)) == _on_any_host(plan) and drawn.is_file():
        random.write(json.loads(drawn.read_text(encoding="utf-8")))
    else:
        torch.manual_seed(torch.initial_seed() + 7_368_787 * scalars["step"])
    return scalars


def _on_any_host(plan: Plan) -> Plan:
    """Return the plan without the cards it was for, on which nothing that is computed depends."""
    return replace(plan, ranks=tuple(replace(rank, uuid=None) for rank in plan.ranks))


def _set_count(counter: dict[str, Any], count: float) -> None:
    """Set an optimizer's number of updates, a tensor or a number of Python's."""
    kept = counter["step"]
    if isinstance(kept, torch.Tensor):
        kept.fill_(count)
    else:
        counter["step"] = int(count)
