#!/usr/bin/env bash
# Compare strategies and learning rates on one model; ends with one table of all jobs.
# Further arguments are overrides, as in: scripts/sweep.sh hardware=cpu train.steps=20
exec whale-train -m strategy=dp,zero1,zero3 optimizer.lr=1e-3,3e-3 "$@"
