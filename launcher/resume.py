"""Which checkpoint a run goes on from, and whether it can.

Files are checked here, every byte; what they hold is compared with the request in `going_on.py`. A
run that cannot go on is refused before any rank starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from whale_train.checkpoints.checkpoint_files import CHECKPOINTS, Manifest, check, checkpoints_in
from whale_train.checkpoints.checkpoint_state import STATE, CheckpointState
from whale_train.checkpoints.safetensors_files import BrokenCheckpoint, read_text
from whale_train.config import AUTO, Request
from whale_train.data.fingerprint import Fingerprint
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.going_on import (
    KEY,
    GoingOn,
    broken,
    compared_data,
    compared_model,
    refuse_other_run,
)
from whale_train.strategies.plan.plan import Plan


@dataclass(frozen=True)
class Resumed:
    """A whole checkpoint, `step` steps into a run, and what the user is to be told of others."""

    path: Path
    manifest: Manifest
    broken: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.manifest.step


def find_checkpoint(wanted: str, run_dir: Path) -> Resumed | None:
    """Return the checkpoint that `train.resume` asks for: of `auto` the newest whole one of this
    run directory, None where it has none; else `checkpoint_at` that path. Raises ConfigError where
    there is none."""
    if wanted != AUTO:
        return checkpoint_at(wanted, KEY)
    there = checkpoints_in(run_dir / CHECKPOINTS)
    return _newest(there, "this run's directory", wanted, KEY) if there else None


def checkpoint_at(wanted: str, key: str) -> Resumed:
    """Return the newest whole checkpoint of a run directory or a folder of checkpoints, or the
    checkpoint of that path; `key` has asked for it. Raises ConfigError where there is none."""
    path = Path(wanted)
    if not path.is_dir():
        remedy = "name a run directory or a checkpoint in one, as runs/MY_RUN/checkpoints/step_100"
        raise ConfigError([Fault(key, wanted, "is not a folder", remedy)])
    within = [*checkpoints_in(path / CHECKPOINTS), *checkpoints_in(path)]
    if within:
        return _newest(within, wanted, wanted, key)
    try:
        return Resumed(path, check(path))
    except BrokenCheckpoint as error:
        rule = f"is no whole checkpoint: {error}"
        raise ConfigError([Fault(key, wanted, rule, "name another")]) from None


def _newest(checkpoints: Sequence[Path], where: str, wanted: str, key: str) -> Resumed:
    """Return the first of `checkpoints`, of which there are some, that is whole. Raises ConfigError
    where none is."""
    broken: list[str] = []
    for path in checkpoints:
        try:
            return Resumed(path, check(path), tuple(broken))
        except BrokenCheckpoint as error:
            broken.append(str(error))
    faults = [
        Fault(key, wanted, f"finds no whole checkpoint in {where}: {said}", "remove it")
        for said in broken
    ]
    raise ConfigError(faults)


def say_passed_over(found: Resumed, console: Console) -> None:
    """Warn of the checkpoints that are newer than the one found, and not whole."""
    for why in found.broken:
        said = f"warning: a checkpoint is passed over: {why}"
        console.print(Text(said, style="yellow"), soft_wrap=True)


def say_resumed(found: Resumed | None, request: Request, console: Console) -> None:
    """Tell the user where the run goes on, and which checkpoints were passed over."""
    if found is None:
        console.print(f"{KEY}={request.train.resume}: there is no checkpoint yet; from step 0")
        return
    say_passed_over(found, console)
    ending = ", which is the end" if found.step >= request.train.steps else ""
    said = f"going on after step {found.step}, from {found.path}{ending}"
    console.print(Text(said), soft_wrap=True)


def refuse_unlike(found: Resumed, request: Request) -> None:
    """Raise ConfigError where what a checkpoint says of its run keeps `request` from going on."""
    named = request.train.resume or str(found.path)
    refuse_other_run(saved_request(found), saved_state(found), request, named)


def go_on(
    found: Resumed,
    request: Request,
    plan: Plan,
    num_samples: int,
    data: Fingerprint | None,
    *,
    parts: bool = False,
) -> GoingOn:
    """Return how a run goes on from a checkpoint under a plan, with `data` of `num_samples`
    samples; its layers part if it `parts`. Raises ConfigError where it cannot."""
    said = compared_model(found.path, request.model, plan, request.optimizer, parts)
    state, saved = saved_state(found), saved_request(found)
    of_data = compared_data(found.path, state, saved, request, num_samples, data)
    return replace(of_data, decisions=(*said, *of_data.decisions))


def saved_state(found: Resumed) -> CheckpointState:
    """Return what `state.json` of a checkpoint says. Raises ConfigError."""
    try:
        state = CheckpointState.read(found.path)
        if state.step != found.step:
            rule = f"{found.path / STATE} is of step {state.step:,}, and its manifest of "
            raise BrokenCheckpoint(f"{rule}{found.step:,}")
    except BrokenCheckpoint as error:
        raise ConfigError([broken(found.path, error)]) from None
    return state


def saved_request(found: Resumed) -> Request:
    """Return what the run of a checkpoint was asked for. Raises ConfigError."""
    path = found.path / "request.json"
    try:
        return Request.from_json(read_text(path))
    except BrokenCheckpoint as error:
        raise ConfigError([broken(found.path, error)]) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        said = BrokenCheckpoint(f"{path} is no request ({str(error).splitlines()[0]})")
        raise ConfigError([broken(found.path, said)]) from None


def phase_of(request: Request, found: Resumed | None) -> Request:
    """Return the request of what comes next of a run: where its layers share their weights for a
    time, with shared layers, or from a checkpoint on at which they part with layers of their
    own."""
    if not request.is_pseudo or found is None:
        return request
    at = request.train.delink_at
    due = saved_state(found).delinks or (isinstance(at, int) and found.step >= at)
    if not due and saved_request(found).model.share_layers:
        return request
    model = request.model.model_copy(update={"share_layers": False})
    return request.model_copy(update={"model": model})


def delinks(found: Resumed | None, request: Request) -> bool:
    """Return whether the layers of `request` are those of a checkpoint in which they are shared,
    and part."""
    shared = found is not None and saved_request(found).model.share_layers
    return shared and not request.model.share_layers
