"""Copies of checkpoints in a store: what is there after which failure, and whose it is."""

import json
import shutil
import zlib
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

from whale_train.checkpoints import url_path
from whale_train.checkpoints.checkpoint_files import (
    BEST,
    FileRecord,
    Manifest,
    check,
    checkpoints_in,
    folder_of,
)
from whale_train.checkpoints.copy_to_store import (
    copy_best,
    copy_checkpoint,
    hold,
    prune,
    release,
    remove_after,
)
from whale_train.checkpoints.safetensors_files import BrokenCheckpoint
from whale_train.checkpoints.url_path import StoreError, UrlPath, is_url, place_of
from whale_train.errors import ConfigError
from whale_train.launcher.job_end import JobEnd
from whale_train.launcher.resume import find_checkpoint
from whale_train.launcher.store.copies import StoreCopies
from whale_train.launcher.store.refuse_url import claim, refuse_store, run_of, url_faults

TO = UrlPath("odd://runs/mine")


class OddFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory that writes down what it is asked for, and fails when told to."""

    protocol = "odd"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    log: ClassVar[list[str]] = []
    failures: ClassVar[dict[str, int]] = {}  # how often to fail, by a part of the path

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("odd://").strip("/")

    def _asked(self, doing: str, path: str) -> None:
        self.log.append(f"{doing} {self._strip_protocol(path)}")
        for part, left in self.failures.items():
            if part in path and doing == "put" and left:
                self.failures[part] -= 1
                raise PermissionError(f"403 for {part}")

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self._asked("put", rpath)
        super().put_file(lpath, rpath, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self._asked("put", path)
        super().pipe_file(path, value, **options)

    def rm(self, path: str, **options: Any) -> None:
        self._asked("rm", path)
        super().rm(path, **options)


@pytest.fixture(autouse=True)
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("odd", OddFileSystem, clobber=True)
    monkeypatch.setattr(url_path, "PAUSES_S", (0.0, 0.0, 0.0))
    for kept in (OddFileSystem.store, OddFileSystem.log, OddFileSystem.failures):
        kept.clear()
    OddFileSystem.pseudo_dirs[:] = [""]


def saved(run_dir: Path, step: int) -> Path:
    """A checkpoint of two files."""
    made = folder_of(run_dir, step)
    texts = {"model/rank_0_0.bin": f"weights {step}", "state.json": f'{{"step": {step}}}'}
    for name, text in texts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    records = [FileRecord(x, len(y), zlib.crc32(y.encode())) for x, y in texts.items()]
    (made / "manifest.json").write_text(Manifest(step, 0.1, tuple(records)).to_json())
    return made


def copied(run_dir: Path, *steps: int) -> None:
    for step in steps:
        copy_checkpoint(saved(run_dir, step), TO / f"step_{step}", lambda size: None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((x, True) for x in ("s3://b/x", "memory://", "dir::file:///x", "abfs+x://y")),
        *((x, False) for x in ("runs/x", "/runs/x", "auto", "runs:/x", "a b://x", "./s3://x")),
    ],
)
def test_urls_are_told_from_paths(text: str, expected: bool) -> None:
    assert is_url(text) is expected
    assert isinstance(place_of(text), UrlPath if expected else Path)


def test_a_url_has_parts_like_a_path() -> None:
    path = UrlPath.of("s3://bucket/run/")
    assert str(path / "step_1" / "model") == "s3://bucket/run/step_1/model"
    assert (path / "a.json").name == "a.json"
    assert (path / "a.json").suffix == ".json"
    assert (path / "a.json").parent == path
    assert str(UrlPath.of("memory://") / "x") == "memory://x"


def test_a_manifest_is_written_last_and_removed_first(tmp_path: Path) -> None:
    copied(tmp_path, 4)
    assert check(TO / "step_4") == check(folder_of(tmp_path, 4))
    puts = [x for x in OddFileSystem.log if x.startswith("put")]
    assert puts[-1] == "put /runs/mine/step_4/manifest.json"
    assert len(puts) == 3
    copied(tmp_path, 4)  # it is there
    assert len([x for x in OddFileSystem.log if x.startswith("put")]) == 3
    OddFileSystem.log.clear()
    (TO / "step_4" / "manifest.json").write_bytes(b"of another")
    copied(tmp_path, 4)
    assert OddFileSystem.log[1:3] == ["rm /runs/mine/step_4/manifest.json", "rm /runs/mine/step_4"]
    assert check(TO / "step_4").step == 4


@pytest.mark.parametrize("times", [2, 3])
def test_a_store_that_fails_for_a_while(tmp_path: Path, times: int) -> None:
    OddFileSystem.failures["state.json"] = times
    copied(tmp_path, 4)
    assert OddFileSystem.failures["state.json"] == 0
    assert check(TO / "step_4").step == 4


def test_a_store_that_always_fails_is_named(tmp_path: Path) -> None:
    OddFileSystem.failures["rank_0_0.bin"] = 100
    said = "odd://runs/mine/step_4/model/rank_0_0.bin: PermissionError: 403 for rank_0_0.bin"
    with pytest.raises(StoreError, match=said):
        copied(tmp_path, 4)
    assert OddFileSystem.failures["rank_0_0.bin"] == 96  # an attempt and three more
    assert not (TO / "step_4" / "manifest.json").exists()


def test_what_is_cut_off_in_a_store_is_no_checkpoint(tmp_path: Path) -> None:
    copied(tmp_path, 2, 4, 6)
    shutil.rmtree(tmp_path / "checkpoints")
    (TO / "step_6" / "manifest.json").remove()
    (TO / "step_4" / "model" / "rank_0_0.bin").write_bytes(b"short")
    found = find_checkpoint("auto", tmp_path, TO)
    assert found is not None
    assert (str(found.path), found.step) == ("odd://runs/mine/step_2", 2)
    assert found.broken == (f"{TO}/step_4/model/rank_0_0.bin has 5 of 9 bytes",)
    with pytest.raises(BrokenCheckpoint, match=r"rank_0_0\.bin has 5 of 9 bytes"):
        check(TO / "step_4")


def test_the_newest_of_here_and_there_is_taken(tmp_path: Path) -> None:
    copied(tmp_path, 2, 4)
    assert find_checkpoint("auto", tmp_path, TO).path == folder_of(tmp_path, 4)  # type: ignore[union-attr]
    shutil.rmtree(folder_of(tmp_path, 4))
    assert find_checkpoint("auto", tmp_path, TO).path == TO / "step_4"  # type: ignore[union-attr]
    assert find_checkpoint("auto", tmp_path / "other", TO / "none") is None


def test_old_checkpoints_go_and_the_best_stays(tmp_path: Path) -> None:
    copied(tmp_path, 2, 4, 6, 8)
    (tmp_path / "checkpoints" / BEST).write_text('{"step": 4}')
    copy_best(tmp_path / "checkpoints", TO)
    (TO / "step_10" / "state.json").write_bytes(b"cut off")
    assert prune(TO, 2) == [4, 6, 8]
    assert [x.name for x in sorted(checkpoints_in(TO))] == ["step_4", "step_6", "step_8"]
    assert prune(TO, None) == [4, 6, 8]
    remove_after(TO, 6)
    assert [x.name for x in sorted(checkpoints_in(TO))] == ["step_4", "step_6"]


def test_a_checkpoint_is_held_while_it_is_copied(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, 2)
    held = hold(checkpoint)
    assert held is not None
    shutil.rmtree(checkpoint)
    assert check(held).step == 2
    assert checkpoints_in(tmp_path / "checkpoints") == []
    release(held)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert hold(checkpoint) is None


def test_a_store_is_of_one_run(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for run_dir in (first, second):
        run_dir.mkdir()
    refuse_store(TO, first, None)
    claim(TO, first)
    refuse_store(TO, second, None)  # nothing there would be overwritten yet
    copied(first, 2)
    refuse_store(TO, first, None)
    said = "checkpoint.to=odd://runs/mine holds the checkpoints of another run; name another folder"
    with pytest.raises(ConfigError, match=f"{said}, or go on with that run by train.resume=auto$"):
        refuse_store(TO, second, None)
    refuse_store(TO, second, "auto")
    claim(TO, second)
    assert run_of(second) == run_of(first) == run_of(TO)
    third = tmp_path / "third"
    saved(third, 2)
    with pytest.raises(ConfigError, match=f"{said}$"):
        refuse_store(TO, third, "auto")
    assert not [x for x in OddFileSystem.store if "probe" in x]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("fil:///x", "names the protocol fil, which fsspec does not know; did you mean file?"),
        ("qqq://b", "which fsspec does not know; use one that it knows, as file, s3 or gs, or"),
        ("ftp://me:secret@host/x", "k=ftp://host/x has a password, which logs and the files of"),
        ("dir::qqq:///x", "names the protocol qqq, which fsspec does not know"),
        ("file:///x", ""),
    ],
)
def test_urls_that_nothing_serves(url: str, expected: str) -> None:
    said = "\n".join(map(str, url_faults("k", url)))
    assert expected in said
    assert bool(said) == bool(expected)
    assert "secret" not in said


def copies_of(run_dir: Path, keep: int | None = None) -> tuple[StoreCopies, StringIO]:
    printed = StringIO()
    return StoreCopies(TO, keep, Console(file=printed, width=200)), printed


def test_a_run_is_copied_beside_its_steps(tmp_path: Path) -> None:
    copies, printed = copies_of(tmp_path, keep=1)
    copies.begin(tmp_path, 0)
    for step in (2, 4):
        saved(tmp_path, step)
        copies.poll()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("weights")
    (tmp_path / "summary.json").write_text('{"steps": 4}')
    end = copies.finished(JobEnd("done", tmp_path, {"steps": 4}), lambda: None)
    assert end.status == "done"
    expected = {"to": str(TO), "steps": [4], "model": True, "errors": {}}
    assert end.summary["copies"] == expected
    assert json.loads((tmp_path / "summary.json").read_text())["copies"] == expected
    assert f"copied: {TO}/step_4 (" in printed.getvalue()
    assert (TO / "model" / "model.safetensors").read_text() == "weights"
    shutil.rmtree(folder_of(tmp_path, 2))  # as the run does, which keeps as many
    again, _ = copies_of(tmp_path, keep=1)
    OddFileSystem.log.clear()
    again.begin(tmp_path, 4)
    assert again.finished(JobEnd("failed", tmp_path, said="why"), lambda: None).said == "why"
    assert not [x for x in OddFileSystem.log if x.startswith("put")]


def test_a_run_without_its_last_copy_has_failed(tmp_path: Path) -> None:
    OddFileSystem.failures["step_4/model"] = OddFileSystem.failures["step_2/state"] = 100
    copies, printed = copies_of(tmp_path)
    copies.begin(tmp_path, 0)
    saved(tmp_path, 2)
    saved(tmp_path, 4)
    end = copies.finished(JobEnd("done", tmp_path), lambda: None)
    lost = f"step_4 of {tmp_path} could not be copied to {TO}"
    assert (end.status, end.said) == ("failed", lost)
    assert printed.getvalue().count("warning: step_4 is not copied") == 1
    OddFileSystem.failures["step_4/model"] = 0
    again, _ = copies_of(tmp_path)
    again.begin(tmp_path, 4)
    (tmp_path / "summary.json").write_text("{}")
    end = again.finished(JobEnd("done", tmp_path), lambda: None)
    assert end.status == "done"  # the last one is there, though not all are
    (error,) = end.summary["copies"]["errors"].values()
    assert "403 for step_2/state" in error


def test_two_runs_do_not_mix(tmp_path: Path) -> None:
    for name in ("a", "b"):
        saved(tmp_path / name, 2)
    first, _ = copies_of(tmp_path / "a")
    first.begin(tmp_path / "a", 0)
    second, _ = copies_of(tmp_path / "b")
    second.begin(tmp_path / "b", 0)  # before the first has copied anything
    end = first.finished(JobEnd("done", tmp_path / "a"), lambda: None)
    assert end.status == "failed"
    assert second.finished(JobEnd("done", tmp_path / "b"), lambda: None).status == "done"
