"""The page of all refusals has what the command says: the messages that tests of `tests/cli` expect
word for word are among its templates."""

import json
import re
from pathlib import Path

import pytest
from scripts.reference.errors_page import anchor_of, errors_page, refusals_script
from scripts.reference.refusals import Refusal, refusals
from tests.cli import test_bad_command_lines, test_bad_models, test_bad_requests

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "whale_train"
CASES = (
    *test_bad_requests.CASES,
    *test_bad_models.MODEL,
    *test_bad_command_lines.COMMAND_LINE,
    *test_bad_command_lines.VALUES,
)
# Remedies that are written anew, for the strategy that stands in the request.
REWRITTEN = ("use strategy=single, which runs the model as it is",)


@pytest.fixture(scope="module")
def found() -> list[Refusal]:
    return refusals(PACKAGE)


def test_every_message_that_the_command_is_known_to_say_is_on_the_page(
    found: list[Refusal],
) -> None:
    said = {
        fault.replace("{here}", "/here").replace("{any}", "any")
        for case in CASES
        for fault in case.faults
        if not fault.endswith(REWRITTEN)
    }
    assert len(said) > 100
    assert [x for x in sorted(said) if not any(one.pattern.fullmatch(x) for one in found)] == []


def test_a_message_says_more_than_placeholders(found: list[Refusal]) -> None:
    for one in found:
        assert re.search(r"\w{2}", re.sub(r"<[^<>]*>", "", one.rule + one.remedy)), one
    assert not [x for x in found if x.pattern.fullmatch("train.precision=fp4 is blue; use red")]


def write(folder: Path, **modules: str) -> Path:
    """Return the folder of a package with these modules."""
    package = folder / "whale_train"
    package.mkdir()
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    return package


BRANCHES = """
TABLE = {"a": ("is of a", "use b"), "b": ("is of b", "use a")}

def check(key, value, faults):
    rule, remedy = "is one", "use two"
    if value > 2:
        rule, remedy = f"is above {value}", "use less"
    elif value < 0:
        remedy = "use more"
    else:
        rule += f" of {key.kind}"
    faults.append(Fault(f"train.{key}", str(value), rule, remedy))

def look_up(kind):
    rule, remedy = TABLE[kind]
    raise ConfigError([Fault("model", "", rule, remedy)])
"""


def test_a_rule_and_its_remedy_are_of_one_branch(tmp_path: Path) -> None:
    messages = {x.message for x in refusals(write(tmp_path, checks=BRANCHES))}
    assert messages == {
        "train.<key>=<value> is one; use two",
        "train.<key>=<value> is one; use more",
        "train.<key>=<value> is above <value>; use less",
        "train.<key>=<value> is one of <kind>; use two",
        "model is of a; use b",
        "model is of b; use a",
    }


HELPERS = """
from whale_train.names import KEY

def refusal(key, rule, remedy="leave it out"):
    return Fault(key, "", rule, remedy)

def one(name):
    return refusal(f"data.{name}", "is no name", "use a name")

def two(name):
    why = "is " + words(name)
    return refusal(KEY, why)

def words(name):
    return "short" if len(name) < 3 else f"long ({len(name)} letters)"

def end(code):
    raise LaunchError(f"rank {code} is gone; start it again")
"""


def test_a_helper_says_what_its_calls_say(tmp_path: Path) -> None:
    package = write(tmp_path, checks=HELPERS, names='KEY = "checkpoint.to"\n')
    messages = {(x.group, x.message) for x in refusals(package)}
    assert messages == {
        ("data", "data.<name> is no name; use a name"),
        ("checkpoint", "checkpoint.to is short; leave it out"),
        ("checkpoint", "checkpoint.to is long (<name> letters); leave it out"),
        ("other", "rank <code> is gone; start it again"),
    }


def test_the_page_has_a_rule_once_with_all_its_remedies() -> None:
    known = [
        Refusal("train", "train.steps=<steps>", "is too *few*", "use 1"),
        Refusal("train", "train.steps=<steps>", "is too *few*", "use <most>"),
        Refusal("other", "", "rank <rank> died", ""),
    ]
    few = anchor_of("train", "train.steps=<steps>", "is too *few*")
    died = anchor_of("other", "", "rank <rank> died")
    assert errors_page(known).endswith(
        f"## train\n\n[`train.steps=<steps>` is too \\*few\\*]{{#{few}}}\n: Use 1.\n"
        f": Use \\<most\\>.\n\n## other\n\n[rank \\<rank\\> died]{{#{died}}}\n"
        ": The message says no more.\n"
    )
    script = refusals_script(known)
    rows = json.loads(script.removeprefix("const REFUSALS = ").removesuffix(";\n"))
    assert rows == [
        {
            "anchor": few,
            "text": "train.steps=<steps> is too *few*",
            "parts": ["train.steps=", " is too *few*"],
        },
        {"anchor": died, "text": "rank <rank> died", "parts": ["rank ", " died"]},
    ]
