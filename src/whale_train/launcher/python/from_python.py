"""Offer the command's modes as functions for Python programs (docs/adr/073).

A call does the same as the command, in this process and thread; ranks run in processes of their
own. A refused request raises ConfigError or PlanError, and a failed run raises LaunchError, each
with the text that the command prints. Ctrl-C raises KeyboardInterrupt once no process is left.

In the main thread, Ctrl-C, SIGTERM and SIGUSR1 are handled as by the command during a call, and by
the caller's handlers after it. In any other thread no signal is handled, since Python runs handlers
in the main thread alone: such a run ends by itself, or with this process.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from threading import RLock
from typing import Any

from rich.console import Console

from whale_train.config import AUTO, Mode, Request, in_mode
from whale_train.errors import ConfigError, Fault, LaunchError, RequestError
from whale_train.launcher.compose.in_python import RUN_DIR, composed_request
from whale_train.launcher.job import ELSEWHERE, JobPlace, carry_out, discard, with_inputs
from whale_train.launcher.job_end import JobEnd, summary_of
from whale_train.launcher.planning.plan_request import resolve_request
from whale_train.launcher.python.overrides import overrides_of
from whale_train.launcher.python.results import (
    EvaluateResult,
    PredictResult,
    ShownPlan,
    TrainResult,
    VerifyResult,
)
from whale_train.launcher.ranks.rank_env import place_from_environment
from whale_train.launcher.ui.show_error import error_text
from whale_train.launcher.ui.terminal import open_console

Asked = str | Mapping[str, Any]
Folder = str | os.PathLike[str]
# Hydra, the default dtype and the environment are global, so calls of several threads take turns.
_TURN = RLock()


def compose(
    *asked: Asked,
    config_dir: Folder | None = None,
    config_name: str | None = None,
    **nested: Any,
) -> Request:
    """Return the request that overrides make: `compose("strategy=zero3", train={"steps": 5})`.

    asked: overrides as on the command line, or mappings of keys to values.
    config_dir, config_name: the values of the command's flags `--config-dir` and `--config-name`.
    nested: values by key. A mapping sets each of its keys.

    Raises ConfigError with all faults.
    """
    with _TURN:
        composed = composed_request(_arguments(asked, nested, config_dir, config_name))
    if composed.names_dir:
        rule, remedy = "has no effect on compose()", "give it to train() or verify(), as run_dir="
        raise ConfigError([Fault(RUN_DIR, str(composed.run_dir), rule, remedy)])
    return composed.request


def plan(
    *asked: Request | Asked,
    verbose: bool = False,
    config_dir: Folder | None = None,
    config_name: str | None = None,
    **nested: Any,
) -> ShownPlan:
    """Return the plan of a request, or of overrides as `compose` takes them.

    verbose: whether the progress of long preparations is printed.

    Nothing is started or written. Raises ConfigError or PlanError where the request is refused.
    """
    with _TURN:
        given = _given(asked, nested, config_dir, config_name)
        request, _ = _request("plan", given, None)
        without_effect = (
            ("compare", bool(request.compare), "call it for each of the strategies"),
            ("rehearse", request.rehearse is not False, "use whale-train mode=rehearse"),
        )
        rule = "has no effect on plan()"
        faults = [Fault(key, "", rule, said) for key, is_set, said in without_effect if is_set]
        if faults:
            raise ConfigError(faults)
        with _here():
            request = with_inputs(request, _console(verbose))
            return ShownPlan.of(resolve_request(request), request.names)


def train(
    *asked: Request | Asked,
    run_dir: Folder | None = None,
    verbose: bool = False,
    config_dir: Folder | None = None,
    config_name: str | None = None,
    **nested: Any,
) -> TrainResult:
    """Train by a request, or by overrides as `compose` takes them, and return the result.

    run_dir: the run directory; None creates one as the command does, `runs/DATE/TIME-xxxxxx`.
    verbose: whether the plan and the progress are printed.

    Raises ConfigError or PlanError where the request is refused, LaunchError with the traceback of
    the first failing rank where the run fails, and KeyboardInterrupt where it is interrupted.
    """
    given = _given(asked, nested, config_dir, config_name)
    end = _carried_out("train", given, run_dir, verbose)
    folder = end.run_dir.absolute()
    was_done = not end.summary and (folder / "summary.json").exists()  # before this call
    return TrainResult(folder, summary_of(folder) if was_done else end.summary)


def verify(
    *asked: Request | Asked,
    run_dir: Folder | None = None,
    verbose: bool = False,
    config_dir: Folder | None = None,
    config_name: str | None = None,
    **nested: Any,
) -> VerifyResult:
    """Compare the first steps under the plan with the same steps on one process.

    The arguments and exceptions are those of `train`. A plan whose steps differ raises no
    exception: `equal` of the result is then False.
    """
    given = _given(asked, nested, config_dir, config_name)
    end = _carried_out("verify", given, run_dir, verbose)
    assert end.verification is not None
    return VerifyResult(end.run_dir.absolute(), end.verification)


def evaluate(
    path: Folder,
    *asked: Asked,
    run_dir: Folder | None = None,
    verbose: bool = False,
    config_dir: Folder | None = None,
    config_name: str | None = None,
    **nested: Any,
) -> EvaluateResult:
    """Evaluate a trained model on named sets of samples, under any plan.

    path: a run directory, a checkpoint's folder, or the `model/` of a run that is done.
    asked: overrides as `compose` takes them. Model, data and metrics are the run's, unless an
        override names them.

    The other arguments and the exceptions are those of `train`.
    """
    arguments = _arguments([{"path": path}, *asked], nested, config_dir, config_name)
    end = _carried_out("evaluate", arguments, run_dir, verbose)
    return EvaluateResult(end.run_dir.absolute(), end.summary["evaluation"])


def predict(
    path: Folder,
    *asked: Asked,
    run_dir: Folder | None = None,
    verbose: bool = False,
    config_dir: Folder | None = None,
    config_name: str | None = None,
    **nested: Any,
) -> PredictResult:
    """Write a trained model's predictions for every sample of named sets, under any plan.

    The arguments and exceptions are those of `evaluate`.
    """
    arguments = _arguments([{"path": path}, *asked], nested, config_dir, config_name)
    end = _carried_out("predict", arguments, run_dir, verbose)
    folder = end.run_dir.absolute()
    predictions = end.summary["predictions"]
    return PredictResult(folder, {name: folder / x["file"] for name, x in predictions.items()})


def _given(
    asked: tuple[Request | Asked, ...],
    nested: Mapping[str, Any],
    config_dir: Folder | None,
    config_name: str | None,
) -> Request | list[str]:
    """Return the request among a function's arguments or, without one, the equivalent command-line
    arguments.

    Raises TypeError for overrides together with a request.
    """
    overrides = [item for item in asked if not isinstance(item, Request)]
    if len(overrides) == len(asked):
        return _arguments(overrides, nested, config_dir, config_name)
    if len(asked) > 1 or nested or config_dir is not None or config_name is not None:
        raise TypeError("a Request has all overrides in it: give none beside it")
    request = asked[0]
    assert isinstance(request, Request)
    return request


def _arguments(
    asked: Sequence[Asked],
    nested: Mapping[str, Any],
    config_dir: Folder | None,
    config_name: str | None,
) -> list[str]:
    """Return the command-line arguments that are equivalent to a function's arguments."""
    flags = [f"--config-dir={os.fspath(config_dir)}"] if config_dir is not None else []
    flags += [f"--config-name={config_name}"] if config_name is not None else []
    return [*overrides_of(asked, nested), *flags]


def _request(
    mode: Mode, given: Request | list[str], run_dir: Folder | None
) -> tuple[Request, Path]:
    """Return the request in `mode` and the path of its run directory, both checked.

    given: the request, or command-line arguments.
    run_dir: the run directory; None lets the config name it.

    Raises ConfigError where the request or the directory is refused.
    """
    named = overrides_of((), {} if run_dir is None else {RUN_DIR: run_dir})
    if isinstance(given, Request):
        if given.mode not in ("train", mode):
            raise ConfigError([_other_mode(mode, given.mode)])
        goes_on = [f"train.resume={AUTO}"] if given.train.resume == AUTO else []
        return in_mode(given, mode), composed_request([*named, *goes_on]).run_dir
    asks = any(text.startswith("mode=") for text in given)
    composed = composed_request([*named, *([] if asks else [f"mode={mode}"]), *given])
    if composed.request.mode != mode:
        raise ConfigError([_other_mode(mode, composed.request.mode)])
    if mode == "plan" and composed.names_dir:
        fault = Fault(RUN_DIR, str(composed.run_dir), "has no effect on plan()", "leave it out")
        raise ConfigError([fault])
    return composed.request, composed.run_dir


def _other_mode(mode: Mode, given: Mode) -> Fault:
    """Return the fault of a request in the mode `given`, for the function of the mode `mode`."""
    is_function = given in ("train", "plan", "verify", "evaluate", "predict")
    remedy = f"leave it out, or call {given}()" if is_function else f"use whale-train mode={given}"
    return Fault("mode", given, f"is not what {mode}() does", remedy)


def _carried_out(
    mode: Mode, given: Request | list[str], run_dir: Folder | None, verbose: bool
) -> JobEnd:
    """Carry out a job in `mode` and return the end of the job, which has a result. Raises the
    exceptions of `train`."""
    with _TURN:
        request, folder = _request(mode, given, run_dir)
        _refuse_other_starters(request)
        arguments = () if isinstance(given, Request) else given
        place = JobPlace(_console(verbose), arguments)
        with _here():
            folder.mkdir(parents=True, exist_ok=True)
            try:
                end = carry_out(request, folder, place)
            except RequestError as error:
                discard(folder, error)
                raise
    if end.verification is not None or end.status == "done":
        return end
    if end.status == "interrupted":
        raise KeyboardInterrupt(end.said)
    failure = LaunchError(end.said)
    if end.refusal is not None:
        failure.add_note(error_text(end.refusal))
    raise failure


def _refuse_other_starters(request: Request) -> None:
    """Raise ConfigError where ranks are started by another program, or on other hosts."""
    if request.launcher.kind in ELSEWHERE:
        rule, remedy = "starts ranks by the command", "run whale-train with it"
        raise ConfigError([Fault("launcher", request.launcher.kind, rule, remedy)])
    if place_from_environment(os.environ) is not None:
        rule = "says that ranks were started from outside, each of which would start all of a job"
        remedy = "run whale-train under torchrun or srun, and the program without"
        raise ConfigError([Fault("RANK", os.environ.get("RANK", ""), rule, remedy)])


@contextmanager
def _here() -> Iterator[None]:
    """Separate the caller's state from ours within the context."""
    from whale_train.launcher.python.caller import caller_kept, ranks_environment  # imports torch

    with caller_kept(), ranks_environment():
        yield


def _console(verbose: bool) -> Console:
    """Return the console of standard output if `verbose`, else a console that prints nothing."""
    return open_console(sys.stdout) if verbose else Console(file=StringIO(), quiet=True)
