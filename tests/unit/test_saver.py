"""What rank 0 makes of what the ranks wrote, and what else in the folder it leaves alone."""

from pathlib import Path
from typing import Any, cast

import torch

from whale_train.checkpoints.checkpoint_files import check, folder_of, unfinished
from whale_train.checkpoints.safetensors_files import Block
from whale_train.config import CheckpointOptions
from whale_train.runtime.state.carrier import Carrier
from whale_train.runtime.state.held import LocalBlock, RankState
from whale_train.runtime.state.random_states import RandomStates
from whale_train.runtime.state.saver import Saver
from whale_train.runtime.state.votes import RequestConsensus


class OneWeight:
    def blocks(self) -> list[LocalBlock]:
        return [LocalBlock("model", "weight", Block((0,), (4,)), torch.arange(4.0), is_owner=True)]


class NoGenerators:
    def read(self) -> dict[str, Any]:
        return {}


def test_what_another_rank_writes_of_the_next_checkpoint_is_left_to_it(tmp_path: Path) -> None:
    """A rank goes on when its part is written, and may have begun the next one before rank 0 has
    finished this one. What is left of an earlier one is of a rank that was late."""
    for name in ("plan.json", "request.json"):
        (tmp_path / name).write_text("{}")
    late, begun = (unfinished(folder_of(tmp_path, step)) / "model" for step in (6, 12))
    for folder in (late, begun):
        folder.mkdir(parents=True)
        (folder / "rank_1_0.safetensors").touch()
    saver = Saver(
        tmp_path,
        CheckpointOptions(),
        cast(RankState, OneWeight()),
        cast(RandomStates, NoGenerators()),
        rank=0,
        carrier=Carrier(tmp_path, (), rank=0, ranks=1, timeout_s=1.0),
        votes=RequestConsensus(),
        is_asked_to_stop=lambda: False,
    )
    saver.save(9, {})
    saver.wait()
    assert check(folder_of(tmp_path, 9)).step == 9
    assert [path.name for path in begun.iterdir()] == ["rank_1_0.safetensors"]
    assert not late.exists()
