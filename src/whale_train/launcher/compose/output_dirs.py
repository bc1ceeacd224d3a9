"""Check the directories of a run or a sweep before Hydra makes them."""

import os
import tempfile
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from whale_train.config import AUTO, GOING_ON
from whale_train.errors import Fault, shortened
from whale_train.launcher.ranks.run_dir import taken_by

# The longest path below a run directory: checkpoints/step_N/optimizer/..., logs/...
_INSIDE_BYTES = 256
_NAME_BYTES, _PATH_BYTES = 255, 4096  # NAME_MAX and PATH_MAX of limits.h, the NUL included


def run_dir_faults(config: DictConfig, job: int | None) -> list[Fault]:
    """Return the faults of the directories that Hydra will make.

    config: the composed config, with Hydra's own part.
    job: the number of the job in a sweep; None for a single run.

    A directory that holds a run is a fault unless `train.resume=auto`.
    """
    key = "hydra.run.dir" if job is None else "hydra.sweep.dir"
    HydraConfig.instance().set_config(config)
    try:
        if job is None:
            shown = str(config.hydra.run.dir)
        else:
            with read_write(config.hydra.job), open_dict(config.hydra.job):
                config.hydra.job.num = job
            shown = os.path.join(str(config.hydra.sweep.dir), str(config.hydra.sweep.subdir))
        inside = config.hydra.output_subdir
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return [Fault(key, "", f"cannot be resolved ({reason})", "correct its ${...}")]
    if "://" in shown:
        rule = "is a URL, and a run writes into a folder"
        remedy = "name a folder of this machine, and have the checkpoints copied there by "
        remedy += f"checkpoint.to={shortened(shown)}"
        return [Fault(key, shortened(shown), rule, remedy)]
    path = Path(shown).absolute()
    faults = _path_faults(path, key, shown)
    can_go_on = OmegaConf.select(config, "mode") in GOING_ON
    taken = taken_by(path, key, shown, can_go_on=can_go_on)
    if not faults and taken is not None:
        faults = [taken] if OmegaConf.select(config, "train.resume") != AUTO else []
        if faults:
            return faults
    faults = faults or _unwritable(path, key, shown)
    if not faults and inside is not None:
        key = "hydra.output_subdir"
        faults = _path_faults(path / str(inside), key, str(inside))
        faults = faults or _unwritable(path / str(inside), key, str(inside))
    return faults


def _path_faults(path: Path, key: str, shown: str) -> list[Fault]:
    """Return the fault of a path that no system call accepts: it has a NUL, is not UTF-8, or is too
    long."""
    rule = ""
    try:
        encoded = os.fsencode(path)
    except UnicodeError:
        return [Fault(key, ascii(shortened(shown)), "is no text", "name a directory in UTF-8")]
    longest = max((len(name) for name in encoded.split(b"/")), default=0)
    if "\0" in shown:
        rule = "has a NUL, which no path has"
    elif longest > _NAME_BYTES:
        rule = f"has a name of {longest:,} bytes, and at most {_NAME_BYTES} are one"
    elif len(encoded) > _PATH_BYTES - _INSIDE_BYTES:
        most = _PATH_BYTES - _INSIDE_BYTES
        rule = f"is a path of {len(encoded):,} bytes, and those inside a run have at most {most:,}"
    value = shortened(shown.replace("\0", "\\0"))
    return [Fault(key, value, rule, "name a directory by a shorter path")] if rule else []


def _unwritable(path: Path, key: str, shown: str) -> list[Fault]:
    """Return the fault of a directory that cannot be made or written to."""
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing):
            return []
    except OSError as error:
        rule = f"cannot be made a run directory ({error.strerror})"
        return [Fault(key, shortened(shown), rule, "name a directory that can be written")]
