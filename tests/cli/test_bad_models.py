"""What the command says where model, data, strategy and memory do not go together, word for word.

These requests build the model (on the meta device), which is slower than reading a config.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.command import Answer, whale_train
from tests.cli.refused import ON_THE_MIX, PLAN, Case

CUSTOM = f"data=classes data.num_features=6 data.num_classes=4 {PLAN}"
LARGE = "model.width=4096 model.depth=6 model.heads=16"
ON_P100 = f"{ON_THE_MIX} 'hardware.nodes=[{{devices: 8, device: p100_pcie_16gb, link: pcie3_x16}}]'"

MODEL = (
    Case(
        "no_module",
        f"model._target_=nest.Net {CUSTOM}",
        "model._target_=nest.Net cannot be imported: there is no module nest; run from the "
        "folder that holds it, or install it",
    ),
    Case(
        "no_class",
        f"model._target_=nets.Nett {CUSTOM}",
        "model._target_=nets.Nett cannot be imported: nets has no Nett; did you mean Net? One "
        "of: Adversarial, Contrastive, Few, Frozen, Headless, Net, Pixels, Rows, Scores, "
        "Unlabelled",
    ),
    Case(
        "module_raises",
        f"model._target_=broken.Net {CUSTOM}",
        "model._target_=broken.Net cannot be imported: broken raised ModuleNotFoundError: No "
        "module named 'absent_thing'; correct broken",
    ),
    Case(
        "no_argument",
        f"model._target_=nets.Net model.widht=3 {CUSTOM}",
        "model.widht=3 is not an argument of Net; did you mean width? One of: classes, width; "
        "model=custom starts without arguments",
    ),
    Case(
        "constructor_raises",
        f"model.width=30 {PLAN}",
        "model._target_=whale_train.models.gpt.GPT cannot be built: GPT raised ValueError: "
        "width=30 does not divide into heads=4; correct its arguments or its code",
    ),
    Case(
        "forward_names",
        f"model._target_=nets.Pixels {CUSTOM}",
        "data.features is not an argument of the forward of Pixels; use one of: labels, pixels",
        "model._target_=nets.Pixels needs pixels in its forward, and the fields of the data are "
        "features, labels; name one of the data's fields pixels, in data.columns or data.fields, "
        "or give it a default",
    ),
    Case(
        "forward_raises",
        "model._target_=nets.Net data=classes data.num_features=5 data.num_classes=4 mode=plan "
        "hardware=cpu hardware.devices=2",
        "model=custom fails on a batch of data=classes (RuntimeError: {any}); correct its "
        "forward or its arguments, or use other data",
    ),
    Case(
        "setting_that_a_forward_reads",
        "model=hf model.architecture=T5ForConditionalGeneration 'model.config={d_model: 32, "
        f"num_layers: 1, num_heads: 2, vocab_size: 257}}' {PLAN}",
        "model.config has no decoder_start_token_id, which T5ForConditionalGeneration reads of its "
        "T5Config; write model.config.decoder_start_token_id=VALUE",
    ),
    Case(
        "no_loss",
        f"model._target_=nets.Scores {CUSTOM}",
        "model.loss=model finds no loss in what Scores returns (dict); return it as .loss, or "
        "use model.loss=cross_entropy",
    ),
    *(
        Case(
            f"frozen_{name}",
            f"{strategy} model._target_=nets.Frozen {CUSTOM}",
            "model=custom has no parameter to train; give it one with requires_grad",
        )
        for name, strategy in (
            *((name, f"strategy={name}") for name in ("dp", "split", "hybrid_split_dp", "auto")),
            ("zero_bubble", "strategy=zero_bubble strategy.graph.pipeline.stages=2"),
        )
    ),
    Case(
        "headless",
        f"strategy=hybrid_split_dp model._target_=nets.Headless {CUSTOM}",
        "strategy.graph[1].split.modules=head finds no output projection in Headless; use "
        "strategy=dp or a zero strategy",
    ),
    Case(
        "lost_backward",
        f"strategy=hybrid_split_dp model._target_=nets.Adversarial {CUSTOM}",
        "strategy.graph[1].split.modules=head needs the model's graph, and Adversarial cannot be "
        "exported (torch.export would lose the backward of the autograd function Reversing); use "
        "strategy=dp or a zero strategy, which run the model as it is",
    ),
    Case(
        "not_exported",
        f"strategy=hybrid_split_dp model._target_=nets.Rows {CUSTOM}",
        "strategy.graph[1].split.modules=head needs the model's graph, and Rows cannot be "
        "exported ({any}); use strategy=dp or a zero strategy, which run the model as it is",
    ),
    Case(
        "batch_too_large_for_its_graph",
        f"strategy=split model._target_=nets.Few train.global_batch=64 {CUSTOM}",
        "model=Few asks for the size of its batch: its graph is that of 1 to 63 samples, and this "
        "plan takes a step's 64 samples in parts of 64; use a train.global_batch of 1 to 63 "
        "samples",
    ),
    Case(
        "samples_meet_without_a_graph",
        f"strategy=split model._target_=nets.Contrastive {CUSTOM}",
        "strategy.graph.split needs the model's graph, and Contrastive cannot be exported "
        "(UserError: Constraints violated (batch)! You marked batch as dynamic but your code "
        "specialized it to be a constant (3)); use strategy=single, which runs the model as it is",
    ),
    Case(
        "head_glob",
        "strategy=hybrid_split_dp 'strategy.graph=[{replicate: {}}, {split: {modules: lm_haed}}]' "
        f"{PLAN}",
        "strategy.graph[1].split.modules=lm_haed names no weights of GPT; did you mean lm_head? "
        "Else use head, or modules with weights, such as {any}",
    ),
    Case(
        "few_classes",
        "strategy=hybrid_split_dp model._target_=nets.Net data=classes data.num_features=6 "
        "data.num_classes=4 mode=plan hardware=cpu hardware.devices=5",
        "strategy.graph[1].split.modules=head has 4 classes, too few to give each of 5 devices "
        "one; use strategy=dp, or fewer devices",
    ),
    Case(
        "nothing_held_back",
        f"train.evaluate_every=1 data.evaluation_fraction=0 {PLAN}",
        "train.evaluate_every=1 needs held-back samples, and there are none; raise "
        "data.evaluation_fraction, name sets in data.evaluation, or use null",
    ),
    Case(
        "labels_beyond_classes",
        f"model=class_head data=classes model.num_classes=10 data.num_classes=100 {PLAN}",
        "data=classes has labels up to 99, and the model has 10 classes; use a model with at "
        "least 100 classes, or other data",
    ),
    Case(
        "vocabulary_positions",
        f"model.vocab_size=100 model.sequence_length=32 {PLAN}",
        "data=text has input_ids up to 255, and token.weight has 100 rows; use a model with at "
        "least 256 rows, or other data",
        "data=text has positions up to 63, and position.weight has 32 rows; use "
        "data.sequence_length=32, or a model with at least 64 rows",
        "data=text has labels up to 255, and the model has 100 classes; use a model with at "
        "least 256 classes, or other data",
    ),
    Case(
        "memory_dp",
        f"{LARGE} {ON_P100}",
        "strategy=dp needs {any} GB on rank 0 (p100_pcie_16gb) for one sample, {any} GB more "
        "than its 15.0 GB; use strategy=zero1, which needs {any} GB",
    ),
    Case(
        "memory_of_hosts",
        f"model.width=16384 model.depth=8 model.heads=64 {ON_P100}",
        "strategy=dp needs {any} GB on rank 0 (p100_pcie_16gb) for one sample, {any} GB more "
        "than its 15.0 GB; use strategy=zero3_offload, which needs {any} GB",
    ),
    Case(
        "memory_all",
        f"model.width=32768 model.depth=8 model.heads=64 {ON_P100}",
        "strategy=dp needs {any} TB on rank 0 (p100_pcie_16gb) for one sample, {any} TB more "
        "than its 15.0 GB; no ZeRO stage makes it fit: use more devices or a smaller model",
    ),
    Case(
        "batch_too_large",
        f"train.global_batch=1000000 {ON_P100}",
        "train.global_batch=1000000 is {any} samples ({any} TB) more than the memory of "
        "hardware=v100_p100_mix holds under strategy=dp; use at most {any}, more ZeRO, or "
        "recompute: auto",
    ),
)


# What another case shows, or a test of the plan: a full run alone asks the command.
SHOWN_ELSEWHERE = (
    *("frozen_dp", "frozen_split", "frozen_hybrid_split_dp", "headless", "not_exported"),
    *("batch_too_large_for_its_graph", "few_classes", "labels_beyond_classes"),
    *("memory_of_hosts", "memory_all"),
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(x, marks=pytest.mark.full) if x.name in SHOWN_ELSEWHERE else x for x in MODEL],
    ids=lambda case: case.name,
)
def test_refused(case: Case, refusal: Callable[[Case], tuple[Path, Answer]]) -> None:
    case.check(*refusal(case))


def test_memory_is_short_by_what_it_says(
    refusal: Callable[[Case], tuple[Path, Answer]],
) -> None:
    """AdamW in fp32 keeps four values a parameter: itself, its gradient and two moments."""
    (case,) = (case for case in MODEL if case.name == "memory_dp")
    said = refusal(case)[1].stderr
    needed, missing, there, _ = (float(figure) for figure in re.findall(r"([\d.]+) GB", said))
    assert there == 15.0
    assert missing == pytest.approx(needed - there, abs=0.11)
    parameters = 6 * (12 * 4096 + 13) * 4096 + 2 * 257 * 4096
    assert 16e-9 * parameters < needed < 20e-9 * parameters


def test_what_is_said_to_fit_fits(
    tmp_path: Path, refusal: Callable[[Case], tuple[Path, Answer]]
) -> None:
    (case,) = (case for case in MODEL if case.name == "batch_too_large")
    most = int(re.findall(r"at most (\d+)", refusal(case)[1].stderr)[0])
    partitioned = f"{LARGE} strategy=zero1 train.global_batch=8"  # one sample a device
    asked = (f"train.global_batch={most}", f"train.global_batch={most + 1}", partitioned)
    answers = [whale_train(shlex.split(f"{text} {ON_P100}"), tmp_path) for text in asked]
    assert [answer.status for answer in answers] == [0, 2, 0]
