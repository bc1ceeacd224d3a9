"""Profile some steps of a run (`train.profile`), with the memory history on a GPU.

Each rank writes `profile/rank_N.json`, for ui.perfetto.dev, and on a GPU `profile/rank_N.pickle`,
for pytorch.org/memory_viz.
"""

from pathlib import Path
from typing import Any

import torch

from whale_train.checkpoints.checkpoint_files import FileRecord
from whale_train.runtime.state.tensor_files import recorded

_MOST_MEMORY_EVENTS = 1_000_000


class StepProfiler:
    """A profiler of some steps of one rank.

    `steps` are the first and the last step, counted from 1. Files are written to `run_dir`, and
    recorded in `files`.
    """

    def __init__(
        self, steps: tuple[int, int], run_dir: Path, rank: int, device: torch.device
    ) -> None:
        self._first, self._last = steps
        self._run_dir, self._rank, self._device = run_dir, rank, device
        self._profile: Any = None
        self.files: list[FileRecord] = []

    def before(self, step: int) -> None:
        """Begin to record, if `step` is the first step to profile."""
        if step != self._first:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MOST_MEMORY_EVENTS)
        self._profile = torch.profiler.profile(
            activities=activities, record_shapes=True, profile_memory=True
        )
        self._profile.start()

    def after(self, step: int) -> None:
        """Stop recording and write the files, if `step` is the last step to profile."""
        if step != self._last or self._profile is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profile.stop()
        run_dir = self._run_dir
        (run_dir / "profile").mkdir(exist_ok=True)
        names = [f"profile/rank_{self._rank}.json"]
        self._profile.export_chrome_trace(str(run_dir / names[0]))
        if self._device.type == "cuda":
            names.append(f"profile/rank_{self._rank}.pickle")
            snapshot: Any = torch.cuda.memory._dump_snapshot
            snapshot(str(run_dir / names[1]))
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profile = None
        self.files += [recorded(run_dir, name) for name in names]
