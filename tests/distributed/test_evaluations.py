"""An evaluation is the mean over all held-back samples, whatever the batch and the plan.

Jobs evaluate the weights they start with (a learning rate of almost 0) on held-back samples of
numbers that no batch divides, and the same module is run here on all of them as one batch.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.cases import ONE, UNEVEN, hardware
from tests.distributed.equality import Arrays, JobFailed, Jobs, save
from tests.distributed.evaluated_models import Tagger, Taught
from tests.pairs import covering, some
from torch import Tensor

from whale_train.data.open import open_dataset
from whale_train.data.order import evaluation_batches
from whale_train.data.sources.arrays import ArraysOptions
from whale_train.metrics_options import MetricOptions, try_metrics
from whale_train.runtime.train.evaluation_metrics import EvaluationMetrics

SAMPLES, LENGTH, BATCH, SEED = 43, 6, 8, 3
REL = 2e-6

GRAPHS = {
    "dp": "{replicate: {}}",
    "zero3": "{replicate: {zero: 3}}",
    "hybrid": "[{replicate: {}}, {split: {modules: head}}]",
    "split": "{split: {}}",
    "pipeline": "{pipeline: {stages: 2, micro_batches: 3}}",
    "one_micro_batch": "{pipeline: {stages: 2, micro_batches: 1}}",
    "copies_of_pipelines": "{replicate: {degree: 2, of: "
    "{pipeline: {stages: 2, micro_batches: 2}}}}",
    "hybrid_in_stage": "{pipeline: {stages: [{stage: {}}, {stage: {of: "
    "[{replicate: {}}, {split: {modules: head}}]}}], micro_batches: 2}}",
}


@given(st.integers(1, 200), st.integers(1, 40))
def test_every_sample_counts_once(samples: int, batch: int) -> None:
    seen = np.zeros(samples)
    for weight, indices in evaluation_batches(samples, batch):
        assert len(indices) == batch
        np.add.at(seen, indices, weight)
    np.testing.assert_allclose(seen, 1.0, rtol=0, atol=1e-12)


@given(st.integers(1, 200), st.integers(1, 40))
def test_what_is_taken_off_is_less_than_what_is_left(samples: int, batch: int) -> None:
    """So no sum loses more than a digit, however few samples fill a batch."""
    weights = [weight for weight, _ in evaluation_batches(samples, batch)]
    assert -min(0.0, *weights) * batch < max(1, samples % batch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    draw = np.random.default_rng(5)
    labels = draw.integers(0, 17, (SAMPLES, LENGTH))
    labels[draw.random((SAMPLES, LENGTH)) < draw.random((SAMPLES, 1))] = -100
    whole = np.where(labels == -100, 3, labels)
    common = {
        "input_ids": draw.integers(0, 17, (SAMPLES, LENGTH)),
        "kinds": draw.integers(-1, 5, SAMPLES),
        "values": draw.standard_normal(SAMPLES).astype(np.float32),
    }
    save(folder / "some.npz", {**common, "labels": labels})
    save(folder / "all.npz", {**common, "labels": whole})
    return folder


def evaluated_plainly(path: Path, fraction: float, samples: int, loss: str) -> list[float]:
    """Accuracy, where there are targets, and loss of the first `samples` held-back samples: what
    one process computes of all of them as one batch."""
    options = {"kind": "arrays", "path": str(path), "evaluation_fraction": fraction}
    dataset = open_dataset(ArraysOptions.model_validate(options))
    numbers = np.arange(min(samples, dataset.num_evaluation_samples))
    return evaluated_whole(dataset.evaluation_samples(numbers), loss)


def evaluated_whole(samples: Arrays, loss: str) -> list[float]:
    """Accuracy, where there are targets, and loss of samples as one batch."""
    batch = {k: torch.from_numpy(v) for k, v in samples.items()}
    torch.manual_seed(SEED)
    model = Tagger(loss).eval()
    logits: list[tuple[Tensor, Tensor]] = []
    model.head.register_forward_hook(
        lambda module, args, out: logits.append((out.argmax(-1), batch["labels"]))
    )
    model.kind.register_forward_hook(
        lambda module, args, out: logits.append((out.argmax(-1), batch["kinds"]))
    )
    with torch.no_grad():
        value = float(model(**batch))
    right = sum(int((guess == wanted).sum()) for guess, wanted in logits)
    targets = sum(int((wanted >= 0).sum()) for _, wanted in logits)
    return [right / targets, value] if targets else [value]


LOSSES = ("pure", "mixed", "squares")
# The held-back part, and how many of it are asked for. What is left of batches of 8: 6 of 22 (two
# samples are taken off again), 1, 4 (which fill a batch twice), nothing, and 3 that are all.
ALL, ONE_LEFT, HALF, NONE_LEFT, FEW = (0.5, 500), (0.4, 500), (0.5, 12), (0.5, 16), (0.07, 500)
UNEVENLY, IN_TURN = (2, UNEVEN, ()), (2, UNEVEN, ("train.accumulate=2",))
UNEXPORTED = (2, UNEVEN, ("+model.branch=true",))

CASES = [
    # Copies: the loss's own means (and a second look at the targets), and where they are counted.
    *(("dp", UNEVENLY, how, loss) for how in (ALL, FEW) for loss in LOSSES),
    *(("dp", UNEVENLY, how, "mixed") for how in (ONE_LEFT, HALF, NONE_LEFT)),
    *(("dp", UNEXPORTED, ALL, loss) for loss in LOSSES),
    *(("dp", (2, ONE, ()), ONE_LEFT, loss) for loss in LOSSES),
    *(("dp", (1, (), ()), how, "mixed") for how in (ALL, FEW)),
    *(("zero3", UNEVENLY, how, "mixed") for how in (ALL, FEW)),
    *(("dp", IN_TURN, how, "mixed") for how in (ALL, FEW)),
    # Graphs.
    *(("hybrid", UNEVENLY, how, loss) for how in (ALL, FEW) for loss in ("pure", "mixed")),
    *(("hybrid", IN_TURN, how, "mixed") for how in (ALL, FEW)),
    *(("split", UNEVENLY, how, "mixed") for how in (ALL, FEW)),
    *(("pipeline", UNEVENLY, how, loss) for how in (ALL, FEW) for loss in LOSSES),
    ("one_micro_batch", UNEVENLY, ALL, "mixed"),
    ("copies_of_pipelines", (4, UNEVEN, ()), ALL, "mixed"),
    ("hybrid_in_stage", (3, (), ()), ALL, "mixed"),
]


_ALL_CASES = [
    *(("some", *case) for case in CASES),
    *(("all", graph, UNEVENLY, ALL, "mixed") for graph in ("dp", "hybrid", "pipeline")),
]
# Every graph; what is left of batches, losses and devices under copies; each loss once in stages.
SHOWN = covering(
    _ALL_CASES,
    lambda case: {
        case[1],
        ("labels", case[0]),
        ("devices", case[2]),
        *({("left", case[3])} if case[1] == "dp" else ()),
        (case[1] if case[1] == "pipeline" else "", case[4]),
    },
)


@pytest.mark.parametrize(("arrays", "graph", "devices", "how", "loss"), SHOWN)
def test_an_evaluation_is_one_process_on_all_held_back_samples(
    arrays: str,
    graph: str,
    devices: tuple[int, tuple[float, ...], tuple[str, ...]],
    how: tuple[float, int],
    loss: str,
    jobs: Jobs,
    folder: Path,
) -> None:
    """`arrays`: some of the labels are ignored, or none of them."""
    (count, speeds, extra), (fraction, samples) = devices, how
    path = folder / f"{arrays}.npz"
    options = (f"+model.loss_of={loss}", f"train.evaluation_samples={samples}", *extra)
    place = (*hardware(count, speeds), f"strategy.graph={GRAPHS[graph]}")
    found = jobs.run([*evaluating(path, fraction, "Tagger"), *options, *place])
    assert found.evaluations == pytest.approx(
        evaluated_plainly(path, fraction, samples, loss), rel=REL
    )


@pytest.mark.parametrize("graph", some(["dp", "hybrid", "pipeline"], ["hybrid"]))
def test_named_sets_are_evaluated_each_by_itself(jobs: Jobs, folder: Path, graph: str) -> None:
    """Beside the samples that are held back."""
    path, fraction, count = folder / "some.npz", 0.5, 19
    sets = f"data.evaluation={{valid: {{path: {folder}/all.npz}}, again: {{}}}}"
    options = (sets, "+model.loss_of=mixed", f"train.evaluation_samples={count}")
    place = (*hardware(2, UNEVEN), f"strategy.graph={GRAPHS[graph]}")
    (line,) = jobs.run([*evaluating(path, fraction, "Tagger"), *options, *place]).lines
    expected = {"evaluation": evaluated_plainly(path, fraction, count, "mixed")}
    for name, file in (("valid", "all"), ("again", "some")):
        arrays = {key: array[:count] for key, array in np.load(folder / f"{file}.npz").items()}
        expected[name] = evaluated_whole(arrays, "mixed")
    for name, values in expected.items():
        found = [line[f"{name}_accuracy"], line[f"{name}_loss"]]
        assert found == pytest.approx(values, rel=REL), name


METRICS = {
    "f1": "MulticlassF1Score, num_classes: 17, average: macro",
    "kappa": "MulticlassCohenKappa, num_classes: 17",
    "recall": "MulticlassRecall, num_classes: 17, average: none",
    "counts": "MulticlassStatScores, num_classes: 17, average: micro",
}


@pytest.mark.parametrize("samples", some([19, 500], [19]))
@pytest.mark.parametrize("graph", some(list(GRAPHS), ["dp", "hybrid", "pipeline"]))
def test_metrics_are_those_of_one_process(
    jobs: Jobs, folder: Path, graph: str, samples: int
) -> None:
    """Of the classes that one process predicts for every target of the set, each counted once."""
    path, fraction = folder / "some.npz", 0.5
    given = ", ".join(
        f"{name}: {{_target_: torchmetrics.classification.{metric}}}"
        for name, metric in METRICS.items()
    )
    options = ("+model.loss_of=pure", f"train.evaluation_samples={samples}")
    count = 4 if graph == "copies_of_pipelines" else 3 if graph == "hybrid_in_stage" else 2
    speeds = () if graph == "hybrid_in_stage" else UNEVEN
    place = (*hardware(count, speeds), f"strategy.graph={GRAPHS[graph]}")
    overrides = [*evaluating(path, fraction, "Tagger"), *options, *place, f"metrics={{{given}}}"]
    (line,) = jobs.run(overrides).lines
    dataset = open_dataset(ArraysOptions(path=str(path), evaluation_fraction=fraction))
    numbers = np.arange(min(samples, dataset.num_evaluation_samples))
    batch = {k: torch.from_numpy(v) for k, v in dataset.evaluation_samples(numbers).items()}
    torch.manual_seed(SEED)
    model = Tagger("pure").eval()
    logits: list[Tensor] = []
    model.head.register_forward_hook(lambda module, args, out: logits.append(out))
    with torch.no_grad():
        model(**batch)
    counted = batch["labels"] != -100
    seen = logits[0].argmax(-1)[counted], batch["labels"][counted]
    made = torchmetrics.classification
    assert line["evaluation_f1"] == float(made.MulticlassF1Score(17, average="macro")(*seen))
    assert line["evaluation_kappa"] == float(made.MulticlassCohenKappa(17)(*seen))
    counts = made.MulticlassStatScores(17, average="micro")(*seen).tolist()
    assert [line[f"evaluation_counts_{number}"] for number in range(5)] == counts
    recalls = made.MulticlassRecall(17, average=None)(*seen).tolist()
    assert [line[f"evaluation_recall_{number}"] for number in range(17)] == recalls


def evaluating(path: Path, fraction: float, model: str) -> list[str]:
    """A job that evaluates what it starts with."""
    return [
        *("data=arrays", f"data.path={path}", f"data.evaluation_fraction={fraction}"),
        *(f"model._target_=evaluated_models.{model}", f"seed={SEED}", "strategy=dp"),
        *("optimizer=sgd", "optimizer.lr=1e-30", f"train.global_batch={BATCH}", "train.steps=1"),
        "train.evaluate_every=1",
    ]


def test_targets_that_are_learned_are_counted_as_they_are_made_or_refused(
    jobs: Jobs, folder: Path
) -> None:
    overrides = [*evaluating(folder / "some.npz", 0.5, "Taught"), *hardware(2, UNEVEN)]
    held = folder / "some.npz"
    options = {"kind": "arrays", "path": str(held), "evaluation_fraction": 0.5}
    dataset = open_dataset(ArraysOptions.model_validate(options))
    numbers = np.arange(dataset.num_evaluation_samples)
    batch = {k: torch.from_numpy(v) for k, v in dataset.evaluation_samples(numbers).items()}
    torch.manual_seed(SEED)
    with torch.no_grad():
        expected = float(Taught().eval()(**batch))
    _, loss = jobs.run(overrides).evaluations
    assert loss == pytest.approx(expected, rel=REL)
    with pytest.raises(JobFailed) as caught:
        jobs.run([*overrides, f"strategy.graph={GRAPHS['hybrid']}"])
    assert (
        "train.evaluate_every=1 counts targets before it runs, and those of cross_entropy"
        in str(caught.value)
    )
    assert "use null, or a strategy of one replicate" in str(caught.value)
    jobs.run([*overrides, f"strategy.graph={GRAPHS['hybrid']}", "train.evaluate_every=null"])


class Share:
    """The share of right classes, as a number of Python's."""

    def reset(self) -> None:
        self.right, self.count = 0, 0

    def update(self, predicted: Tensor, target: Tensor) -> None:
        self.right += int((predicted == target).sum())
        self.count += len(target)

    def compute(self) -> float:
        return self.right / self.count


def test_a_number_of_pythons_keeps_its_digits() -> None:
    metrics = EvaluationMetrics({"share": MetricOptions(target=f"{__name__}.Share")})
    pairs = np.array([1, 2, 3]), np.array([1, 0, 0])
    assert metrics.values(*pairs, np.ones(3, np.int64)) == {"share": 1 / 3}


def test_a_collection_of_metrics_has_a_result_for_each() -> None:
    members = [
        {"_target_": "torchmetrics.classification.MulticlassAccuracy", "num_classes": 3},
        {"_target_": "torchmetrics.classification.MulticlassF1Score", "num_classes": 3},
    ]
    collection = MetricOptions(
        target="torchmetrics.MetricCollection", arguments={"metrics": members}
    )
    each = MetricOptions(
        target="torchmetrics.classification.MulticlassRecall",
        arguments={"num_classes": 2, "average": "none"},
    )
    names, faults = try_metrics({"all": collection, "recall": each})
    assert (sorted(names), faults) == (
        ["all_MulticlassAccuracy", "all_MulticlassF1Score", "recall_0", "recall_1"],
        [],
    )
    values = EvaluationMetrics({"all": collection}).values(*map(np.array, ([0, 1], [0, 2], [3, 1])))
    made = torchmetrics.classification
    seen = (torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 2]))
    assert values == {
        "all_MulticlassAccuracy": float(made.MulticlassAccuracy(num_classes=3)(*seen)),
        "all_MulticlassF1Score": float(made.MulticlassF1Score(num_classes=3)(*seen)),
    }
