"""What DeepSpeed asks of its accelerator, where a rank sees one GPU by its UUID."""

from collections.abc import Iterator

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from whale_train.runtime.engines.accelerator import use_accelerator


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    use_accelerator(torch.device("cpu"))


def test_free_memory_is_that_of_the_gpu_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-7628e9a4-8146-7273-0e0e-fc04d5873ddb")
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda at: asked.append(at) or (7, 9))
    use_accelerator(torch.device("cuda", 0))
    assert get_accelerator().available_memory() == 7
    assert asked == [None]


def test_what_it_works_on_follows_the_device() -> None:
    use_accelerator(torch.device("cuda", 0))
    assert get_accelerator().device_name() == "cuda"
    use_accelerator(torch.device("cpu"))
    assert get_accelerator().device_name() == "cpu"
