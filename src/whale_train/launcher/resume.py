"""Find the checkpoint that a run continues from, and check whether the run can continue.

This file checks every byte of the checkpoint's files; `going_on.py` compares the content with the
request. A run that cannot continue is refused before any rank starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from whale_train.checkpoints.checkpoint_files import (
    CHECKPOINTS,
    MANIFEST,
    MODEL,
    Manifest,
    check,
    checkpoints_in,
)
from whale_train.checkpoints.checkpoint_state import STATE, CheckpointState
from whale_train.checkpoints.safetensors_files import BrokenCheckpoint, read_text
from whale_train.checkpoints.url_path import Place, StoreError, UrlPath, place_of
from whale_train.config import AUTO, Request
from whale_train.data.fingerprint import Fingerprint
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.going_on import (
    KEY,
    GoingOn,
    broken,
    compared_data,
    compared_model,
    refuse_lost_place,
    refuse_other_run,
)
from whale_train.launcher.ranks.run_dir import LOGS
from whale_train.strategies.plan.plan import Plan

_NAME_ONE = "name a run directory or a checkpoint in one, as runs/MY_RUN/checkpoints/step_100"


@dataclass(frozen=True)
class Resumed:
    """A whole checkpoint from which a run continues.

    path: the checkpoint's folder, on this machine or in a store.
    manifest: the checkpoint's list of files.
    broken: one message for the user on each newer checkpoint that is broken.
    """

    path: Place
    manifest: Manifest
    broken: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Return the number of optimizer steps after which the checkpoint was written."""
        return self.manifest.step


def find_checkpoint(wanted: str, run_dir: Path, to: UrlPath | None = None) -> Resumed | None:
    """Return the checkpoint that `train.resume` asks for.

    wanted: the value of `train.resume`. `auto` asks for the newest whole checkpoint in `run_dir`,
        or in `to` if that is newer; any other value is a path or a URL for `checkpoint_at`.
    run_dir: the run directory of this run.
    to: the folder of a store to which the run's checkpoints are copied; None without a store.

    Returns None where `auto` finds no checkpoint. Raises ConfigError where every checkpoint is
    broken, where the path has none, and where the store cannot be read.
    """
    if wanted != AUTO:
        return checkpoint_at(wanted, KEY)
    broken: list[str] = []
    local = _newest(checkpoints_in(run_dir / CHECKPOINTS), broken)
    remote = None
    if to is not None:
        try:
            copies = checkpoints_in(to)
        except StoreError as error:
            rule = f"cannot be read ({error})"
            remedy = "see that it can, or leave it out to go on from this machine's checkpoints"
            raise ConfigError([Fault("checkpoint.to", str(to), rule, remedy)]) from None
        step = -1 if local is None else local.step
        remote = _newest([x for x in copies if _step_of(x) > step], broken)
    if local is None and remote is None and broken:
        raise ConfigError(_all_broken("this run's directory", wanted, KEY, broken))
    return remote or local


def checkpoint_at(wanted: str, key: str) -> Resumed:
    """Return the checkpoint at a path or a URL.

    wanted: a checkpoint, or a run directory or folder of checkpoints. A directory or folder stands
        for its newest whole checkpoint.
    key: the config key whose value `wanted` is, for messages.

    Raises ConfigError where there is no whole checkpoint.
    """
    path = place_of(wanted)
    try:
        if not path.is_dir():
            raise ConfigError([Fault(key, wanted, "is not a folder", _NAME_ONE)])
        if within := checkpoints_within(path):
            broken: list[str] = []
            if (newest := _newest(within, broken)) is not None:
                return newest
            raise ConfigError(_all_broken(wanted, wanted, key, broken))
        if (without := _without_checkpoint(path, wanted, key)) is not None:
            raise ConfigError([without])
    except StoreError as error:
        rule, remedy = f"cannot be read ({error})", "see that it can"
        raise ConfigError([Fault(key, wanted, rule, remedy)]) from None
    try:
        return Resumed(path, check(path))
    except BrokenCheckpoint as error:
        rule = f"is no whole checkpoint: {error}"
        raise ConfigError([Fault(key, wanted, rule, "name another")]) from None


def _without_checkpoint(path: Place, wanted: str, key: str) -> Fault | None:
    """Return the fault of a folder that has no checkpoint within and is none, whole or broken; None
    for any other folder.

    path: the folder.
    wanted: the value of `key`, which names the folder.
    """
    if (path / "request.json").is_file() and (path / LOGS).is_dir():
        rule = "is of a run that saved no checkpoint"
        return Fault(key, wanted, rule, "set checkpoint.every in that run, or name another")
    if any((path / name).exists() for name in (MANIFEST, STATE, MODEL)):
        return None
    return Fault(key, wanted, "has no checkpoint", _NAME_ONE)


def checkpoints_within(path: Place) -> Sequence[Place]:
    """Return the checkpoints in a run directory or a folder of checkpoints, newest first."""
    if isinstance(path, UrlPath):
        return checkpoints_in(path / CHECKPOINTS) or checkpoints_in(path)
    return [*checkpoints_in(path / CHECKPOINTS), *checkpoints_in(path)]


def _step_of(checkpoint: Place) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step_"))


def _newest(checkpoints: Sequence[Place], broken: list[str]) -> Resumed | None:
    """Return the first whole checkpoint among `checkpoints`, or None where none is whole.

    checkpoints: folders of checkpoints, newest first.
    broken: receives a message for each broken checkpoint before the first whole one. A folder of a
        store without a manifest is skipped silently: such a copy is unfinished.
    """
    for path in checkpoints:
        try:
            if isinstance(path, UrlPath) and not (path / MANIFEST).is_file():
                continue
            return Resumed(path, check(path), tuple(broken))
        except BrokenCheckpoint as error:
            broken.append(str(error))
    return None


def _all_broken(where: str, wanted: str, key: str, broken: Sequence[str]) -> list[Fault]:
    """Return the faults of a place without a whole checkpoint.

    where: the place, in words.
    wanted: the value of `key`, which names the place.
    broken: one message for each broken checkpoint.
    """
    if not broken:
        return [Fault(key, wanted, f"finds no whole checkpoint in {where}", "name another")]
    rule = f"finds no whole checkpoint in {where}"
    return [Fault(key, wanted, f"{rule}: {said}", "remove it") for said in broken]


def say_passed_over(broken: Sequence[str], console: Console) -> None:
    """Warn of broken checkpoints that are newer than the one that is read.

    broken: one message for each broken checkpoint.
    """
    for why in broken:
        said = f"warning: a checkpoint is passed over: {why}"
        console.print(Text(said, style="yellow"), soft_wrap=True)


def say_resumed(checkpoint: Resumed | None, request: Request, console: Console) -> None:
    """Print the step after which the run continues, and warn of newer broken checkpoints."""
    if checkpoint is None:
        console.print(f"{KEY}={request.train.resume}: there is no checkpoint yet; from step 0")
        return
    say_passed_over(checkpoint.broken, console)
    ending = ", which is the end" if is_at_end(checkpoint, request) else ""
    said = f"going on after step {checkpoint.step}, from {checkpoint.path}{ending}"
    console.print(Text(said), soft_wrap=True)


def is_at_end(checkpoint: Resumed, request: Request) -> bool:
    """Return whether nothing is left to train after a checkpoint.

    Either all steps are done, or earlier evaluations have ended the run by `train.stop_after`.
    Raises ConfigError where the checkpoint's state cannot be read.
    """
    stop = request.train.stop_after
    if checkpoint.step >= request.train.steps or stop is None:
        return checkpoint.step >= request.train.steps
    watched = saved_state(checkpoint).watched.get("train.stop_after", {})
    return watched.get("metric") == stop.metric and watched["worse"] >= stop.evaluations


def refuse_unlike(checkpoint: Resumed, request: Request) -> None:
    """Raise ConfigError where `request` cannot continue from a checkpoint, judged by the
    checkpoint's request and state alone."""
    named = request.train.resume or str(checkpoint.path)
    refuse_other_run(saved_request(checkpoint), saved_state(checkpoint), request, named)


def go_on(
    checkpoint: Resumed,
    request: Request,
    plan: Plan,
    num_samples: int,
    data: Fingerprint | None,
    *,
    parts: bool = False,
    lost_place: str | None = None,
) -> GoingOn:
    """Compare a checkpoint with the model and the data of a run, and return how the run continues.

    checkpoint: the checkpoint.
    request: the request of the run.
    plan: the plan of the run.
    num_samples: number of training samples in the run's data.
    data: fingerprint of the run's data; None where the data has none.
    parts: whether layers that shared their weights get weights of their own here.
    lost_place: why the run cannot continue a stream, as the end of a sentence; '' where it can, and
        None for data with numbered samples.

    Raises ConfigError where the run cannot continue.
    """
    state, saved = saved_state(checkpoint), saved_request(checkpoint)
    models = (saved.model, request.model)
    model_notes = compared_model(checkpoint.path, *models, plan, request.optimizer, parts)
    of_data = compared_data(checkpoint.path, state, saved, request, num_samples, data)
    if lost_place is not None and not of_data.data_anew:
        refuse_lost_place(checkpoint.path, state, request, lost_place)
    return replace(of_data, decisions=(*model_notes, *of_data.decisions))


def saved_state(checkpoint: Resumed) -> CheckpointState:
    """Return the state in a checkpoint's `state.json`. Raises ConfigError where the file cannot be
    read, or has another step than the manifest."""
    try:
        state = CheckpointState.read(checkpoint.path)
        if state.step != checkpoint.step:
            rule = f"{checkpoint.path / STATE} is of step {state.step:,}, and its manifest of "
            raise BrokenCheckpoint(f"{rule}{checkpoint.step:,}")
    except BrokenCheckpoint as error:
        raise ConfigError([broken(checkpoint.path, error)]) from None
    return state


def saved_request(checkpoint: Resumed) -> Request:
    """Return the request of the run that wrote a checkpoint. Raises ConfigError where the request
    cannot be read."""
    path = checkpoint.path / "request.json"
    try:
        return Request.from_json(read_text(path))
    except BrokenCheckpoint as error:
        raise ConfigError([broken(checkpoint.path, error)]) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said = BrokenCheckpoint(f"{path} is no request ({str(error).splitlines()[0]})")
        raise ConfigError([broken(checkpoint.path, said)]) from None


def phase_of(request: Request, checkpoint: Resumed | None) -> Request:
    """Return the request of the phase that follows a checkpoint, in a run that shares the weights
    of its layers at first.

    The layers are shared up to the checkpoint at which they are delinked, and have weights of their
    own after it. Any other request is returned unchanged.
    """
    if not request.is_pseudo or checkpoint is None:
        return request
    at = request.train.delink_at
    due = saved_state(checkpoint).delinks or (isinstance(at, int) and checkpoint.step >= at)
    if not due and saved_request(checkpoint).model.share_layers:
        return request
    model = request.model.model_copy(update={"share_layers": False})
    return request.model_copy(update={"model": model})


def delinks(checkpoint: Resumed | None, request: Request) -> bool:
    """Return whether shared layers are delinked when `request` continues from a checkpoint: the
    checkpoint's layers share weights, and the request's layers do not."""
    shared = checkpoint is not None and saved_request(checkpoint).model.share_layers
    return shared and not request.model.share_layers
