"""Files that are kept between runs, damaged: none gives a traceback, and none another figure."""

import json
from hashlib import sha256
from pathlib import Path
from random import Random

import pytest
import yaml
from tests.damage import as_json, damaged, damaged_text
from tests.pairs import IS_FULL
from tests.unit.operation_graphs import gpt
from tests.unit.test_calibration import MEASURED

from whale_train.errors import ConfigError
from whale_train.launcher.planning import profile_cache
from whale_train.launcher.planning.devices import calibrations
from whale_train.strategies.graph.profile_json import profile_to_json

COUNT = 3000 if IS_FULL else 60
WRITTEN = yaml.safe_dump(MEASURED.to_mapping(), sort_keys=False)


@pytest.mark.parametrize("part", range(COUNT // 30))
def test_a_damaged_calibration_is_none_or_the_same(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHALE_TRAIN_CALIBRATIONS", str(tmp_path))
    path = tmp_path / "cpu_process-1-threads.yaml"
    for seed in range(part * 30, part * 30 + 30):
        random = Random(seed)
        content = damaged_text(WRITTEN, random)
        if seed % 2:
            try:
                content = yaml.safe_dump(damaged(MEASURED.to_mapping(), random)).encode()
            except RecursionError:
                content = b"[" * 5000
        path.write_bytes(content)
        try:
            found, refused = calibrations.with_kept_calibrations(), set[str]()
        except ConfigError as error:
            found, refused = [], {fault.key for fault in error.faults}
        refused_by_path = refused == {str(path)}
        same = found == [MEASURED] or (found and "checksum" not in yaml.safe_load(content))
        assert refused_by_path or same, (seed, content)


@pytest.mark.parametrize("part", range(COUNT // 30))
def test_a_damaged_profile_is_measured_again(
    part: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WHALE_TRAIN_CACHE", str(tmp_path))
    profile = gpt()
    written = profile_to_json(profile)
    profile_cache.keep_profile("key", profile)
    assert profile_cache.kept_profile("key") == profile
    path = tmp_path / "profiles/key.json"
    assert path.read_text(encoding="utf-8") == written
    for seed in range(part * 30, part * 30 + 30):
        random = Random(seed)
        content = damaged_text(written, random)
        if seed % 2:  # as another version would write it, its checksum included
            text = as_json(damaged(json.loads(written.partition("\n")[2]), random))
            content = f"{sha256(text.encode()).hexdigest()}\n{text}".encode()
        path.write_bytes(content)
        found = profile_cache.kept_profile("key")
        if not seed % 2:
            assert found is None or content == written.encode(), seed
        said = capsys.readouterr().err
        assert (found is None) == said.startswith(f"note: {path} "), seed
