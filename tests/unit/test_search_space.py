"""The values that overrides leave open, as Optuna's distributions."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from whale_train.errors import Fault
from whale_train.launcher.study.search_space import read_space

WRITTEN: dict[str, BaseDistribution] = {
    "x=interval(1, 5)": FloatDistribution(1.0, 5.0),
    "x=int(interval(1, 5))": IntDistribution(1, 5),
    "x=tag(log, interval(1e-5, 0.1))": FloatDistribution(1e-5, 0.1, log=True),
    "x=int(tag(log, interval(1, 100)))": IntDistribution(1, 100, log=True),
    "x=range(1, 10, 4)": IntDistribution(1, 9, step=4),  # Hydra's ranges end before their stop
    "x=range(1, 9, 4)": IntDistribution(1, 5, step=4),
    "x=range(10, 1, -3)": IntDistribution(4, 10, step=3),
    "x=range(0.5, 2, 0.5)": FloatDistribution(0.5, 1.5, step=0.5),
    "x=dp,zero1": CategoricalDistribution(("dp", "zero1")),
    "x=1,0.5,null,false,'2'": CategoricalDistribution((1, 0.5, None, False, "'2'")),
    "x=[1,2],[3]": CategoricalDistribution(("[1,2]", "[3]")),
}


@pytest.mark.parametrize("text", WRITTEN)
def test_a_key_has_the_values_of_hydras_grammar(text: str) -> None:
    faults: list[Fault] = []
    parser = OverridesParser.create()
    space, fixed = read_space(parser.parse_overrides(["seed=3", text]), faults)
    assert (faults, fixed, list(space)) == ([], ["seed=3"], ["x"])
    assert space["x"].distribution() == WRITTEN[text]
    (override,) = parser.parse_overrides([text])
    if override.is_discrete_sweep():
        values = sorted(parser_value(parser, space["x"].override(v)) for v in space["x"].values())
        assert values == sorted(
            parser_value(parser, f"x={v}") for v in override.sweep_string_iterator()
        )


def parser_value(parser: OverridesParser, text: str) -> str:
    """Return the value that Hydra reads in an override, as text; a float with ten digits."""
    value = parser.parse_overrides([text])[0].value()
    return f"{value:.10g}" if isinstance(value, float) else repr(value)


def test_a_range_of_decimals_ends_before_its_stop() -> None:
    """Hydra's own steps from 0.1 to just below 0.4."""
    space, _ = read_space(OverridesParser.create().parse_overrides(["x=range(0.1, 0.4, 0.1)"]), [])
    assert space["x"].distribution() == FloatDistribution(0.1, 0.3, step=0.1)
    assert space["x"].values() == [0.1, 0.2, 0.3]


def test_a_later_override_replaces_an_earlier_one() -> None:
    faults: list[Fault] = []
    texts = ["a=1,2", "b=1", "++c=interval(0,1)", "a=5", "b=3,4"]
    space, fixed = read_space(OverridesParser.create().parse_overrides(texts), faults)
    assert (faults, fixed, list(space)) == ([], ["a=5"], ["c", "b"])
    assert space["c"].override(0.25) == "++c=0.25"


REFUSED = {
    "x=1,1.0,2": "x=1,1.0,2 has equal values; name every value once",
    "x=range(3, 3)": "x=range(3, 3) has no value; use range(START, STOP, STEP)",
    "x=range(3, 5, 0)": "x=range(3, 5, 0) is no range of numbers; use range(START, STOP, STEP), "
    "its "
    "step not 0",
    "x=interval(2, 1)": "x=interval(2, 1) is an interval without numbers; write the smaller number "
    "first",
    "x=tag(log, interval(0, 1))": "x=tag(log, interval(0, 1)) has no logarithm at its beginning; "
    "begin above 0",
    "x=tag(fine, interval(0, 1))": "x=tag(fine, interval(0, 1)) has the tag fine; use log, of an "
    "interval, or no tag",
    "x=shuffle(1, 2)": "x=shuffle(1, 2) is shuffled, and the sampler determines the order; leave "
    "shuffle() out",
    "mode=plan,train": "mode=plan,train is the same for all trials; give one value",
    "hydra.verbose=true,false": "hydra.verbose=true,false is the same for all trials; give one "
    "value",
    "x=1": "hydra/sweeper=optuna has no values to choose from; give several values to a key, as "
    "'optimizer.lr=interval(0.001, 0.1)'",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_no_study_can_choose_is_refused(text: str) -> None:
    faults: list[Fault] = []
    read_space(OverridesParser.create().parse_overrides([text]), faults)
    assert [str(fault) for fault in faults] == [REFUSED[text]]
