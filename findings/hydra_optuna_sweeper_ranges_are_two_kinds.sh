#!/bin/sh
# hydra-optuna-sweeper 1.3.0 with hydra-core 1.3.8 and optuna 2.10.1, seen on 2026-11-28.
#
# One expects: x=range(0,10,3) to be 0, 3, 6 and 9, which Hydra's own sweeper makes of it, or, should its
# stop belong to it, of x=range(1,4) to be the same values under every sampler.
# What happens: under a random sampler range(1,4) has 4 as well. Under `sampler=grid` it has not, and
# range(0,10,3) has lost its 9: the number of points is rounded down.
# What to do: write choice(0,3,6,9).
#
# Exits 0 while hydra-optuna-sweeper behaves so, 1 when it no longer does.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q hydra-optuna-sweeper==1.3.0 hydra-core==1.3.8 optuna==2.10.1
cd "$folder"
cat >app.py <<'PY'
import hydra


@hydra.main(config_path=None, version_base="1.3")
def main(config):
    print(config.x)
    return 0.0


main()
PY
values() { "$folder/venv/bin/python" -W ignore app.py -m "$@" 2>&1 | grep -x '[0-9]*' | sort -nu | xargs; }
optuna="hydra/sweeper=optuna hydra.sweeper.n_trials=30"
plain=$(values '+x=range(0,10,3)')
random=$(values $optuna hydra/sweeper/sampler=random '+x=range(1,4)' hydra.sweeper.sampler.seed=1)
grid=$(values $optuna hydra/sweeper/sampler=grid '+x=range(0,10,3)')
echo "range(0,10,3), Hydra's own sweeper: $plain"
echo "range(1,4), at random: $random"
echo "range(0,10,3), as a grid: $grid"
[ "$plain, $random, $grid" = "0 3 6 9, 1 2 3 4, 0 3 6" ]
