"""The folder of profiles: what is kept is found, and whatever is wrong with it is no fault."""

import os
from pathlib import Path

import pytest
from tests.unit.operation_graphs import bert, gpt

from whale_train.launcher.planning.profile_cache import (
    MOST_KEPT,
    keep_profile,
    kept_profile,
    profiles_folder,
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHALE_TRAIN_CACHE", str(tmp_path / "cache" / "here"))


def test_it_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert profiles_folder() == tmp_path / "cache" / "here" / "profiles"
    monkeypatch.delenv("WHALE_TRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert profiles_folder() == Path("/somewhere/whale-train/profiles")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profiles_folder() == Path.home() / ".cache" / "whale-train" / "profiles"


def test_what_is_kept_is_found() -> None:
    assert kept_profile("a") is None
    keep_profile("a", gpt())
    keep_profile("b", bert())
    assert (kept_profile("a"), kept_profile("b"), kept_profile("c")) == (gpt(), bert(), None)
    keep_profile("a", bert())
    assert kept_profile("a") == bert()
    assert sorted(path.name for path in profiles_folder().iterdir()) == ["a.json", "b.json"]


@pytest.mark.parametrize("damage", [b"", b"[]", b"\xff\xfe", None])
def test_a_damaged_file_is_not_there_and_is_written_again(damage: bytes | None) -> None:
    keep_profile("a", gpt())
    path = profiles_folder() / "a.json"
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    assert kept_profile("a") is None
    keep_profile("a", gpt())
    assert kept_profile("a") == gpt()


def test_a_folder_that_cannot_be_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("/dev/null"), Path("/proc/none")):
        monkeypatch.setenv("WHALE_TRAIN_CACHE", str(place))
        keep_profile("a", gpt())
        assert kept_profile("a") is None


def test_the_longest_unused_are_removed() -> None:
    for number in range(MOST_KEPT):
        keep_profile(f"{number}", gpt())
        os.utime(profiles_folder() / f"{number}.json", (number, number))
    assert kept_profile("0") == gpt()  # which is used by being read
    for name in ("new", "newer"):
        keep_profile(name, gpt())
    found = {path.stem for path in profiles_folder().iterdir()}
    assert len(found) == MOST_KEPT
    assert {"0", "new", "newer"} <= found
    assert {"1", "2"}.isdisjoint(found)
