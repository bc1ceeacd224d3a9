"""Return the profile of a request's model: measured, or cached from an earlier plan.

This file owns the cache, a folder with one file for each profile. The file name is a key of all
that determines the profile (`models/profile/cache_key.py`). Nothing depends on the cache: a damaged
profile is measured again, and a folder that cannot be written stays empty.
"""

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from traceback import walk_tb

import numpy as np

from whale_train.config import Request
from whale_train.data.dataset import Dataset
from whale_train.errors import ConfigError, Fault, RequestError
from whale_train.models.profile.cache_key import profile_key
from whale_train.strategies.graph.operation_graph import ModelProfile
from whale_train.strategies.graph.profile_json import profile_from_json, profile_to_json
from whale_train.user_cache import user_cache

MOST_KEPT = 64
MOST_BYTES = 512_000_000  # the largest profile; a model of 126 blocks and 405 B parameters has 5 MB


def profile_of(request: Request, dataset: Dataset) -> ModelProfile:
    """Return the profile of the request's model. Raises ConfigError where the model cannot be
    built, or its forward raises an exception."""
    key = _key(request, dataset)
    cached = kept_profile(key) if key else None
    if cached is not None:
        return cached
    profile = _measured(request, dataset)
    # Only a model with a graph is cached, and only if nothing in the key changed meanwhile.
    if key and profile.graph is not None and key == _key(request, dataset):
        keep_profile(key, profile)
    return profile


def _key(request: Request, dataset: Dataset) -> str | None:
    """Return the cache key of the request's profile; None for a model whose profile may depend on
    more than the key covers."""
    return profile_key(request.model, dataset.fields, by_folding=_by_folding(request))


def _by_folding(request: Request) -> bool:
    """Return whether the profile may be measured on a few of the model's equal blocks, since the
    plan is not run."""
    return request.mode == "plan"


def _measured(request: Request, dataset: Dataset) -> ModelProfile:
    """Measure the profile of the request's model and return it. Raises ConfigError as
    `profile_of`."""
    # Torch is imported here and not before: a request that is wrong is answered at once.
    is_first = "torch" not in sys.modules
    from whale_train.models.fp32_precision import compute_fp32
    from whale_train.models.loss_module import LossModule
    from whale_train.models.profile.measure import profile_model

    if is_first:  # no code of the user's ran before, so no existing object holds a user's generator
        gc.freeze()
    compute_fp32(in_tf32=request.train.tf32)
    try:
        with quiet_exports():
            return profile_model(
                request.model,
                request.model.class_name,
                dataset.fields,
                lambda count: dataset.samples(np.arange(min(count, dataset.num_samples))),
                by_folding=_by_folding(request),
            )
    except RequestError:
        raise
    except Exception as error:
        running = {frame.f_code for frame, _ in walk_tb(error.__traceback__)}
        if LossModule._loss_of.__code__ not in running:
            raise
        if request.model.architecture is not None and isinstance(error, AttributeError):
            kind = type(error.obj).__name__
            if error.name and kind.endswith("Config"):
                rule = (
                    f"has no {error.name}, which {request.model.architecture} reads of its {kind}"
                )
                remedy = f"write model.config.{error.name}=VALUE"
                raise ConfigError([Fault("model.config", "", rule, remedy)]) from error
        said = " ".join(f"{type(error).__name__}: {error}".split())
        rule = f"fails on a batch of data={request.names.get('data', '')} ({said})"
        remedy = "correct its forward or its arguments, or use other data"
        fault = Fault("model", request.names.get("model", ""), rule, remedy)
        raise ConfigError([fault]) from error


@contextmanager
def quiet_exports() -> Iterator[None]:
    """Suppress, within the context, the errors that torch logs and prints about code that it cannot
    trace."""
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.ERROR))
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(disabled)


def profiles_folder() -> Path:
    """Return the folder of cached profiles, in $WHALE_TRAIN_CACHE or in the user's cache."""
    return user_cache("profiles")


def kept_profile(key: str) -> ModelProfile | None:
    """Return the cached profile of a key; None where the cache has no readable profile of it."""
    path = profiles_folder() / f"{key}.json"
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"has more than {MOST_BYTES:,} bytes")
        profile = profile_from_json(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError as error:
        said = f"note: {path} {error}; the model is measured again"
        sys.stderr.write(said + "\n")
        return None
    with suppress(OSError):  # the folder may be read-only
        os.utime(path)  # the time of the last use, by which `keep_profile` removes profiles
    return profile


def keep_profile(key: str, profile: ModelProfile) -> None:
    """Write a profile into the cache, then remove the least recently used profiles beyond
    MOST_KEPT."""
    with suppress(OSError):
        profiles_folder().mkdir(parents=True, exist_ok=True)
        # Readers see the whole file or none, since it is renamed only when it is complete.
        handle, path = tempfile.mkstemp(suffix=".json", dir=profiles_folder())
        with open(handle, "w", encoding="utf-8") as file:
            file.write(profile_to_json(profile))
        os.replace(path, profiles_folder() / f"{key}.json")
        _remove_oldest()


def _remove_oldest() -> None:
    """Remove all but the MOST_KEPT profiles that were used most recently."""
    ages = {}
    for path in profiles_folder().glob("*.json"):
        with suppress(OSError):  # another process removed it
            ages[path] = path.stat().st_mtime
    for path in sorted(ages, key=lambda path: ages[path])[:-MOST_KEPT]:
        path.unlink(missing_ok=True)
