"""Streams of a user's own on the command line: what goes on, and what is refused, word for word."""

from pathlib import Path

import pytest
from tests.cli.command import Answer, whale_train

STREAMS = '''"""Streams and a model."""
import torch
from torch.utils.data import IterableDataset


class Stateless(IterableDataset):
    def __init__(self, count=12):
        self.count, self.at = count, 0

    def __iter__(self):
        first, self.at = self.at % self.count, self.at % self.count
        for number in range(first, self.count):
            self.at = number + 1
            yield {"x": torch.full((3,), number / self.count), "labels": number % 4}


class Late(Stateless):
    def __iter__(self):
        for number in range(self.at, self.count):
            yield {"x": torch.full((3,), number / self.count), "labels": number % 4}
            self.at = number + 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Array(Late):
    def state_dict(self):
        return {"at": torch.tensor(self.at)}


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 4)

    def forward(self, x):
        return super().forward(x)
'''
COMMON = (
    *("model._target_=streams.Net", "model.loss=cross_entropy", "strategy=dp", "hardware=cpu"),
    *("hardware.devices=2", "train.global_batch=5"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    (folder / "streams.py").write_text(STREAMS)
    return folder


def command(folder: Path, stream: str, *more: str) -> Answer:
    return whale_train([*COMMON, f"data._target_=streams.{stream}", *more], folder)


def said(answer: Answer) -> str:
    assert answer.status == 2, answer
    return " ".join(answer.stderr.split()).removeprefix("error: ")


def test_a_stream_without_a_state_trains_and_does_not_go_on(folder: Path) -> None:
    trained = ("checkpoint.every=2", "train.steps=4", "hydra.run.dir=run")
    answer = command(folder, "Stateless", *trained)
    assert (answer.status, answer.stderr) == (0, "")
    assert "data.shuffle: as the stream comes" in answer.stdout
    further = ("train.resume=run", "train.steps=5", "hydra.run.dir=further")
    assert said(command(folder, "Stateless", *further)) == (
        "train.resume=run/checkpoints/step_4 is of a run on a stream, "
        "data._target_=streams.Stateless, which has no state_dict and "
        "load_state_dict; give its class both, so that it goes on from what JSON "
        "holds, or begin it anew with train.resume_data=any"
    )
    audit = whale_train(["mode=audit", "run=run"], folder)
    assert audit.status == 0
    assert "20 samples of a stream, one after another" in audit.stdout


PLANNED = {
    "epochs": (
        "Stateless train.epochs=2",
        "train.epochs=2 counts samples, and the data is a stream that does not say how many it "
        "has; use train.steps, or give its class a __len__",
    ),
    "workers": (
        "Stateless data.workers=2 data.evaluation_fraction=0.1",
        "2 things are wrong with this request: data.workers=2 is more than one, and "
        "streams.Stateless is a stream, which one process of each rank reads; "
        "use 1 data.evaluation_fraction=0.1 holds samples back by their numbers, "
        "and streams.Stateless is a stream; use 0, and name a set in data.evaluation",
    ),
    "held_back": (
        "Stateless train.evaluate_every=1",
        "train.evaluate_every=1 needs held-back samples, and there are none; name sets in "
        "data.evaluation, or use null",
    ),
    "evaluation": (
        "Stateless data.evaluation={v:{count:3}} train.evaluate_every=1",
        "data.evaluation.v is a stream without a length, and an evaluation goes through all of it; "
        "give its class a __len__",
    ),
    "late": (
        "Late checkpoint.every=2",
        "data._target_=streams.Late has a state that another sample follows: two samples, "
        "state_dict, load_state_dict and the next sample give another one than three samples do; "
        "correct it, or write no checkpoints",
    ),
    "array": (
        "Array checkpoint.every=2",
        "data._target_=streams.Array has a state that JSON cannot hold: state_dict()['at'] is a "
        "Tensor; correct it, or write no checkpoints",
    ),
}


@pytest.mark.parametrize("name", PLANNED)
def test_refused(name: str, folder: Path) -> None:
    given, expected = PLANNED[name]
    stream, *more = given.split()
    found = said(command(folder, stream, "mode=plan", *more)).replace("error: ", "")
    assert " ".join(found.split()) == expected
