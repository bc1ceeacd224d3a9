"""Unusual models under every kind of strategy: what one process computes, or a refusal by name.

Every model runs on two unlike devices under one of the strategies, or, where its name stands in one
of the lists below, as they say; under all of them in a full run.
"""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tests.distributed.equality import Computed, JobFailed, Jobs
from tests.distributed.odd_models import CLASSES, ODD, TOKENS
from tests.distributed.odd_models_calls import ODD_CALLS
from tests.distributed.odd_models_layers import ODD_LAYERS
from tests.distributed.odd_models_rows import ODD_ROWS
from tests.distributed.odd_models_state import ODD_STATE
from tests.pairs import covering, some

_ALL = (*ODD, *ODD_LAYERS, *ODD_ROWS, *ODD_STATE, *ODD_CALLS)
MODULES = {made.__name__: made.__module__ for made in _ALL}
NAMES = list(MODULES)
STRATEGIES = {
    "dp": ("strategy=dp",),
    "zero2": ("strategy=zero2",),
    "split": ("strategy=split",),
    "pipeline": ("strategy=pipeline", "strategy.graph.pipeline.stages=2"),
    "hybrid": ("strategy=hybrid_split_dp",),
}
UNLIKE = (
    "hardware=v100_p100_mix",
    "hardware.nodes=[{count: 1, devices: 1, device: v100_sxm2_32gb, link: nvlink2}, "
    "{count: 1, devices: 1, device: p100_pcie_16gb, link: pcie3_x16}]",
)
LOSS, NORM = 2e-5, 1e-3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw, samples = np.random.default_rng(3), 40
    path = tmp_path_factory.mktemp("odd") / "samples.npz"
    np.savez(
        path,
        points=draw.normal(size=(samples, 6, 8)).astype(np.float32),
        labels=draw.integers(0, CLASSES, samples),
        ids=draw.integers(0, TOKENS, (samples, 6)),
        weights=draw.uniform(0.2, 2.0, samples).astype(np.float32),
    )
    return path


def overrides(model: str, data: Path, *more: str) -> list[str]:
    return [
        f"model._target_={MODULES[model]}.{model}",
        *("data=arrays", f"data.path={data}", "data.shuffle=false"),
        *("train.steps=3", "train.global_batch=10", "optimizer=sgd", "optimizer.lr=0.05"),
        *more,
    ]


def alone(jobs: Jobs, model: str, data: Path) -> Computed:
    one = ("hardware=cpu", "hardware.devices=1", "strategy=single")
    return jobs.run(overrides(model, data, *one), plainly=True)


def run_or_refusal(jobs: Jobs, job: list[str]) -> Computed | str:
    try:
        return jobs.run(job)
    except JobFailed as failed:
        return str(failed)


def test_a_ctc_model_of_transformers_is_what_one_process_computes(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Its loss enters torch.backends.cudnn.flags."""
    draw, path = np.random.default_rng(3), tmp_path / "sound.npz"
    sound, letters = draw.normal(size=(30, 400)), draw.integers(1, 12, (30, 4))
    np.savez(path, input_values=sound.astype(np.float32), labels=letters)
    config = "vocab_size: 12, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
    config += "intermediate_size: 32, conv_dim: [8, 8], conv_stride: [5, 4], conv_kernel: [10, 8], "
    config += "num_feat_extract_layers: 2, num_conv_pos_embeddings: 4, layerdrop: 0.0, "
    config += "num_conv_pos_embedding_groups: 2, ctc_loss_reduction: mean, mask_time_prob: 0.0"
    dropouts = ("hidden", "attention", "activation", "feat_proj", "final")
    config += "".join(f", {name}_dropout: 0.0" for name in dropouts)
    job = [
        *("model=hf", "model.architecture=Wav2Vec2ForCTC", f"model.config={{{config}}}"),
        *("data=arrays", f"data.path={path}", "data.shuffle=false", "strategy=dp"),
        *("train.steps=3", "train.global_batch=10", "optimizer=sgd", "optimizer.lr=0.05"),
    ]
    found = jobs.run([*job, *UNLIKE])
    one = [*job, "hardware=cpu", "hardware.devices=1", "strategy=single"]
    expected = jobs.run(one, plainly=True)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=LOSS)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=NORM)
    refused = run_or_refusal(jobs, [*job, *UNLIKE, "strategy=split"])
    assert isinstance(refused, str)
    assert "Wav2Vec2ForCTC cannot be exported" in refused


# What copies are refused for, by the operation in which samples meet.
MEETING = {
    "MaxOverBatch": "amax",
    "VarianceOverBatch": "var",
    "RootMeanSquare": "sqrt",
    "LogOfMean": "log",
    "Perplexity": "exp",
    "SoftmaxAlongBatch": "softmax",
    "CumulativeOverBatch": "cumsum",
    "MixedUp": "flip",
    "RolledNegatives": "roll",
    "Centred": "sub",
    "LessTheFirst": "select",
    "NormalisedByFunction": "batch_norm",
    "Broadcast": "sub",
    "Sorted": "sort",
    "UsageTimesGates": "mul",
    "Histogram": "mul",
    "MeanTimesSize": "mul",
    "MeanAndSum": "add",
    "WeightedMean": "div",
    "EveryOtherOfCat": "slice",
    "PairsAgainstHalves": "binary_cross_entropy_with_logits",
    "FirstRowsOfAll": "gather",
    "ScaledByFrequency": "embedding",
    "RenormedTable": "embedding_renorm_",
}


# Of these, in sums over the batch alone: copies exchange them, and micro-batches cannot.
EXCHANGED = {
    *("RootMeanSquare", "LogOfMean", "Centred", "UsageTimesGates", "Histogram", "MeanAndSum"),
    "WeightedMean",
}


SAME = [
    *("SecondMoment", "SumOverSize", "MeanAndPenalty", "MeanOfWeighted", "BatchMeanDivergence"),
    *("SeveralLosses", "Margins", "CountsInPython", "PicksByLabel", "WhereNotBranch", "Recurrent"),
    *(
        "TiedTable",
        "Frozen",
        "Teacher",
        "Checkpointed",
        "Hypernetwork",
        "GradientPenalty",
        "Normed",
    ),
    *("EveryOtherOfPairs", "FilledWithTheSize", "LossMadeAgain", "LossOfEachRow"),
    *("ReplacesItsBuffer", "NormalisesItsWeight", "Temperature"),
    *("NoiseOfAll", "SkipsByPython", "SkipsByTheModules", "PicksABlock", "AdaptiveSoftmax"),
]


# Refused for other reasons than that samples meet: under which strategy, and what is said.
REFUSED = {
    "SortedInGroups": ("dp", "has no rule that says what it does with samples"),
    "ReentrantBlocks": ("dp", "checkpoints with use_reentrant=True"),
    "ScriptedLoss": ("dp", "calls cross_entropy_loss past torch.nn.functional"),
    "ReplacesItsBuffer": ("split", "puts in the place of buffer calls"),
    "NormalisesItsWeight": ("zero2", "changes the parameter prototypes.weight (wrap_with_set_grad"),
    "ClampsItsWeight": ("zero2", "changes the parameter head.weight in its forward"),
    "WarmsUp": ("dp", "its forward changes from call to call"),
    "FreezesLater": ("dp", "whether the parameter blocks.0.weight is trained"),
    "MixesUpInAnOrder": ("dp", "made of its parts"),
    "LazyHead": ("dp", "has a parameter without a shape before its first forward (lazy.weight)"),
    "ComplexFilter": ("dp", "has a parameter of complex numbers (filter)"),
    "SeededNoise": ("split", "would lose the state of a generator that its forward seeds or holds"),
    "SavedRandomState": ("dp", "made of its parts"),
    "SkipsRarely": ("pipeline", "draws numbers from random.Random, of which a graph would hold"),
    "ReadsOnBothSides": ("pipeline", "cuts between operations that read the buffer calls"),
    "NormOfSome": ("dp", "runs the batch norm norm for the samples of some copies alone"),
    "PicksABlock": ("zero2", "does is another thing in every call of PicksABlock"),
    "AdaptiveSoftmax": ("zero2", "and ZeRO 2 goes by the order in which all of them run"),
}
# Plain copies are what MEETING and SAME are about, and a refusal is shown by name.
PAIRS = covering(
    list(product(NAMES, STRATEGIES)),
    lambda row: (
        set()
        if row[1] == "dp" and (row[0] in MEETING or row[0] in SAME)
        else {row[1], *{row[0]}.difference(MEETING, REFUSED)}
    ),
)


@pytest.mark.parametrize(("model", "strategy"), PAIRS)
def test_it_is_what_one_process_computes_or_refused(
    model: str, strategy: str, jobs: Jobs, data: Path
) -> None:
    found = run_or_refusal(jobs, overrides(model, data, *UNLIKE, *STRATEGIES[strategy]))
    if isinstance(found, str):
        refusal = re.search(r"whale_train\.errors\.(Plan|Config)Error: (\S.+)", found)
        assert refusal, found
        assert model in refusal[2] or refusal[2].startswith("strategy.graph"), refusal[2]
        return
    expected = alone(jobs, model, data)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=LOSS)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=NORM)
    if strategy == "dp":  # the faster device has more
        (copies,) = found.plan["task_graphs"]
        assert copies["shares"][0] > copies["shares"][1]


@pytest.mark.parametrize("model", MEETING)
def test_the_operation_is_named(model: str, jobs: Jobs, data: Path) -> None:
    pieces = ("train.accumulate=2",) if model in EXCHANGED else ()
    with pytest.raises(JobFailed) as failed:
        jobs.run(overrides(model, data, *UNLIKE, *STRATEGIES["dp"], *pieces))
    said = f"model={model} lets the samples of a batch meet: {MEETING[model]}"
    assert said in str(failed.value)


@pytest.mark.parametrize("model", sorted(EXCHANGED))
def test_sums_over_the_batch_are_exchanged(model: str, jobs: Jobs, data: Path) -> None:
    found = jobs.run(overrides(model, data, *UNLIKE, *STRATEGIES["zero2"]))
    expected = alone(jobs, model, data)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=LOSS)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=NORM)
    reasons = [x["reason"] for x in found.plan["decisions"] if x["key"] == "model"]
    assert any("samples meet in sums over the batch alone" in reason for reason in reasons)


@pytest.mark.parametrize("model", REFUSED)
def test_what_else_is_refused_is_said(model: str, jobs: Jobs, data: Path) -> None:
    strategy, said = REFUSED[model]
    with pytest.raises(JobFailed) as failed:
        jobs.run(overrides(model, data, *UNLIKE, *STRATEGIES[strategy]))
    assert said in str(failed.value)


# Of a part of them, as all run above under another strategy.
@pytest.mark.parametrize("model", some(SAME, SAME[::3]))
def test_what_copies_may_share_is_not_refused(model: str, jobs: Jobs, data: Path) -> None:
    found = jobs.run(overrides(model, data, *UNLIKE, *STRATEGIES["dp"]))
    assert found.plan["loss_over"] == "mean"


# Ranks meet what a model was vouched for not to do: each is stopped where it would communicate.
DIFFERENT = {
    "OneOfTwoNorms": ("dp", "is at the batch norm other"),
    "LossOfSome": ("dp", "is at a loss over targets"),
    "AdaptiveSoftmax": ("zero3", "is at the module classes."),
    "ExpertsByLabel": ("dp", ""),
}


@pytest.mark.parametrize("model", DIFFERENT)
def test_ranks_that_run_other_modules_do_not_wait_for_each_other(
    model: str, jobs: Jobs, data: Path
) -> None:
    strategy, said = DIFFERENT[model]
    vouched = ("model.samples_are_independent=true", "launcher.timeout_s=60")
    job = overrides(model, data, *UNLIKE, f"strategy={strategy}", *vouched)
    if not said:  # copies whose gradients are summed whoever made some
        assert jobs.run(job).losses == pytest.approx(alone(jobs, model, data).losses, rel=LOSS)
        return
    with pytest.raises(JobFailed, match="ForwardsDiffer") as failed:
        jobs.run(job)
    assert said in str(failed.value)


def test_a_teacher_in_inference_mode_is_gathered_under_zero3(jobs: Jobs, data: Path) -> None:
    found = jobs.run(overrides("InferenceTeacher", data, *UNLIKE, "strategy=zero3"))
    expected = alone(jobs, "InferenceTeacher", data)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=LOSS)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=NORM)


@pytest.mark.parametrize("strategy", ["dp", "zero1"])
def test_weights_that_some_ranks_reach_are_trained_as_one_process_does(
    strategy: str, jobs: Jobs, data: Path
) -> None:
    found = jobs.run(overrides("AdaptiveSoftmax", data, *UNLIKE, f"strategy={strategy}"))
    expected = alone(jobs, "AdaptiveSoftmax", data)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=LOSS)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=NORM)


def test_a_sum_over_samples_is_added(jobs: Jobs, data: Path) -> None:
    found = jobs.run(overrides("SumOfSquares", data, *UNLIKE, *STRATEGIES["dp"]))
    assert found.plan["loss_over"] == "sum"
    expected = alone(jobs, "SumOfSquares", data)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=LOSS)
