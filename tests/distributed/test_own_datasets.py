"""`data._target_=...`: datasets of the user's own under every kind of plan, and their faults."""

import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.distributed.cases import MODELS, TOLERANCE, UNEVEN, Run, hardware
from tests.distributed.equality import Computed, Jobs, assert_equal, save
from tests.pairs import some
from torch.nn import functional

from whale_train.data.dataset import Dataset, Indices
from whale_train.data.open import open_dataset
from whale_train.data.sources.custom import CustomOptions
from whale_train.errors import ConfigError
from whale_train.runtime.train.worker_reads import WorkerReads

PLANS = {
    "dp": "{replicate: {}}",
    "zero3": "{replicate: {zero: 3}}",
    "split": "{split: {}}",
    "pipeline": "{pipeline: {stages: 2, micro_batches: 3}}",
}
POINTS = ("model._target_=equality.OwnNet", "model.loss=cross_entropy")


def options(model: tuple[str, ...], plan: str, *more: str) -> list[str]:
    common = ("optimizer=sgd", "train.global_batch=8", "train.steps=5", "strategy=dp")
    return [*model, *common, *hardware(2, UNEVEN), f"strategy.graph={PLANS[plan]}", *more]


@pytest.mark.parametrize("form", some(["dict", "tuple"], ["tuple"]))
@pytest.mark.parametrize("plan", some(list(PLANS), ["dp", "pipeline"]))
def test_samples_of_an_open_file_are_a_plain_loops(
    run: Run, jobs: Jobs, plan: str, form: str
) -> None:
    """Every process that reads has a file of its own: a position that is shared with others would
    give it rows of theirs."""
    kind, model = MODELS["gpt2"]
    path = run.folder / f"{kind}.npz"
    given = (f"data.path={path}", "data.shuffle=false")
    named = () if form == "dict" else ("data.fields=[input_ids, labels]",)
    own = ("data._target_=own_datasets.FromFile", f"data.form={form}", *named, "data.workers=2")
    found = jobs.run(options(model, plan, *own, *given))
    plain = [*model, "optimizer=sgd", "train.global_batch=8", "train.steps=5", "data=arrays"]
    expected = jobs.run([*plain, *given, "strategy=single", *hardware(1, ())], plainly=True)
    assert_equal(found, expected, TOLERANCE)


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("points") / "points.npz"
    draw = np.random.default_rng(3)
    save(path, {"points": draw.normal(size=(24, 6)), "labels": draw.integers(0, 3, 24)})
    return path


def jittered(jobs: Jobs, points: Path, plan: str, workers: int) -> Computed:
    own = (
        "data._target_=own_datasets.Jittered",
        f"data.path={points}",
        "data.transform={_target_: own_datasets.Jitter, scale: 0.5}",
        *("data.fields=[points, labels]", f"data.workers={workers}"),
    )
    return jobs.run(options(POINTS, plan, *own))


def test_what_is_random_in_samples_is_of_their_place_in_the_run(jobs: Jobs, points: Path) -> None:
    """Under any plan and number of workers; and other noise in the second epoch."""
    expected = jittered(jobs, points, "dp", 1)
    assert_equal(jittered(jobs, points, "pipeline", 3), expected, TOLERANCE)
    still = [*POINTS, "data=arrays", f"data.path={points}"]
    assert jobs.run(options(tuple(still), "dp")).losses[0] != pytest.approx(expected.losses[0])


def padded_loop(steps: int, batch: int) -> list[float]:
    """Return the losses of a plain loop whose batches are filled up to their longest row."""
    from tests.distributed.own_datasets import Pooled, Ragged

    model, data, losses = Pooled(), Ragged(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        samples = [data[number % len(data)] for number in range(step * batch, (step + 1) * batch)]
        longest = max(len(x["x"]) for x in samples)
        rows = torch.full((batch, longest), 0.5)
        for row, sample in zip(rows, samples, strict=True):
            row[: len(sample["x"])] = torch.from_numpy(sample["x"])
        labels = torch.tensor([x["labels"] for x in samples])
        loss = functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


LONGEST = (
    *("model._target_=own_datasets.Pooled", "model.loss=cross_entropy"),
    *("data._target_=own_datasets.Ragged", "data.shuffle=false"),
    "data.pad={x: {length: 12, value: 0.5, longest: true}}",
)


@pytest.mark.parametrize("plan", some(["dp", "zero3"], ["dp"]))
def test_rows_are_as_long_as_the_longest_of_the_global_batch(jobs: Jobs, plan: str) -> None:
    """Batches of three, of which ranks have unequal parts: the longest row is now on one rank, now
    on the other."""
    rates = ("optimizer.lr=0.1", "optimizer.schedule=constant", "train.global_batch=3")
    found = jobs.run(options((), plan, *LONGEST, *rates, "train.steps=6"))
    np.testing.assert_allclose(found.losses, padded_loop(6, 3), rtol=2e-5)


def test_lengths_of_their_own_need_the_model_as_it_is(jobs: Jobs) -> None:
    remedy = "use false, or a strategy of one replicate, with or without ZeRO"
    with pytest.raises(AssertionError, match=f"runs a graph of one length; {remedy}"):
        jobs.run(options((), "split", *LONGEST))


def opened(**given: Any) -> Dataset:
    return open_dataset(CustomOptions.model_validate(given))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)


@pytest.mark.usefixtures("here")
def test_samples_of_every_form_become_arrays() -> None:
    numbers = "own_datasets.numbers"
    rows = np.array([1, 3])
    pad = {"x": {"length": 5, "value": -1}}
    ragged = opened(_target_=numbers, kind="custom", **{"arguments": {"kind": "ragged"}}, pad=pad)
    batch = ragged.samples(rows)
    assert batch["x"].tolist() == [[0, 1, -1, -1, -1], [0, 1, 2, 3, -1]]
    assert (batch["y"].dtype, batch["y"].tolist()) == (np.float32, [1.0, 3.0])
    array = opened(_target_=numbers, arguments={"kind": "array"}, fields=["x"])
    assert array.samples(rows)["x"].tolist() == [[1, 1, 1], [3, 3, 3]]
    named = opened(_target_=numbers, arguments={"kind": "named", "count": 4}).samples(rows)
    assert named["x"].tolist() == [[1, 1], [3, 3]]
    assert named["y"].tolist() == [True, True]
    renamed = {"target": "y"}
    kept = opened(_target_=numbers, arguments={"kind": "ragged"}, fields=renamed)
    assert {key: x.tolist() for key, x in kept.samples(rows).items()} == {"target": [1.0, 3.0]}
    collate = {"_target_": "own_datasets.stack", "scale": 10}
    pair = opened(_target_=numbers, arguments={"kind": "pair"}, collate=collate)
    assert pair.samples(rows)["x"].tolist() == [10, 30]
    held = opened(_target_=numbers, arguments={"kind": "pair"}, fields=["a", "b"])
    assert (held.num_samples, held.num_evaluation_samples) == (10, 0)


@pytest.mark.usefixtures("here")
def test_reading_leaves_the_generators_as_they_were(points: Path) -> None:
    transform = {"_target_": "own_datasets.Jitter", "scale": 1.0}
    arguments = {"path": str(points), "transform": transform}
    dataset = opened(_target_="own_datasets.Jittered", arguments=arguments, fields=["x", "labels"])
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(()).item(), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    first = dataset.samples(np.array([0]), np.array([7]))
    assert (torch.rand(()).item(), random.random(), np.random.rand()) == expected
    again, other = (dataset.samples(np.array([0]), np.array([draw])) for draw in (7, 8))
    assert (again["x"] == first["x"]).all()
    assert (other["x"] != first["x"]).all()


FAULTS = {
    "no_names": (
        {"arguments": {"kind": "pair"}},
        "data.fields is not given, and sample 0 is a tuple of 2 without names; use "
        "data.fields=[input_ids, labels] or the like, a name for each part",
    ),
    "too_few_names": (
        {"arguments": {"kind": "pair"}, "fields": ["x"]},
        "data.fields=x has 1 names, and sample 0 has 2 parts; give a name for each part",
    ),
    "text": (
        {"arguments": {"kind": "text"}},
        "data.x is no number: x of a sample is a str (<U6); name the parts to take with "
        "data.fields, or make numbers of it in the dataset",
    ),
    "ragged": (
        {"arguments": {"kind": "ragged"}},
        "data.x has samples of several shapes: [2] (sample 1), elsewhere [1]; use 'data.pad={x: "
        "{length: N, value: 0}}', or make them alike in the dataset",
    ),
    "ragged_labels": (
        {"arguments": {"kind": "ragged"}, "fields": {"x": "x", "labels": "x"}},
        "\n".join(
            f"data.{name} has samples of several shapes: [2] (sample 1), elsewhere [1]; use "
            "'data.pad={x: {length: N, value: 0}, labels: {length: N, value: -100}}', or make them "
            "alike in the dataset"
            for name in ("x", "labels")
        ),
    ),
    "short_pad": (
        {"arguments": {"kind": "ragged"}, "pad": {"x": {"length": 1}}},
        "data.pad.x.length=1 is less than sample 1 has (2); use a larger one, or cut such rows in "
        "the dataset",
    ),
    "pad_and_collate": (
        {
            **{"arguments": {"kind": "pair"}, "collate": {"_target_": "own_datasets.stack"}},
            "pad": {"x": {"length": 9}},
        },
        "data.pad has no effect beside data.collate, which makes the batches; leave one of them "
        "out",
    ),
    "pad_of_nothing": (
        {"arguments": {"kind": "pair"}, "fields": ["x", "y"], "pad": {"z": {"length": 1}}},
        "data.pad.z is no field of the data, which has x, y; leave it out",
    ),
    "no_key": (
        {"arguments": {"kind": "ragged"}, "fields": ["y", "z"]},
        "data.fields=z is no key of sample 0, which has x, y; use one of them",
    ),
    "raises": (
        {"arguments": {"kind": "raises"}, "fields": ["x"]},
        "data._target_=own_datasets.numbers raised RuntimeError: no such sample for sample 0 or 1; "
        "correct it",
    ),
    "empty": (
        {"arguments": {"count": 0}},
        "data._target_=own_datasets.numbers has no samples; give it at least one",
    ),
    "arguments": (
        {"arguments": {"cout": 3}},
        "data.cout=3 is not an argument of numbers; did you mean count? One of: count, kind",
    ),
    "iterable": (
        {"_target_": "own_datasets.Endless"},
        "data.fields is not given, and sample 0 is a int of 1 without names; use "
        "data.fields=[input_ids, labels] or the like, a name for each part",
    ),
    "not_one": (
        {"_target_": "os.system"},
        "data._target_=os.system is a function that does not say what it returns; name a "
        "torch.utils.data.Dataset class, or a function annotated to return one (-> data.Dataset)",
    ),
    "collate": (
        {"collate": {"_target_": "own_datasets.anything"}},
        "data.collate._target_=own_datasets.anything is a function that does not say what it "
        "returns; name a function annotated to return a dict, or a class with a __call__",
    ),
    "argument": (
        {"arguments": {"kind": {"_target_": "subprocess.Popen", "args": "true"}}},
        "data.kind._target_=subprocess.Popen is a class, and not a class with a __call__; name a "
        "class whose objects can be called, as those of transforms",
    ),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", FAULTS)
def test_refused(name: str) -> None:
    given, expected = FAULTS[name]
    with pytest.raises(ConfigError) as caught:
        opened(**{"_target_": "own_datasets.numbers", **given})
    assert str(caught.value) == expected


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("shapes", "data.x has samples of several shapes: [2] (sample 5), elsewhere [1]; use"),
        ("keys", "gives samples of different fields: z (sample 5), at first x; give all"),
    ],
)
def test_a_later_sample_is_named(kind: str, expected: str) -> None:
    dataset = opened(_target_="own_datasets.numbers", arguments={"kind": kind})
    with pytest.raises(ConfigError) as caught:
        dataset.samples(np.array([5]))
    assert expected in str(caught.value)


@pytest.mark.usefixtures("here")
def test_the_odd_sample_of_a_batch_is_named_wherever_it_stands() -> None:
    """Samples 4 and 5 have two values, and sample 0, whose shape is the dataset's, has one."""
    dataset = opened(_target_="own_datasets.numbers", arguments={"kind": "shapes"})
    for batch, odd in (([5, 0, 1], 5), ([0, 1, 4], 4)):
        with pytest.raises(ConfigError) as caught:
            dataset.samples(np.array(batch))
        assert f"several shapes: [2] (sample {odd}), elsewhere [1]" in str(caught.value)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os._exit(3), "a process that reads samples has ended with status 3"),
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            r"by signal 9 \(Killed\), as where memory runs out",
        ),
    ],
)
def test_a_process_that_ends_is_named(end: Callable[[], None], said: str) -> None:
    def samples(indices: Indices, draws: Indices) -> dict[str, Any]:
        if indices[0] == 2:
            end()
        return {"x": indices}

    def chosen(step: int) -> list[tuple[Indices, Indices]]:
        return [(np.array([step]), np.array([step]))]

    reads = WorkerReads(samples, chosen, 2, 0)
    with closing(reads), pytest.raises(RuntimeError, match=said):
        list(map(reads.read, range(4)))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("target", ["own_datasets.Unsized", "own_datasets.UnsizedStream"])
def test_a_length_that_raises_is_refused(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(_target_=target)
    said = "has a __len__ that raised ValueError: __len__() should return >= 0; correct it"
    assert str(caught.value) == f"data._target_={target} {said}"
