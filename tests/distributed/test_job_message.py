"""Whom the ranks of a job believe: who has its key, and nobody who merely reaches its store."""

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from whale_train.errors import LaunchError
from whale_train.machine.hosts import HOSTS, Seen, hosts_to_json, joined
from whale_train.runtime.base.job_key import KEY, JobKey
from whale_train.runtime.failures.exchange import FailureExchange
from whale_train.runtime.failures.failure import RankError
from whale_train.runtime.process.job_folder import JobFolder
from whale_train.runtime.process.job_message import FILES, Job, opened, sealed

OURS, THEIRS = JobKey(b"k" * 32), JobKey(b"q" * 32)
DEADLINE_S = 60


def ready(folder: Path, request: str = "{}", *, shares: bool = True) -> Path:
    """A run directory of two hosts with a rank each, of which the second `shares` it."""
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text(request)
    seen = (Seen(f"{n}", f"host{n}", 2, 10**9, (), shares or n == 0) for n in (0, 1))
    (folder / HOSTS).write_text(hosts_to_json(joined(seen)))
    (folder / "ready").write_text("")
    (folder / "logs").mkdir()
    return folder


def test_a_message_is_believed_as_it_was_sealed(tmp_path: Path) -> None:
    job = Job.read(ready(tmp_path / "run"))
    told = sealed(OURS, job)
    assert opened(OURS, told) == job
    assert opened(OURS, sealed(OURS, None)) is None
    others = (told[:-1] + b"?", b"?" + told[1:], told[:40], b"", sealed(THEIRS, job))
    for message in others:
        with pytest.raises(LaunchError, match="of rank 0 was not signed by a rank of this job"):
            opened(OURS, message)


@pytest.mark.parametrize("key", ["", "00", "no hexadecimal digits", "00" * 31])
def test_a_key_that_is_none_signs_nothing(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, key)
    with pytest.raises(LaunchError, match="is not a key: start ranks by whale-train"):
        JobKey.from_environment()
    monkeypatch.delenv(KEY)
    with pytest.raises(LaunchError, match="is not a key"):
        JobKey.from_environment()


def test_a_failure_that_nobody_of_the_job_signed_is_left_out() -> None:
    store = HashStore()
    error = RankError(1, 0.0, "ValueError", "told by a stranger", False, None, "")
    FailureExchange(store, THEIRS, 2).tell(error)
    assert FailureExchange(store, OURS, 2).heard() == {}
    FailureExchange(store, OURS, 2).tell(replace(error, rank=0))
    assert FailureExchange(store, OURS, 2).heard() == {0: replace(error, rank=0)}


def test_a_plan_of_thousands_of_ranks_fits_into_a_store(tmp_path: Path) -> None:
    run_dir = ready(tmp_path / "run")
    ranks = ",".join(f'{{"rank": {rank}, "device": "A100_SXM4_80GB"}}' for rank in range(200_000))
    (run_dir / "plan.json").write_text(ranks)
    assert len(ranks) > 8 << 20  # torch's most
    assert len(sealed(OURS, Job.read(run_dir))) < 4 << 20


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    run_dir = ready(tmp_path / "run")
    job = Job.read(run_dir)
    assert job.unlike() is None
    (run_dir / "plan.json").write_text("{ }")
    assert job.unlike() == "plan.json"
    (run_dir / "request.json").unlink()
    assert job.unlike() == "request.json"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        # Who was first at the store, without the key: by a guess, and by copying its keys' names.
        pytest.param("before rank 0", "has another key than rank 1", marks=pytest.mark.full),
        (
            "at the right name",
            "of rank 0 was not signed by a rank of this job, and is not believed",
        ),
        # Rank 0, whose file system shows something else here.
        ("other files", "request.json is not on host1 what rank 0 sent rank 1"),
        pytest.param(
            "no such folder",
            "run cannot be made a run directory on host host1 (Not a directory)",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_rank_runs_what_its_rank_0_sent_or_nothing(told: str, said: str, tmp_path: Path) -> None:
    """`python -m whale_train.runtime.process.external_rank` as rank 1, for a rank 0 that is this
    test. The request names a module that leaves a file when it is imported."""
    (tmp_path / "stranger.py").write_text("open('was_here', 'w')\n")
    shares = told != "no such folder"
    (tmp_path / "there").mkdir()
    net = '{"model": {"_target_": "stranger.Net"}}'
    run_dir = ready(tmp_path / "there" / "run", net, shares=shares)
    store = TCPStore("localhost", 0, None, True, timedelta(seconds=DEADLINE_S), False)
    public = PrefixStore("whale_train", store)
    own = PrefixStore(OURS.nonce, public)
    job, folder = Job.read(run_dir), JobFolder.made(run_dir).to_json()
    if told == "before rank 0":
        public.set("key", "0" * 64)
        public.set("run_dir", str(run_dir))
    elif told == "at the right name":
        public.set("key", OURS.fingerprint)
        own.set("folder", THEIRS.signed(folder))
    else:
        public.set("key", OURS.fingerprint)
        own.set("folder", OURS.signed(folder))
        own.set("job", sealed(OURS, job))
    if told == "other files":
        (run_dir / "request.json").write_text('{"model": {"_target_": "stranger.Other"}}')
    elif told == "no such folder":
        run_dir.parent.rename(tmp_path / "moved")
        run_dir.parent.touch()
    environment = {
        **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), KEY: (b"k" * 32).hex()},
    }
    member = subprocess.run(
        [sys.executable, "-m", "whale_train.runtime.process.external_rank"],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert member.returncode == 1, member.stderr
    assert said in member.stderr
    assert not (tmp_path / "was_here").exists()
