"""Make a tracker from its options, importing its package."""

import os

from whale_train.own_code import importable, made_object
from whale_train.trackers.options import (
    BuiltIn,
    MlflowOptions,
    OwnTrackerOptions,
    TensorBoardOptions,
    WandbOptions,
)
from whale_train.trackers.tracker import TRACKER, Tracker


def make_tracker(options: BuiltIn | OwnTrackerOptions, key: str) -> Tracker:
    """Return the tracker of `options`, not opened yet.

    `key` is the entry of the config, such as `trackers[0]`, for messages. Raises ConfigError where
    a tracker of the user's own cannot be imported, is not a tracker or does not take its arguments,
    and ImportError where the package of a built-in one is missing.
    """
    if isinstance(options, OwnTrackerOptions):
        return _own(options, key)
    if isinstance(options, TensorBoardOptions):
        from whale_train.trackers.tensorboard_events import TensorBoardTracker

        return TensorBoardTracker()
    if isinstance(options, MlflowOptions):
        # MLflow reads the variable when it is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from whale_train.trackers.mlflow_runs import MlflowTracker

        return MlflowTracker(options)
    if isinstance(options, WandbOptions):
        from whale_train.trackers.wandb_segments import WandbTracker

        return WandbTracker(options)
    from whale_train.trackers.trackio_rows import TrackioTracker

    return TrackioTracker(options)


def _own(options: OwnTrackerOptions, key: str) -> Tracker:
    with importable(os.getcwd()):
        tracker: Tracker = made_object(key, options.target, options.arguments, TRACKER)
    return tracker
