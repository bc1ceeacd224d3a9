"""The key of a job: the same in all its ranks, another one in all other jobs, known to nobody."""

import os
from pathlib import Path

import pytest

from whale_train.errors import ConfigError
from whale_train.launcher.ranks.job_key import job_key
from whale_train.launcher.ranks.rank_env import job_name

SECRET = "5" * 32
TORCHRUN = {"RANK": "1", "TORCHELASTIC_RUN_ID": "blue"}
SLURM = {"SLURM_PROCID": "1", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"}


def refusal(environment: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        job_key(environment, "a job")
    return str(caught.value)


def test_jobs_and_secrets_have_keys_of_their_own() -> None:
    environments = [
        TORCHRUN,
        TORCHRUN | {"TORCHELASTIC_RUN_ID": "red"},
        SLURM,
        SLURM | {"SLURM_JOB_ID": "13"},
        SLURM | {"SLURM_STEP_ID": "1"},
        SLURM | {"SLURM_RESTART_COUNT": "1"},
    ]
    names = [job_name(environment) for environment in environments]
    keys = {job_key({"WHALE_TRAIN_SECRET": s * 32}, name) for name in names for s in "56"}
    assert len(keys) == 2 * len(environments)


def test_the_ranks_of_a_job_have_one_name() -> None:
    assert job_name(SLURM) == job_name(SLURM | {"SLURM_PROCID": "7", "SLURM_NODEID": "3"})
    # torchrun inside of an allocation: its run id is on all hosts, Slurm's step may be another.
    assert job_name(TORCHRUN | SLURM) == job_name(TORCHRUN)


def test_without_a_secret_of_the_launch_it_is_the_users_own(tmp_path: Path) -> None:
    mine = {"XDG_CONFIG_HOME": str(tmp_path / "mine")}
    other = {"XDG_CONFIG_HOME": str(tmp_path / "other")}
    first = job_key(mine, "a job")
    assert job_key(mine, "a job") == first
    assert job_key(other, "a job") != first
    assert job_key(mine | {"WHALE_TRAIN_SECRET": SECRET}, "a job") != first
    (folder,) = (tmp_path / "mine").iterdir()
    (file,) = folder.iterdir()  # nothing is left beside it
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o077 == 0
    assert file.read_text().strip() not in first


def test_a_secret_that_is_none_is_refused(tmp_path: Path) -> None:
    assert refusal({"WHALE_TRAIN_SECRET": "hunter2"}) == (
        "WHALE_TRAIN_SECRET has 7 characters, and a secret has 32 or more; give every rank the "
        "same one: export WHALE_TRAIN_SECRET=$(openssl rand -hex 32)"
    )
    own = {"XDG_CONFIG_HOME": str(tmp_path)}
    job_key(own, "a job")
    file = tmp_path / "whale-train" / "secret"
    file.chmod(0o644)
    assert "that its owner alone may read" in refusal(own)
    file.unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(SECRET)
    elsewhere.chmod(0o600)
    file.symlink_to(elsewhere)
    assert "cannot be used instead (" in refusal(own)
    (tmp_path / "a file").write_text("")
    assert "cannot be used instead (Not a directory)" in refusal(
        {"XDG_CONFIG_HOME": str(tmp_path / "a file")}
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_somebody_elses_file_is_no_secret(tmp_path: Path) -> None:
    own = {"XDG_CONFIG_HOME": str(tmp_path)}
    job_key(own, "a job")
    os.chown(tmp_path / "whale-train" / "secret", 65534, 65534)
    assert "is no secret" in refusal(own)
