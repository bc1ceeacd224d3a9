#!/bin/sh
# hydra-core 1.3.8, seen on 2026-11-28.
#
# One expects: an application's own file hydra/sweeper/mine.yaml to be what `hydra/sweeper=mine` means, and
# at `version_base="1.3"` no schema to be looked for by name: its warning says that this "will be removed
# in Hydra 1.2".
# What happens: a config of that group and name that any installed plugin registers is the schema of the
# file. Installing the plugin, unused, has a key of the file refused that it had before.
# What to do: name such files otherwise than plugins' configs, or take theirs out of the ConfigStore.
#
# Exits 0 while hydra behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q hydra-core==1.3.8
mkdir -p "$folder/conf/hydra/sweeper" "$folder/plugins/hydra_plugins/other"
cd "$folder"
echo "x: 1" >conf/config.yaml
cat >conf/hydra/sweeper/mine.yaml <<'YAML'
_target_: hydra._internal.core_plugins.basic_sweeper.BasicSweeper
max_batch_size: null
params: null
YAML
touch plugins/hydra_plugins/other/__init__.py
cat >plugins/hydra_plugins/other/config.py <<'PY'
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore


@dataclass
class Mine:
    _target_: str = "hydra_plugins.other.Sweeper"


ConfigStore.instance().store(group="hydra/sweeper", name="mine", node=Mine)
PY
cat >app.py <<'PY'
import hydra


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config):
    print(f"x is {config.x}")


main()
PY
python="$folder/venv/bin/python -W ignore"
$python app.py -m hydra/sweeper=mine x=1,2
echo "with the plugin installed:"
if PYTHONPATH=plugins $python app.py -m hydra/sweeper=mine x=1,2 >said 2>&1; then
    cat said
    exit 1
fi
grep -v "^$" said | head -3
grep -q "Key 'max_batch_size' not in 'Mine'" said
