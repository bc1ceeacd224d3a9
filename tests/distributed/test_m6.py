"""M6: what a task attends to and is trained on, and any plan against one device."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.distributed.cases import OPTIMIZERS, TOLERANCE, hardware
from tests.distributed.equality import Jobs, assert_equal, save
from tests.distributed.test_parallel_strategies import pipeline
from tests.distributed.test_routed_experts import beside
from tests.pairs import some
from torch import Tensor

from whale_train.models.m6 import M6, attention_mask
from whale_train.models.moe_gpt import MoEGPT

SEPARATOR, PATCHES, TOKENS = 1, 4, 6
SIZES = {"vocab_size": 31, "sequence_length": TOKENS, "image_size": 8, "patch_size": 4}
SIZES |= {"width": 16, "depth": 2, "heads": 2, "ffn": 24, "experts": 4}
TASKS = tuple(range(4))


def test_a_mask_is_what_each_position_sees() -> None:
    sees, is_source = [True, False], [[True, True, False], [False, False, False]]
    mask = attention_mask(2, torch.tensor(sees), torch.tensor(is_source))
    assert mask.shape == (2, 1, 5, 5)
    for sample, query, key in product(range(2), range(5), range(5)):
        if query < 2:
            wanted = key < 2
        elif key < 2:
            wanted = sees[sample]
        else:
            wanted = key <= query or is_source[sample][key - 2]
        assert bool(mask[sample, 0, query, key]) == wanted


def texts(samples: int) -> Tensor:
    """Return texts whose source, where a task has one, are the first three tokens."""
    ids = torch.randint(2, 31, (samples, TOKENS))
    ids[:, 2] = SEPARATOR
    return ids


@pytest.fixture
def model() -> M6:
    torch.manual_seed(0)
    return M6(**SIZES)


def test_a_task_decides_what_a_token_depends_on(model: M6) -> None:
    """The gradients of what a position predicts are zero of all that its task hides from it."""
    embedded: list[Tensor] = []

    def keep(_: object, __: object, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    model.token.register_forward_hook(keep)
    for task, position in product(TASKS, range(TOKENS)):
        image = torch.randn(1, 3, 8, 8, requires_grad=True)
        logits = model(texts(1), None, image, torch.tensor([task])).logits
        logits[0, position].square().sum().backward()
        assert image.grad is not None
        assert bool(image.grad.any()) == (task in (1, 3))
        last = max(position, 2) if task >= 2 else position
        grad = embedded.pop().grad
        assert grad is not None
        assert grad[0].any(1).tolist() == [x <= last for x in range(TOKENS)]


def test_the_loss_counts_no_token_of_a_source(model: M6) -> None:
    image, ids = torch.randn(4, 3, 8, 8), texts(4)
    ids[:, 4] = SEPARATOR  # a second one ends nothing
    task = torch.tensor(TASKS)
    target = ids.clone()
    target[2:, :3] = -100
    logits = model(ids, None, image, task).logits
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].mT, target[:, 1:])
    loss = model(ids, ids, image, task).loss
    torch.testing.assert_close(loss, wanted)
    captions = torch.ones_like(task)
    assert (model(ids, None, image).logits == model(ids, None, image, captions).logits).all()


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="image_size=30 does not divide into patch_size=4"):
        M6(image_size=30, patch_size=4)


def test_without_images_it_is_a_mixture_of_experts(model: M6) -> None:
    sizes = {key: value for key, value in SIZES.items() if key not in ("image_size", "patch_size")}
    torch.manual_seed(0)
    wanted = MoEGPT(**sizes)
    torch.manual_seed(0)
    without = M6(**sizes, image_size=None)
    ids = texts(3)
    ours, theirs = without(ids, ids), wanted(ids, ids)
    assert ours.loss is not None
    assert (ours.logits == theirs.logits).all()
    assert ours.loss == theirs.loss
    with pytest.raises(ValueError, match="image_size=None has no part for pixel_values"):
        without(ids, ids, torch.zeros(3, 3, 8, 8))
    with pytest.raises(ValueError, match="image_size is given, and pixel_values are not"):
        model(ids, ids)


STRATEGIES = {
    "experts": (2, beside(), ()),
    "experts_unlike": (3, beside("{zero: 1}"), (5, 2, 1)),
    "pipeline": (2, pipeline(2, micro_batches=2), ()),
    "split": (2, "{split: {}}", ()),
    "copies_unlike": (2, "{replicate: {zero: 3}}", (3, 1)),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs"
    torch.manual_seed(0)
    ids = texts(24).numpy()
    image = np.random.default_rng(0).normal(size=(24, 3, 8, 8)).astype(np.float32)
    save(path, {"pixel_values": image, "input_ids": ids, "labels": ids, "task": np.arange(24) % 4})
    return path


@pytest.mark.parametrize("name", some(list(STRATEGIES), ["experts_unlike", "pipeline", "split"]))
def test_equals_one_device(name: str, jobs: Jobs, pairs: Path) -> None:
    devices, graph, speeds = STRATEGIES[name]
    common = [
        *("model=m6_base", *(f"model.{key}={value}" for key, value in SIZES.items())),
        *("model.balance=0.1", "data=arrays", f"data.path={pairs}.npz", "data.shuffle=false"),
        *(*OPTIMIZERS["sgd"], "train.steps=4", "train.global_batch=8"),
    ]
    if name == "pipeline":
        common.append("model.balance_over=sequence")
    spread = [*common, f"strategy.graph={graph}", *hardware(devices, speeds)]
    single = [*common, "strategy=single", *hardware(1, ())]
    assert_equal(jobs.run(spread), jobs.run(single), TOLERANCE)
