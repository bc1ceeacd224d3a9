"""A profile written as JSON and read again is the same profile."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs import examples
from tests.unit.operation_graphs import bert, classifier, gpt

from whale_train.strategies.graph.operation_graph import (
    Argument,
    ModelProfile,
    Operation,
    OperationGraph,
    Parameter,
    Ref,
    Size,
)
from whale_train.strategies.graph.profile_json import profile_from_json, profile_to_json

PROFILES = {
    "gpt": gpt(tied=True),
    "bert": bert(),
    "classifier": replace(
        classifier(), batch_norm_modules=("norm",), unused_parameters=("a", "b"), buffer_bytes=12
    ),
    "not exported": replace(
        ModelProfile("m", (), (), 1e300, 0.1), export_error='it "branches"', perhaps_unused=("c",)
    ),
}

finite = st.floats(allow_nan=False)
leaves: st.SearchStrategy[Argument] = st.one_of(
    st.builds(Ref, st.text()),
    st.builds(Size, st.integers(), st.integers()),
    st.integers(),
    finite,
    st.booleans(),
    st.text(),
    st.none(),
)
arguments = st.recursive(leaves, lambda parts: st.lists(parts, max_size=3).map(tuple), max_leaves=6)


def read_again(profile: ModelProfile) -> ModelProfile:
    return profile_from_json(profile_to_json(profile))


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_what_is_read_is_what_was_written(profile: ModelProfile) -> None:
    assert read_again(profile) == profile


@settings(max_examples=examples(100))
@given(st.lists(arguments, max_size=3), arguments, finite, st.text())
def test_any_argument_is_read_as_it_was(
    args: list[Argument], named: Argument, number: float, word: str
) -> None:
    operation = Operation(
        *("x", "aten.any", tuple(args), (("dim", named),), (Size(1, 2), Size(3)), word, word, word),
        *(number, ((0, number), (-1, 2.0)), -2, (word,), True, (word, word), word),
    )
    graph = OperationGraph((operation, Operation("y", "output")))
    parameters = (Parameter(word, (3, 1), 2, (word,)),)
    profile = ModelProfile("m", parameters, (), number, number, graph=graph)
    found = read_again(profile)
    assert found == profile
    # Equality takes 1, 1.0 and True for one; what they are written as tells them apart.
    assert repr(found) == repr(profile)


def test_a_mask_of_minus_infinity_stays() -> None:
    graph = OperationGraph((Operation("x", "aten.full.default", ((), -inf)),))
    assert read_again(ModelProfile("m", (), (), 0.0, 0.0, graph=graph)).graph == graph


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "{}", '{"name": "m"}', "\N{BULLET}", profile_to_json(gpt())[:-1]),
        profile_to_json(gpt()).replace('"name"', '"nom"'),
        profile_to_json(gpt()).replace('"ref"', '"fer"', 1),
    ],
)
def test_what_is_no_profile_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|is no profile"):
        profile_from_json(text)
