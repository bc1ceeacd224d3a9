"""Tests of what only GPUs show. Without one they are skipped, and say so."""

from pathlib import Path

import pytest

from whale_train.machine.nvml import visible_gpus

HERE = Path(__file__).parent
NEEDS = "needs_gpus"  # the mark's name; its argument is how many


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{NEEDS}(number): GPUs that a test takes")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what takes more GPUs than there are, by name."""
    ours = [item for item in items if HERE in item.path.parents]
    there = len(visible_gpus()) if ours else 0
    for item in ours:
        mark = item.get_closest_marker(NEEDS)
        needed = mark.args[0] if mark else 1
        if there < needed:
            said = f"takes {needed} GPU{'s' * (needed > 1)}, and there are {there}"
            item.add_marker(pytest.mark.skip(reason=said))
