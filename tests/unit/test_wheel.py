"""A wheel has every module and every config file, whatever folder it is used from."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_wheel_has_all_files(tmp_path: Path) -> None:
    kept = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=kept)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    expected = {
        str(path.relative_to(tmp_path / "src"))
        for path in (tmp_path / "src").rglob("*")
        if path.is_file()
    }
    program = "from setuptools.build_meta import build_wheel; build_wheel('wheel')"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        inside = {name for name in files.namelist() if ".dist-info/" not in name}
        (commands,) = (x for x in files.namelist() if x.endswith("entry_points.txt"))
        assert "whale-train = whale_train.launcher.cli:main" in files.read(commands).decode()
    assert inside == expected
    assert {"whale_train/conf/config.yaml", "whale_train/py.typed"} <= inside
