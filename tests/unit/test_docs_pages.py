"""What makes a scenario of a page: its blocks, the commands in them, and what stands for one."""

from pathlib import Path

import pytest
from tests.docs import scenario
from tests.docs.command_lines import CommandLine, command_lines, planned
from tests.docs.pages import Block, Page, page_of
from tests.docs.scenario import Scenario, fits

PAGE = """<!-- files: arrays models -->

# Title

<!-- run: with train.steps=2 -->
<!-- run: shows -->

```bash
whale-train strategy=dp
```

````{code-block} yaml
:caption: my/a.yaml

a: ```
````

```text
whale-train
```
"""


def test_a_page_is_its_blocks_with_what_comments_say() -> None:
    assert page_of(PAGE) == Page(
        ("arrays", "models"),
        (
            Block("bash", "whale-train strategy=dp\n", "", ("with train.steps=2", "shows"), 8),
            Block("yaml", "a: ```\n", "my/a.yaml", (), 12),
            Block("text", "whale-train\n", "", (), 18),
        ),
    )
    bash = page_of(PAGE).blocks[0]
    assert (bash.asked("with"), bash.asked("shows")) == ("train.steps=2", "")
    assert bash.asked("plan") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- run: plan -->\n\nText.\n", "line 3: 'run: plan' stands before no block"),
        ("```bash\nls\n", "line 1: the block has no end"),
        (
            "<!-- run: refuse -->\n```bash\nls\n```\n",
            "line 1: 'run: refuse' is none of file NAME, full, no",
        ),
        (
            "<!-- run: no -->\n```bash\nls\n```\n",
            "line 1: 'run: no' is none of file NAME, full, no",
        ),
    ],
)
def test_a_page_without_a_block_where_one_must_be_is_wrong(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        page_of(text)


def test_commands_go_on_at_backslashes_and_in_quotes() -> None:
    text = (
        "# first\nwhale-train a=1 \\\n   b=2   # why\nwhale-train 'c={d: 1,\n e: 2}'\nls | wc -l\n"
    )
    commands = command_lines(text)
    assert [command.words for command in commands] == [
        ("whale-train", "a=1", "b=2"),
        ("whale-train", "c={d: 1,\n e: 2}"),
        ("ls", "|", "wc", "-l"),
    ]
    assert [command.is_ours for command in commands] == [True, True, False]


def only(text: str) -> CommandLine:
    (command,) = command_lines(text)
    return command


@pytest.mark.parametrize(
    ("text", "jobs"),
    [
        ("whale-train mode=verify strategy=dp train.resume=auto", [["strategy=dp"]]),
        ("whale-train -m strategy=dp,zero1 seed=0,1", [["strategy=dp", "seed=0"],
                                                       ["strategy=zero1", "seed=0"]]),
        ("whale-train compare=[dp,zero1] mode=plan", [["compare=[dp,zero1]"]]),
        ('torchrun --nnodes=2 "$(which whale-train)" hardware=cpu', [["hardware=cpu"]]),
        ("A=1 srun whale-train hydra.run.dir=runs/a model=gpt", [["model=gpt"]]),
        ("whale-train -m hydra/sweeper=optuna 'seed=range(0, 3)' model=gpt", [["model=gpt"]]),
        ('make train ARGS="strategy=zero3"', [["strategy=hybrid_split_dp",
                                               "hardware=v100_p100_mix", "strategy=zero3"]]),
        ("make test", [[]]),
        ("whale-train seed=1 2>&1 | tail -n 3", [["seed=1"]]),
    ],
)  # fmt: skip
def test_a_command_is_planned_by_its_overrides(text: str, jobs: list[list[str]]) -> None:
    assert planned(only(text)) == jobs


def test_what_is_shown_is_what_was_said_but_for_times() -> None:
    said = "a  3.30 ms a step, 19,385 samples/s\nb\nruns/2026-11-28/19-03-04-abcdef in 1:02\n"
    end = "...\nruns/2026-01-01/00-00-00-x in 0:01"
    assert fits(f"a   2 ms a step, 7 samples/s\n{end}", said)
    assert not fits(f"a 2 ms a step, 7 samples/s\n{end}", said)  # one space parts no columns
    assert not fits("a  2 ms a step, 7 samples/s\nc\n...", said)
    assert not fits("loss 2.371\n", "loss 2.372\n")


class Answers:
    """Stands for the command: keeps what it is given, and ends with a status."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.given: list[list[str]] = []

    def __call__(self, words: list[str], *rest: object) -> "Answers":
        self.given.append([x for x in words if not x.startswith("hydra.run.dir")])
        return self

    stdout, stderr = "said\n", ""


@pytest.mark.parametrize(
    ("comment", "is_full", "given"),
    [
        ("shows", False, [["seed=1", "mode=plan"]]),
        ("shows", True, [["seed=1"]]),
        ("plan", True, [["seed=1", "mode=plan"]]),
        ("with train.steps=2", True, [["seed=1", "train.steps=2"]]),
        ("no why", True, [["seed=1", "mode=plan"]]),
        ("full", False, []),
    ],
)
def test_a_comment_says_how_a_block_is_run(
    comment: str,
    is_full: bool,
    given: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = Answers(0)
    monkeypatch.setattr(scenario, "whale_train", answers)
    page = page_of(f"<!-- run: {comment} -->\n```bash\nwhale-train seed=1\n```\n")
    Scenario(page, tmp_path, is_full).run()
    assert answers.given == given


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("```bash\nwhale-train mode=plan\n```\n", 1, "exit status 1"),
        ("<!-- run: refused -->\n```bash\nwhale-train\n```\n", 0, "exit status 0"),
        ("```bash\npip install x\n```\n", 0, "run: no REASON"),
        ("```bash\nfalse\n```\n", 0, "exit status 1"),
        ("<!-- run: plan -->\n```bash\nwhale-train | tail\n```\n", 1, "whale-train . tail: "),
        ("```python\na =\n```\n", 0, "invalid syntax"),
        ("```yaml\na: [\n```\n", 0, "expected"),
        (
            "<!-- run: shows -->\n```bash\nwhale-train mode=plan\n```\n```output\nother\n```\n",
            0,
            "the page shows",
        ),
    ],
)
def test_a_page_that_is_wrong_fails(
    text: str, status: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "whale_train", Answers(status))
    with pytest.raises(AssertionError, match=rf"(?s)line \d+: .*{said}"):
        Scenario(page_of(text), tmp_path, is_full=True).run()


def test_a_page_that_is_right_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "whale_train", Answers(0))
    text = "```{code-block} yaml\n:caption: a/b.yaml\n\nc: 1\n```\n<!-- run: shows -->\n"
    text += "```bash\nexport NAME=v\ncat a/b.yaml; echo $NAME\n```\n```output\nc: 1\nv\n```\n"
    Scenario(page_of(text), tmp_path, is_full=True).run()
