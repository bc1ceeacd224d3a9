"""Ranks that torchrun starts again at one store agree upon which start is theirs."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from whale_train.runtime.process.external_rank import name_of_start


def start(store: Store, late: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each of three ranks calls the start, of whom some come `late`."""
    monkeypatch.setenv("WORLD_SIZE", "3")

    def come(rank: int) -> str:
        time.sleep(0.2 if rank in late else 0.0)
        return name_of_start(store, rank)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(come, range(3), timeout=60))


@pytest.mark.parametrize("late", [(), (0,), (1, 2)])
def test_all_ranks_of_a_start_have_its_name(
    late: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where ranks of earlier starts have asked and died before they heard the answer."""
    store = dist.HashStore()
    for rank in (1, 2, 3):
        store.set(f"asks/{rank}", f"what rank {rank} asked before")
    first = start(store, late, monkeypatch)
    second = start(store, late, monkeypatch)
    assert len(set(first)) == len(set(second)) == 1
    assert first != second
