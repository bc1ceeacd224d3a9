"""When a command starts a host before it has read its config: only where ranks are likely."""

from collections.abc import Mapping, Sequence

import pytest

from whale_train.launcher.ranks.early_host import asks_for_ranks


@pytest.mark.parametrize(
    ("arguments", "environment", "asks"),
    [
        ([], {}, True),
        (["strategy=zero1", "mode=train"], {"PATH": "/bin"}, True),
        (["mode=plan", "strategy=zero1"], {}, False),
        (["mode=verify"], {}, False),
        (["--config-dir=mine", "strategy=zero1"], {}, True),
        (["--config-dir", "mine"], {}, True),
        (["--help"], {}, False),
        (["-m", "seed=1,2"], {}, False),
        (["launcher=ssh"], {}, False),
        (["launcher=slurm"], {}, False),
        ([], {"RANK": "1"}, False),
        ([], {"SLURM_PROCID": "0"}, False),
    ],
)
def test_a_host_is_started_early_for_commands_that_train_here(
    arguments: Sequence[str], environment: Mapping[str, str], asks: bool
) -> None:
    assert asks_for_ranks(arguments, environment) is asks
