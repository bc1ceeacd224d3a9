"""Which checkpoint a run goes on from, and whether it can.

Files are checked here, every byte, and what they hold is compared with the request, so that a run
that cannot go on is refused before any rank starts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from whale_train.checkpoint_files import (
    CHECKPOINTS,
    BrokenCheckpoint,
    Manifest,
    check,
    checkpoints_in,
    stored_tensors,
    whole_shape,
)
from whale_train.config import AUTO, OptimizerOptions, Request
from whale_train.errors import ConfigError, Fault, listed
from whale_train.models.options import ModelOptions
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.validation import as_yaml

KEY = "train.resume"


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


def refuse_other_run(found: Resumed, request: Request) -> None:
    """Raise ConfigError where the checkpoint's run had other data, or an optimizer with another
    state. Another plan, precision, learning rate, number of steps or global batch is all right:
    each is a matter of the steps that follow."""
    saved = saved_request(found)
    faults = []
    if request.model.share_layers and not saved.model.share_layers:
        rule = f"is not so of {request.train.resume}, whose layers have weights of their own"
        faults.append(Fault("model.share_layers", "true", rule, "use false"))
    kinds = [_kind(options) for options in (saved.optimizer, request.optimizer)]
    if kinds[0] != kinds[1]:
        rule = f"has no state in {request.train.resume}, which was saved with {kinds[0]}"
        remedy = f"use optimizer={saved.optimizer.name}"
        faults.append(Fault("optimizer", kinds[1], rule, remedy))
    before, now = (_order_of_data(x) for x in (saved, request))
    for key, value in before.items():
        if now.get(key) != value:
            rule = f"is not that of {request.train.resume}, which has seen a part of other data"
            given = as_yaml(now.get(key))
            faults.append(Fault(key, given, rule, f"use {key}={as_yaml(value)}"))
    if faults:
        raise ConfigError(faults)


def phase_of(request: Request, found: Resumed | None) -> Request:
    """Return the request of what comes next of a run: where its layers share their weights for a
    time, with shared layers, or from a checkpoint on at which they part with layers of their
    own."""
    if not request.is_pseudo or found is None:
        return request
    state = json.loads((found.path / "state.json").read_text(encoding="utf-8"))
    at = request.train.delink_at
    due = state.get("delinks", False) or (isinstance(at, int) and found.step >= at)
    if not due and saved_request(found).model.share_layers:
        return request
    model = request.model.model_copy(update={"share_layers": False})
    return request.model_copy(update={"model": model})


def delinks(found: Resumed | None, request: Request) -> bool:
    """Return whether the layers of `request` are those of a checkpoint in which they are shared,
    and part."""
    shared = found is not None and saved_request(found).model.share_layers
    return shared and not request.model.share_layers


def saved_request(found: Resumed) -> Request:
    return Request.from_json((found.path / "request.json").read_text(encoding="utf-8"))


def _order_of_data(request: Request) -> dict[str, Any]:
    """Return what says which samples a run sees in which order, by key; where they are kept may
    change."""
    options = request.data.model_dump()
    return {
        "seed": request.seed,
        **{f"data.{key}": value for key, value in options.items() if key != "path"},
    }


def _kind(options: OptimizerOptions) -> str:
    """Return what the optimizer's state is of: a run may go on with another of the kind."""
    if options.name == "sgd":
        return "sgd with momentum" if options.momentum else "sgd without momentum"
    return "adam, adamw or lamb"


def refuse_other_size(checkpoint: Path, num_samples: int) -> None:
    """Raise ConfigError where the data has another number of samples than the checkpoint's run had:
    which of them it has seen is not known."""
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    before = state.get("num_samples", num_samples)  # which earlier checkpoints do not say
    if before != num_samples:
        rule = f"has seen a part of {before:,} samples, and the data has {num_samples:,}"
        remedy = "use the data as it was, or begin anew with the weights of mode=export"
        raise ConfigError([Fault(KEY, str(checkpoint), rule, remedy)])


def refuse_other_model(
    checkpoint: Path, profile: ModelProfile, parting: ModelOptions | None = None
) -> None:
    """Raise ConfigError where the checkpoint lacks parameters of the model, or has them in other
    shapes. Layers of a model that is `parting` have what the checkpoint has of the first."""
    saved = {name: whole_shape(x) for name, x in stored_tensors(checkpoint / "model").items()}
    if parting is not None:
        from whale_train.models.export.export import model_on_meta
        from whale_train.models.shared_layers import shared_places

        places = shared_places(model_on_meta(parting))
        saved |= {name: saved[first] for name, first in places.items() if first in saved}
    ours = {parameter.path: parameter.shape for parameter in profile.parameters}
    missing = [name for name, shape in ours.items() if name not in saved and 0 not in shape]
    unlike = [
        f"{name} ({_size(saved[name])}, and here {_size(shape)})"
        for name, shape in ours.items()
        if name in saved and saved[name] != tuple(shape)
    ]
    faults = []
    for names, rule in ((missing, "has no"), (unlike, "has another shape of")):
        if names:
            remedy = "train the model that it was saved of"
            faults.append(Fault(KEY, str(checkpoint), f"{rule} {listed(names)}", remedy))
    if faults:
        raise ConfigError(faults)


def _size(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
