#!/usr/bin/env bash
# Every strategy this version executes, a few steps each on two CPU processes: what a CI runs.
# Further arguments are overrides, as in: scripts/smoke.sh model=class_head data=classes
set -u
status=0
for strategy in single dp zero1 zero2 zero3 zero2_offload zero3_offload hybrid_split_dp; do
  if whale-train experiment=smoke strategy="$strategy" "$@" >"smoke_$strategy.log" 2>&1; then
    echo "ok      $strategy"
    rm "smoke_$strategy.log"
  else
    echo "FAILED  $strategy (smoke_$strategy.log)"
    status=1
  fi
done
exit $status
