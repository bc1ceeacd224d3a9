"""What Hydra's own part of a config may name: nothing that would be called, or imported to log."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pairs import covering

from whale_train.errors import ConfigError
from whale_train.launcher.compose.command_line import check, rewritten

MODULE = """import logging
from pathlib import Path

Path("imported").touch()


def mark(*arguments, **settings):
    Path("called").touch()
    return logging.NullHandler()
"""
HANDLER = "{version: 1, handlers: {h: {'()': named_code.mark}}, root: {handlers: [h]}}"
UNCALLED = "would be called, and Hydra's own part of a config calls nothing; leave it out; code is "
UNCALLED += "named by model._target_"
ELSEWHERE = "is written elsewhere, and what it calls can change; write it out here"
CLASSES = "use one of: colorlog.ColoredFormatter, logging.FileHandler, logging.Formatter, "
CLASSES += "logging.NullHandler, logging.StreamHandler, logging.handlers.RotatingFileHandler, "
CLASSES += "logging.handlers.TimedRotatingFileHandler, logging.handlers.WatchedFileHandler"
VARIABLE = "is no variable that a config may set: others name code that is run; set it in the "
VARIABLE += "environment of the command"

DIRS = ("hydra.run.dir=runs/one", "hydra.sweep.dir=runs/several")

# Hydra's part of a strategy file, and the fault of it.
IN_FILES = {
    "callbacks: {x: {_target_: named_code.mark}}": f"hydra.callbacks.x._target_=named_code.mark "
    f"{UNCALLED}",
    "callbacks: {x: {y: [{_target_: named_code.mark}]}}": "hydra.callbacks.x.y[0]._target_="
    f"named_code.mark {UNCALLED}",
    "callbacks: {x: {_target_: '${oc.env:NAMED}'}}": "hydra.callbacks.x._target_=${oc.env:NAMED} "
    f"{UNCALLED}",
    "callbacks: {x: '${strategy.aside}'}": f"hydra.callbacks.x=${{strategy.aside}} {ELSEWHERE}",
    "callbacks: '${strategy.asides}'": f"hydra.callbacks=${{strategy.asides}} {ELSEWHERE}",
    "launcher: {_target_: named_code.mark}": f"hydra.launcher._target_=named_code.mark {UNCALLED}",
    "sweeper: {_target_: named_code.mark}": f"hydra.sweeper._target_=named_code.mark {UNCALLED}",
    f"job_logging: {HANDLER}": "hydra.job_logging.handlers.h.()=named_code.mark would be called to "
    f"log; {CLASSES}",
    f"hydra_logging: {HANDLER}": "hydra.hydra_logging.handlers.h.()=named_code.mark would be "
    f"called to log; {CLASSES}",
    "job_logging: {version: 1, root: {}, handlers: {h: {class: named_code.mark}}}": "hydra."
    f"job_logging.handlers.h.class=named_code.mark would be called to log; {CLASSES}",
    "job_logging: {version: 1, root: {}, a: ['ext://named_code.mark']}": "hydra.job_logging.a[0]="
    "ext://named_code.mark would be imported to log; use one of: ext://sys.stderr, "
    "ext://sys.stdout",
    "job: {env_set: {LD_PRELOAD: x.so}}": f"hydra.job.env_set.LD_PRELOAD {VARIABLE}",
    "job: {env_set: {NCCL_NET_PLUGIN: x}}": f"hydra.job.env_set.NCCL_NET_PLUGIN {VARIABLE}",
    "mode: MULTIRUN\n  sweeper: {params: {+hydra.callbacks.x._target_: 'named_code.mark,y'}}": (
        f"hydra.callbacks.x._target_=named_code.mark {UNCALLED}\n"
        f"hydra.callbacks.x._target_=y {UNCALLED}"
    ),
}


@pytest.fixture(autouse=True)
def beside_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a folder whose module leaves a file when it is imported, and one when called."""
    (tmp_path / "named_code.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NAMED", "named_code.mark")
    yield
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "called").exists()
    assert "named_code" not in sys.modules


def said_of(*arguments: str) -> str:
    """Return the faults of a command line, or nothing."""
    try:
        check(rewritten([*["mode=plan", "hardware=cpu", "hardware.devices=2"], *DIRS, *arguments]))
    except ConfigError as error:
        return str(error)
    return ""


RULES = (UNCALLED, ELSEWHERE, "would be called to log", "would be imported to log", VARIABLE)


def shown(part: str) -> set[str]:
    """Return the key of Hydra's part that is shown to be looked at, and the rules it breaks."""
    return {part.partition(":")[0], *(rule for rule in RULES if rule in IN_FILES[part])}


@pytest.mark.parametrize("part", covering(list(IN_FILES), shown))
def test_a_file_calls_nothing_through_hydra(tmp_path: Path, part: str) -> None:
    (tmp_path / "my/strategy").mkdir(parents=True)
    aside = "{_target_: named_code.mark}"
    strategy = f"strategy: {{graph: replicate, aside: {aside}, asides: {{x: {aside}}}}}"
    text = f"# @package _global_\n{strategy}\nhydra:\n  {part}\n"
    (tmp_path / "my/strategy/odd.yaml").write_text(text, encoding="utf-8")
    said = said_of("--config-dir=my", "strategy=odd")
    faults = [line for line in said.splitlines() if not line.startswith("strategy.aside")]
    assert "\n".join(faults) == IN_FILES[part]


@pytest.mark.parametrize(
    "flag",
    [
        "--help",
        *(pytest.param(flag, marks=pytest.mark.full) for flag in ("--hydra-help", "--info=all")),
        "--cfg=job",
    ],
)
def test_what_only_shows_calls_nothing_either(tmp_path: Path, flag: str) -> None:
    (tmp_path / "my/strategy").mkdir(parents=True)
    text = (
        f"# @package _global_\nstrategy: {{graph: replicate}}\nhydra: {{hydra_logging: {HANDLER}}}"
    )
    (tmp_path / "my/strategy/odd.yaml").write_text(text, encoding="utf-8")
    said = said_of("--config-dir=my", "strategy=odd", flag)
    assert said.startswith("hydra.hydra_logging.handlers.h.()=named_code.mark would be called")


def test_a_primary_config_of_ones_own_calls_nothing(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    text = "hydra: {callbacks: {x: {_target_: named_code.mark}}}\n"
    (tmp_path / "own/config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"hydra\.callbacks\.x\._target_=named_code\.mark would"):
        check(["--config-path", str(tmp_path / "own")])


COMMAND_LINES = {
    "+hydra.callbacks.x._target_=named_code.mark": IN_FILES[next(iter(IN_FILES))],
    "hydra.launcher=3": "hydra.launcher=3 is no launcher; use hydra/launcher=basic",
    "+hydra.launcher.x=1": "hydra.launcher.x is not a key here; use hydra/launcher=basic",
    "hydra.sweeper.max_batch_size=0": "hydra.sweeper.max_batch_size=0 is not a whole number of at "
    "least 1; use such a number, or null",
    "hydra.verbose=3": "hydra.verbose=3 is not true, false, or names of loggers; use true, or as "
    "[whale_train]",
    "--experimental-rerun=run.pickle": "--experimental-rerun=run.pickle would unpickle a file, "
    "which can call anything; give the overrides of the run, which are in its "
    ".hydra/overrides.yaml",
    "--config-path=absent": "--config-path=absent is not a folder; name one with your files",
}


@pytest.mark.parametrize("argument", COMMAND_LINES)
def test_a_command_line_calls_nothing_through_hydra(argument: str) -> None:
    assert said_of(argument) == COMMAND_LINES[argument]


@pytest.mark.parametrize(
    "argument",
    [
        pytest.param("hydra.run.dir=runs/mine", marks=pytest.mark.full),
        pytest.param("hydra.job.name=mine", marks=pytest.mark.full),
        pytest.param("hydra.job.chdir=true", marks=pytest.mark.full),
        "hydra.verbose=[whale_train]",
        pytest.param("hydra.output_subdir=null", marks=pytest.mark.full),
        "hydra/job_logging=default",
        pytest.param("hydra/hydra_logging=default", marks=pytest.mark.full),
        "+hydra.job.env_set={OMP_NUM_THREADS: 2, NCCL_DEBUG: INFO}",
        "hydra.job.env_copy=[HOME]",
        "hydra.searchpath=[file://.]",
    ],
)
def test_what_is_no_code_is_kept(argument: str) -> None:
    assert said_of(argument) == ""


def test_logging_that_is_a_number_is_refused() -> None:
    assert said_of("hydra.job_logging=${seed}") == (
        "hydra.job_logging=0 is no description of logging; use hydra/job_logging=NAME"
    )


SWEEPS = {
    "seed=range(1,100000000000)": "seed=range(1,100000000000) makes a sweep of 99,999,999,999 "
    "jobs, and at most 1,000 are swept; sweep fewer values, or in several commands",
    "hydra.sweeper.params={seed: '1,2'}": "hydra.sweeper.params={seed: '1,2'} is for config files, "
    "and cannot be given on the command line; write the choices themselves, as -m seed=1,2",
    "seed=1,2": "",
}


@pytest.mark.parametrize("argument", SWEEPS)
def test_sweeps_are_bounded(argument: str) -> None:
    assert said_of("-m", argument) == SWEEPS[argument]


def test_a_file_may_sweep(tmp_path: Path) -> None:
    (tmp_path / "my/experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {train.steps: '1,x'}}}\n"
    (tmp_path / "my/experiment/two.yaml").write_text(text, encoding="utf-8")
    assert said_of("--config-dir=my", "experiment=two") == ""  # its jobs are read as they run
