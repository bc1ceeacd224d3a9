"""Folders of images, shards and streams: losses of a plain loop, and another plan goes on."""

import io
import json
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.distributed.cases import TOLERANCE, UNEVEN, hardware
from tests.distributed.equality import run_job
from tests.distributed.own_kinds import SAMPLES, Pixels, label, pixels
from tests.distributed.served import Served
from tests.pairs import some

from whale_train.data.random_bits import random_bits, stream_key
from whale_train.launcher.modes.run_history import history_of
from whale_train.launcher.modes.sample_audit import audited

BATCH, STEPS, SAVED = 5, 6, 2  # 14 samples: the third step ends the first epoch
MEAN, STD = 0.5, 0.25
PLANS = {
    "dp": "{replicate: {}}",
    "zero3": "{replicate: {zero: 3}}",
    "pipeline": "{pipeline: {stages: 2, micro_batches: 3}}",
}
IMAGES = (
    *("data.shuffle=false", "data.transform={_target_: own_kinds.Rolled}", "data.workers=2"),
    *(f"data.mean=[{MEAN},{MEAN},{MEAN}]", f"data.std=[{STD},{STD},{STD}]"),
    *("data.evaluation_transform=[]", "data.channels=3"),
)


def image_folder(folder: Path) -> tuple[str, ...]:
    for number in range(SAMPLES):
        path = folder / f"class_{label(number)}" / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)).save(path)
    sets = f"data.evaluation={{again: {{path: {folder}}}}}"
    return ("data=image_folder", f"data.path={folder}", sets, *IMAGES)


def webdataset(folder: Path) -> tuple[str, ...]:
    folder.mkdir()
    for shard, numbers in enumerate((range(6), range(6, 7), range(7, SAMPLES))):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in numbers:
                image = io.BytesIO()
                Image.fromarray(pixels(number)).save(image, "png")
                for name, content in (("png", image.getvalue()), ("cls", b"%d" % label(number))):
                    info = tarfile.TarInfo(f"{number}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    sets = f"data.evaluation={{again: {{path: {folder}/*.tar}}}}"
    path = f'data.path="{folder}/{{0..2}}.tar"'
    return ("data=webdataset", path, f"data.cache={folder}/cache", sets, *IMAGES)


def stream(folder: Path) -> tuple[str, ...]:
    fields = "data.fields=[pixel_values, labels]"
    sets = "data.evaluation={again: {rolls: false}}"
    return ("data._target_=own_streams.streamed", fields, sets)


KINDS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "image_folder": image_folder,
    "webdataset": webdataset,
    "stream": stream,
}


def plain_loop(seed: int = 0) -> tuple[list[float], float]:
    """Return the losses of a plain loop, and that of all samples without a roll after it."""
    torch.manual_seed(seed)
    model = Pixels()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = np.arange(STEPS * BATCH)
    draws = (random_bits(stream_key("draws", seed), places) >> np.uint64(1)).tolist()

    def loss_of(numbers: list[int], rolls: list[int]) -> torch.Tensor:
        rolled = [np.roll(pixels(n), by, 1) for n, by in zip(numbers, rolls, strict=True)]
        images = (np.stack(rolled).transpose(0, 3, 1, 2) / 255 - MEAN) / STD
        labels = torch.tensor([label(number) for number in numbers])
        logits = model(torch.from_numpy(images).float())
        return torch.nn.functional.cross_entropy(logits, labels)

    losses = []
    for step in range(STEPS):
        of_step = places[step * BATCH : (step + 1) * BATCH].tolist()
        rolls = [random.Random(draws[place]).randrange(4) for place in of_step]
        loss = loss_of([place % SAMPLES for place in of_step], rolls)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, loss_of(list(range(SAMPLES)), [0] * SAMPLES).item()


@pytest.mark.parametrize(
    ("kind", "plan", "then"),
    some(
        [(kind, a, b) for kind in KINDS for a in PLANS for b in PLANS if a != b],
        [
            ("image_folder", "dp", "pipeline"),
            ("webdataset", "zero3", "dp"),
            ("stream", "dp", "pipeline"),
        ],
    ),
)
def test_losses_are_a_plain_loops_under_a_plan_and_the_next(
    served: Served, tmp_path: Path, kind: str, plan: str, then: str
) -> None:
    given = KINDS[kind](tmp_path / "data")
    common = (
        *("model._target_=own_kinds.Pixels", "model.loss=cross_entropy", "strategy=dp", *given),
        *(
            "optimizer=sgd",
            "optimizer.lr=0.1",
            "optimizer.schedule=constant",
            "train.grad_clip=null",
        ),
        *(f"train.global_batch={BATCH}", f"train.steps={STEPS}", f"train.evaluate_every={STEPS}"),
        *hardware(2, UNEVEN),
    )
    expected, evaluated = plain_loop()
    for name, graph, more in (
        ("first", PLANS[plan], (f"checkpoint.every={SAVED}",)),
        ("second", PLANS[then], (f"train.resume={tmp_path}/first/checkpoints/step_{SAVED}",)),
    ):
        overrides = [*common, f"strategy.graph={graph}", *more]
        run = tmp_path / name
        failure = served.ask(run_job, overrides=overrides, plainly=False, run_dir=str(run))
        assert not failure, failure
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines]
        np.testing.assert_allclose(losses, expected[-len(losses) :], rtol=TOLERANCE)
        assert lines[-1]["again_loss"] == pytest.approx(evaluated, rel=TOLERANCE)
    assert len(losses) == STEPS - SAVED
    audit = audited(history_of(tmp_path / "second"))
    assert (audit.wrong, audit.samples) == ((), STEPS * BATCH)
