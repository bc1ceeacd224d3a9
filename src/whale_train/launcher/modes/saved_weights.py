"""Find the weights that `mode=evaluate` and `mode=predict` read: a checkpoint's, or the final
weights of a run."""

from dataclasses import dataclass

from whale_train.checkpoints.checkpoint_files import MODEL
from whale_train.checkpoints.safetensors_files import BrokenCheckpoint, read_json, read_text
from whale_train.checkpoints.url_path import Place, StoreError, place_of
from whale_train.config import Request
from whale_train.data.fingerprint import Fingerprint
from whale_train.errors import ConfigError, Fault
from whale_train.launcher.resume import (
    Resumed,
    checkpoint_at,
    checkpoints_within,
    saved_request,
    saved_state,
)

KEY = "path"
SUMMARY = "summary.json"  # of a run that has ended


@dataclass(frozen=True)
class SavedWeights:
    """Weights that a run has saved.

    path: the checkpoint, or the folder of the run's final weights.
    request: the request of the run.
    step: number of steps after which the weights were saved.
    is_final: whether these are a run's final weights: stored without the rest of a checkpoint,
        under the names that other programs use.
    data: fingerprint of the training data; None where it is not known.
    broken: one message for each newer checkpoint that is broken.
    """

    path: Place
    request: Request
    step: int
    is_final: bool
    data: Fingerprint | None
    broken: tuple[str, ...] = ()

    @classmethod
    def of(cls, checkpoint: Resumed) -> "SavedWeights":
        """Return the weights of a checkpoint. Raises ConfigError where the checkpoint cannot be
        read."""
        state = saved_state(checkpoint)
        request = saved_request(checkpoint)
        saved = (checkpoint.path, request, checkpoint.step)
        return cls(*saved, False, state.data, checkpoint.broken)

    @property
    def folder(self) -> Place:
        """Return the folder of the weight files."""
        return self.path if self.is_final else self.path / MODEL


def weights_at(wanted: str) -> SavedWeights:
    """Return the weights at a path or a URL: a checkpoint, a run directory, or a run's `model/`.

    A run directory stands for its newest checkpoint, or for the run's final weights if it has no
    checkpoint. Raises ConfigError where no whole weights are found.
    """
    path = place_of(wanted)
    try:
        if path.name == MODEL and (path.parent / SUMMARY).exists():
            return _final(path.parent, wanted)
        if not checkpoints_within(path) and (path / MODEL).is_dir() and (path / SUMMARY).exists():
            return _final(path, wanted)
    except StoreError as error:
        rule, remedy = f"cannot be read ({error})", "see that it can"
        raise ConfigError([Fault(KEY, wanted, rule, remedy)]) from None
    return SavedWeights.of(checkpoint_at(wanted, KEY))


def _final(run_dir: Place, wanted: str) -> SavedWeights:
    """Return the final weights of a run. Raises ConfigError where the run's record cannot be read,
    and where the weights are adapters alone."""
    try:
        request = Request.from_json(read_text(run_dir / "request.json"))
        summary = read_json(run_dir / SUMMARY)
        is_best = request.checkpoint.final == "best" and "best" in summary
        step = int(summary["best"]["step"] if is_best else summary["steps"])
    except (BrokenCheckpoint, ValueError, TypeError, KeyError) as error:
        rule = f"has a {MODEL}/ and no record of its run ({str(error).splitlines()[0]})"
        raise ConfigError([Fault(KEY, wanted, rule, "name another")]) from None
    if request.model.adapters is not None:
        rule = f"has a {MODEL}/ of additions alone, and no checkpoint"
        raise ConfigError([Fault(KEY, wanted, rule, "train with checkpoint.every=STEPS")])
    return SavedWeights(run_dir / MODEL, request, step, True, None)
