"""Code of the user's own at six moments of a run: what it sees, asks for and raises."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.command import Answer, whale_train

MODULE = """
import json

class Noted:
    def __init__(self, path, at=None, asks=None, raises=None):
        self.path, self.at, self.asks, self.raises = path, at, asks, raises

    def note(self, *what):
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + "\\n")
        if self.raises == what[0]:
            raise ValueError("as asked")

    def start(self, run):
        self.note("start", run.step, run.config["train"]["steps"])

    def step(self, step, values):
        self.note("step", step, values["loss"])
        return self.asks if step == self.at else None

    def evaluation(self, step, values):
        self.note("evaluation", step, values)

    def save(self, step, folder):
        self.note("save", step, (folder / "manifest.json").exists())

    def failure(self, error):
        self.note("failure", str(error))

    def end(self, status, summary):
        self.note("end", status, summary["steps"])

class OnlyEnds:
    def end(self, status, summary):
        print("ended")

class Nothing:
    pass
"""
RUN = ("experiment=smoke", "train.steps=8", "train.evaluate_every=4")


def run(folder: Path, *callbacks: str) -> tuple[Answer, list[list[Any]]]:
    (folder / "noted.py").write_text(MODULE)
    answer = whale_train([*RUN, *callbacks, "hydra.run.dir=run"], folder)
    notes = folder / "notes"
    return answer, [json.loads(x) for x in notes.open()] if notes.exists() else []


def test_moments_and_values(tmp_path: Path) -> None:
    """With a checkpoint that is asked for, where the run saves none by itself; and the end."""
    save = "callbacks.a={_target_: noted.Noted, path: notes, at: 2, asks: save}"
    end = "callbacks.b={_target_: noted.Noted, path: others, at: 5, asks: end}"
    answer, notes = run(tmp_path, save, end, "callbacks.c._target_=noted.OnlyEnds")
    assert answer.status == 0, answer
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    (ended,) = (note for note in notes if note[0] == "end")
    assert ended == ["end", "finished", len(lines)]
    assert 5 < len(lines) < 8
    assert f"ended after step {len(lines)}: a callback asked for the end" in answer.stdout
    assert notes[0] == ["start", 0, 8]
    steps = [note[1:] for note in notes if note[0] == "step"]
    assert steps == [[line["step"], line["loss"]] for line in lines]
    evaluation = {key: x for key, x in lines[3].items() if key.startswith("evaluation")}
    assert [note for note in notes if note[0] == "evaluation"] == [["evaluation", 4, evaluation]]
    (saved,) = (note for note in notes if note[0] == "save")
    assert saved[1] in (3, 4)
    assert saved[2]
    kept = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert kept == [f"step_{saved[1]}"]
    assert (tmp_path / "run" / "model").exists()


def test_an_error_stops_the_run_and_is_named(tmp_path: Path) -> None:
    answer, notes = run(tmp_path, "callbacks.a={_target_: noted.Noted, path: notes, raises: step}")
    assert answer.status == 1
    said = "callbacks.a raised ValueError: as asked in step"
    assert f"CallbackError: {said}" in answer.stderr
    assert "ValueError: as asked" in answer.stderr
    assert [note[0] for note in notes] == ["start", "step", "failure"]
    assert notes[-1] == ["failure", said]
    assert not answer.left_running


@pytest.mark.parametrize("asks", ["stop", "[save,end]"])
def test_what_it_cannot_ask_for_is_named(tmp_path: Path, asks: str) -> None:
    bad = f"callbacks.a={{_target_: noted.Noted, path: notes, at: 1, asks: {asks}}}"
    answer, _ = run(tmp_path, bad)
    assert answer.status == 1
    said = "['save', 'end']" if asks != "stop" else "'stop'"
    assert f'callbacks.a returned {said}, not "save", "end" or None, in step' in answer.stderr


def test_a_run_goes_on_without_one_that_raises(tmp_path: Path) -> None:
    bad = "callbacks.a={_target_: noted.Noted, path: notes, raises: evaluation}"
    good = "callbacks.b={_target_: noted.Noted, path: others}"
    answer, notes = run(tmp_path, bad, good, "callbacks.on_error=go_on")
    assert answer.status == 0, answer
    warning = "warning: callbacks.a raised ValueError: as asked in evaluation; the run went on "
    assert warning + "without it" in answer.stdout
    assert [note[0] for note in notes] == ["start", *["step"] * 4, "evaluation"]
    others = [json.loads(line)[0] for line in (tmp_path / "others").open()]
    assert others == ["start", *["step"] * 4, "evaluation", *["step"] * 4, "evaluation", "end"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("callbacks.a={_target_: noted.Noted, pth: notes}",),
            "callbacks.a.pth=notes is not an argument of Noted; did you mean path? One of: asks, "
            "at, path, raises callbacks.a.path is not given, and Noted needs it; write "
            "callbacks.a.path=VALUE",
        ),
        (
            ("callbacks.a._target_=noted.Nothing",),
            "callbacks.a._target_=noted.Nothing is a class, and not a "
            "whale_train.callbacks.callback.Callback; name a class with one of the methods start, "
            "step, evaluation, save, failure, end",
        ),
        (
            ("callbacks.a=3", "callbacks.on_error=never"),
            "callbacks.a=3 names no class; write callbacks.a._target_=my_module.MyCallback "
            "callbacks.on_error=never is unknown; use one of: go_on, stop",
        ),
    ],
)
def test_refused(tmp_path: Path, overrides: tuple[str, ...], expected: str) -> None:
    answer, notes = run(tmp_path, *overrides)
    said = " ".join(answer.stderr.split())
    said = said.removeprefix("error: ").removeprefix("2 things are wrong with this request: ")
    assert (answer.status, said, notes) == (2, expected, [])
