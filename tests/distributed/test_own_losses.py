"""`model.loss._target_`: a loss of the user's own under plans, as the same loss in the model."""

from pathlib import Path

import numpy as np
import pytest
from tests.distributed.cases import TOLERANCE, UNEVEN, hardware
from tests.distributed.equality import JobFailed, Jobs, assert_equal, save
from tests.pairs import some

PLANS = {
    "dp": "{replicate: {}}",
    "zero3": "{replicate: {zero: 3}}",
    "split": "{split: {}}",
    "pipeline": "{pipeline: {stages: 2, micro_batches: 3}}",
}
FOCAL = ("model.loss._target_=own_losses.focal", "model.loss.gamma=1.5")
SQUARES = ("model.loss={_target_: torch.nn.MSELoss}",)
# A loss beside the model, and the model that computes it itself.
SIDES = {
    "focal": (("Net", FOCAL), ("Net", ("model.gamma=1.5",))),
    "squares": (("Value", SQUARES), ("Value", ("model.own=true",))),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, draw = tmp_path_factory.mktemp("losses"), np.random.default_rng(3)
    labels = {"focal": draw.integers(0, 3, 24), "squares": draw.normal(size=24)}
    for name, own in labels.items():
        save(folder / f"{name}.npz", {"points": draw.normal(size=(24, 6)), "labels": own})
    return {name: folder / f"{name}.npz" for name in labels}


def job(data: Path, side: tuple[str, tuple[str, ...]], *where: str) -> list[str]:
    model, options = side
    common = ("data=arrays", f"data.path={data}", "optimizer=sgd", "train.global_batch=8")
    return [f"model._target_=own_losses.{model}", *options, *common, "train.steps=4", *where]


@pytest.mark.parametrize("plan", some(list(PLANS), ["dp", "pipeline"]))
@pytest.mark.parametrize("loss", SIDES)
def test_a_loss_beside_the_model_is_one_inside_it(
    jobs: Jobs, data: dict[str, Path], loss: str, plan: str
) -> None:
    beside, inside = SIDES[loss]
    where = ("strategy=dp", f"strategy.graph={PLANS[plan]}", *hardware(2, UNEVEN))
    expected = jobs.run(job(data[loss], inside, "strategy=single", *hardware(1, ())))
    assert_equal(jobs.run(job(data[loss], beside, *where)), expected, TOLERANCE)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (
            "own_losses.rows",
            "model.loss=rows returns a Tensor of shape [3], and a step has one loss; return the "
            "mean over the samples",
        ),
        (
            "own_losses.Weighted",
            "model.loss._target_=own_losses.Weighted has tensors of its own (weight); compute them "
            "in the model, or from the labels",
        ),
        (
            "own_losses.Value.forward.lost",
            "model.loss._target_=own_losses.Value.forward.lost cannot be imported: ",
        ),
        (
            "own_losses.focal model.loss.gama=1.5",
            "model.loss.gama=1.5 is not an argument of focal; did you mean gamma? One of: gamma, "
            "labels, logits",
        ),
        ("os.system", "model.loss._target_=os.system is a function that does not say what it "),
    ],
)
def test_refused(jobs: Jobs, data: dict[str, Path], loss: str, expected: str) -> None:
    side = ("Net", tuple(f"model.loss._target_={loss}".split()))
    with pytest.raises((JobFailed, AssertionError)) as caught:
        jobs.run(job(data["focal"], side, "strategy=single", *hardware(1, ())))
    assert expected in str(caught.value)
