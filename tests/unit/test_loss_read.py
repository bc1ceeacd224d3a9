"""What a plan says of the logits that a loss reads, and a verification of what it cannot see."""

from dataclasses import replace

from whale_train.config import Request, read_request
from whale_train.launcher.compose.command_line import composed
from whale_train.launcher.planning.loss_read import explain_logits, shared_by_both
from whale_train.strategies.graph.operation_graph import InputField, Logits, ModelProfile
from whale_train.strategies.plan.plan import Decision


def request(*overrides: str) -> Request:
    config = composed(["model=class_head", "model.loss=cross_entropy", "data=classes", *overrides])
    return read_request(config, {"data": "classes"})


def profile(logits: Logits | None, *labels: int) -> ModelProfile:
    inputs = (InputField("labels", labels, "int64", 3),)
    return ModelProfile("Net", (), inputs, 0.0, 0.0, logits=logits)


SECOND = profile(Logits((5, 8, 6), 1, False), 8, 6)
SEQUENCE = profile(Logits((7, 7), -1, True), 7)
PICTURE = profile(Logits((8, 8, 8), 1, True), 8, 8)


def test_classes_in_the_second_dimension_are_said() -> None:
    shapes = "the logits [batch, 5, 8, 6] and the labels [batch, 8, 6]"
    said = f"the classes of the loss, by {shapes}"
    assert explain_logits(request(), SECOND) == (Decision("model.class_dim", "1", "", said),)


def test_what_was_open_is_said_with_the_other() -> None:
    sequence = (
        "the classes of the loss, as language models have them; the logits [batch, 7, 7] and the "
        "labels [batch, 7] fit model.class_dim=1 as well"
    )
    picture = (
        "the classes of the loss, as torch's cross_entropy does; the logits [batch, 8, 8, 8] and "
        "the labels [batch, 8, 8] fit model.class_dim=-1 as well"
    )
    assert explain_logits(request(), SEQUENCE) == (
        Decision("model.class_dim", "-1", "1", sequence),
    )
    assert explain_logits(request(), PICTURE) == (Decision("model.class_dim", "1", "-1", picture),)


def test_what_nobody_doubts_is_not_said() -> None:
    assert explain_logits(request("model.class_dim=1"), PICTURE) == ()
    assert explain_logits(request(), profile(Logits((7, 5), -1, False), 7)) == ()
    assert explain_logits(request(), profile(Logits((5,), -1, False))) == ()
    assert explain_logits(request(), profile(None)) == ()


def test_a_verification_says_what_its_sides_share() -> None:
    asked = request("seed=3", "data.shuffle=false")
    others = (
        "the samples of data=classes and their order (seed=3, data.shuffle=false)",
        "the model's code and how its weights begin (seed=3)",
    )
    assert shared_by_both(asked, profile(None)) == ("the loss that ClassHead computes", *others)
    read = "the loss as model.loss=cross_entropy reads it, its"
    assert shared_by_both(asked, SECOND) == (
        f"{read} 5 classes in dimension 1 of the logits [batch, 5, 8, 6], without labels of -100",
        *others,
    )
    last = replace(SECOND, logits=Logits((8, 6, 5), -1, False))
    assert shared_by_both(asked, last) == (
        f"{read} 5 classes in dimension 3 of the logits [batch, 8, 6, 5], without labels of -100",
        *others,
    )
